#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>

#include "stitch/dist_optim/shard.h"

namespace stitch::optim {

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
