#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/dist_optim/named_values.h"

namespace stitch::optim {

// A checkpoint is a folder with one file per owner of parameters, "<owner>.optimizer". The format
// (docs/checkpoints.md) is stitch's own: named, typed values, a version, a checksum over all of it.
// Files are read and written on the file system of the worker that calls: no path is sent
// to another worker. Errors are Error(invalid_argument) and name the file.

// The header of a file.
struct ShardHeader {
  std::string optimizer;            // its type, "torch::optim::Adam"
  std::string owner;                // whose parameters these are
  std::vector<std::string> owners;  // all of the checkpoint: it is complete when all are there
  std::string save_id;              // equal in all files of one save; later saves have greater ones
  NamedValues options;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(optimizer, owner, owners, save_id, options);
  }
};

// A parameter in a file. Its state is absent if it had not been stepped yet.
struct SavedParameter {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::optional<NamedValues> state;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(name, sizes, state);
  }
};

// A new identity for the files of one save: the time and a random number.
[[nodiscard]] std::string new_save_id();

// Throws when the folder has the checkpoint of another type of optimizer, which a save would
// replace.
void expect_folder_for(const std::filesystem::path& folder, const std::string& optimizer);

// Writes one owner's file beside the one that may exist already; only publish() replaces that one.
// An unfinished file is removed with the writer. Thread contract: one thread.
class ShardWriter {
 public:
  // Makes the folder. `parameters`: how many will be added.
  ShardWriter(const std::filesystem::path& folder, const ShardHeader& header,
              std::size_t parameters);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  void add(const SavedParameter& parameter);
  // The file is on the disk when this returns.
  void finish();

 private:
  class File;
  std::unique_ptr<File> file_;
};

// Puts the finished files of a save in place of the older ones, all or none: if the process dies
// in between, find_shards() uses the finished files. Files of owners that the save does not
// have are removed.
void publish(const std::filesystem::path& folder, const std::vector<std::string>& owners);

// The files of the folder's checkpoint, each read once and checked for damage. Throws when there is
// none, or files of several saves of which none is complete.
[[nodiscard]] std::vector<std::filesystem::path> find_shards(const std::filesystem::path& folder);

// Reads a file from end to end; `each` gets the parameters one by one, before the checksum has been
// verified. Throws when the file is damaged, truncated, of another version or no checkpoint; memory
// use is bounded by the file's size.
ShardHeader read_shard(const std::filesystem::path& file,
                       const std::function<void(SavedParameter)>& each);

// For loading: throw, naming the file, when it is of another type of optimizer, when a saved
// parameter is not wanted (`sizes` is null) or has other sizes; and the error for one that no file
// has.
void check_optimizer(const std::filesystem::path& file, const ShardHeader& header,
                     const std::string& optimizer);
void check_saved(const std::filesystem::path& file, const SavedParameter& saved,
                 const std::vector<std::int64_t>* sizes);
[[nodiscard]] Error missing_parameter(const std::filesystem::path& folder,
                                      const std::string& parameter);

}  // namespace stitch::optim
