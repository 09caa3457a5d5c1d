#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/dist_optim/named_values.h"

namespace stitch::optim {

// The contents of a shard: one owner's file of a checkpoint (docs/checkpoints.md).

// The beginning of a shard.
struct ShardHeader {
  std::string optimizer;            // its type, "torch::optim::Adam"
  std::string owner;                // the worker that owns these parameters
  std::vector<std::string> owners;  // of the whole checkpoint: complete when each has a shard
  std::string save_id;  // equal in all shards of one save; later saves have greater ones
  NamedValues options;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(optimizer, owner, owners, save_id, options);
  }
};

// One parameter in a shard. `state` is absent for a parameter that had not been stepped yet.
struct SavedParameter {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::optional<NamedValues> state;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(name, sizes, state);
  }
};

// Both throw Error(invalid_argument) naming the file when it is truncated, of another version or
// not a checkpoint. Memory is allocated only for data that the file is long enough to hold.

// Reads a whole shard. `each` receives the parameters one by one, before the checksum has been
// verified: discard them when this throws, which it also does for a wrong checksum.
ShardHeader read_shard(const std::filesystem::path& file,
                       const std::function<void(SavedParameter)>& each);

// Reads the header and, into `first`, the name and sizes of the first parameter; the checksum is
// not verified.
[[nodiscard]] ShardHeader read_shard_header(const std::filesystem::path& file,
                                            SavedParameter& first);

// Writes one owner's shard under a temporary name, next to the published one if there is one:
// publish() (checkpoint.h) renames it. An unfinished file is removed by the destructor. All
// functions throw Error(invalid_argument) naming the file. Thread contract: one thread.
class ShardWriter {
 public:
  // Creates the folder. `parameters`: the number of add() calls before finish().
  ShardWriter(const std::filesystem::path& folder, const ShardHeader& header,
              std::size_t parameters);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  void add(const SavedParameter& parameter);
  // Appends the checksum and fsyncs the file.
  void finish();

 private:
  class File;
  std::unique_ptr<File> file_;
};

}  // namespace stitch::optim
