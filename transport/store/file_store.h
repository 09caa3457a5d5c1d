#pragma once

#include <memory>
#include <string>

#include "stitch/transport/store/store.h"

namespace stitch::transport {

// A store in files, for processes of one host or over a file system with working locks (fcntl).
// `path` is locked by the process that writes, and has the claims: the claim of a key is a record
// whose first byte its process has locked, so the kernel ends it with the process. The values are
// in `path`.values, which is written as a whole beside it and renamed, so that no reader sees a
// part of it. Both have mode 0600. Throws Error(invalid_argument) naming the path when a file
// cannot be opened, belongs to another user, may be used by others, or is not a stitch store. When
// the file at `path` is deleted or replaced, all calls fail with `disconnected`. Processes that
// wait look at the files at growing intervals of at most a tenth of a second.
[[nodiscard]] std::shared_ptr<Store> make_file_store(const std::string& path);

}  // namespace stitch::transport
