#pragma once

#include <memory>
#include <string>

#include "stitch/transport/store/store.h"

namespace stitch::transport {

// A store in one file, shared by processes of one host or over a file system with working locks
// (flock). A log of checksummed records: a writer that dies leaves at most a torn last record,
// which the next writer truncates. A file of more than 4 MiB that is four times as long as what it
// holds is written anew, where the folder lets this user do that. Throws Error(invalid_argument)
// naming the path when it cannot be opened or is not a stitch store.
[[nodiscard]] std::shared_ptr<Store> make_file_store(const std::string& path);

}  // namespace stitch::transport
