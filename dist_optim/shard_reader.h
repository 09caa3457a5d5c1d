#pragma once

#include <filesystem>
#include <functional>

#include "stitch/dist_optim/shard.h"

namespace stitch::optim {

// Both throw Error(invalid_argument) naming the file when it is truncated, of another version or
// not a checkpoint. Memory is allocated only for data that the file is long enough to hold.

// Reads a whole shard. `each` receives the parameters one by one, before the checksum has been
// verified: discard them when this throws, which it also does for a wrong checksum.
ShardHeader read_shard(const std::filesystem::path& file,
                       const std::function<void(SavedParameter)>& each);

// Reads the header only; the checksum is not verified.
[[nodiscard]] ShardHeader read_shard_header(const std::filesystem::path& file);

}  // namespace stitch::optim
