#pragma once

#include <string>
#include <string_view>

#include "stitch/base/descriptor.h"

namespace stitch::base {

// Folders and files that another user of the host may have planted. Thread contract: any thread.

// Opens a folder for files of this user: it belongs to this user or to root, no other user may
// write in it, and it is no link. Throws Error(invalid_argument) with the reason.
[[nodiscard]] Descriptor open_own_folder(std::string path);

// Makes a file of mode 0600 in an open folder, to be written. A file, link or pipe that has the
// name is removed and never opened. Empty, with errno set, where that cannot be done.
[[nodiscard]] Descriptor make_file(int folder, const std::string& name);

// Writes a file whole or not at all: readers see no half of it. False, with errno set, where that
// cannot be done.
[[nodiscard]] bool write_file(int folder, const std::string& name, std::string_view text);

}  // namespace stitch::base
