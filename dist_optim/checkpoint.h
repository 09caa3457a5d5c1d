#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/dist_optim/shard.h"  // IWYU pragma: export

namespace stitch::optim {

// A checkpoint is a folder with one shard per owner of parameters, "<owner>.optimizer", in stitch's
// own format (docs/checkpoints.md). The worker that saves or loads reads and writes all files, on
// its own file system; paths are never sent. Unless stated otherwise, errors are
// Error(invalid_argument) and name the file. Thread contract: any thread, but not two saves into
// one folder at the same time.

// A new id for the shards of one save: 32 hexadecimal digits from the time and a random number.
// Throws Error(internal) without a source of random numbers.
[[nodiscard]] std::string new_save_id();

// Throws when the folder holds the checkpoint of another optimizer, which a save would overwrite:
// one of another type, or of a parameter that is not among these, by name and sizes.
void expect_folder_for(const std::filesystem::path& folder, const std::string& optimizer,
                       const std::vector<std::vector<SavedParameter>>& parameters);

// Renames the finished shards of a save over the previous ones and removes the shards of all other
// owners. Atomic for a reader: if the process dies between two renames, find_shards() finds the
// finished shards under their temporary names.
void publish(const std::filesystem::path& folder, const std::vector<std::string>& owners);

// The shards of the folder's latest complete save, each read once and its checksum verified. Throws
// when there is none.
[[nodiscard]] std::vector<std::filesystem::path> find_shards(const std::filesystem::path& folder);

// Checks of a load. The first three throw, naming the file: when the shard is of another type of
// optimizer; has another number of groups; when the optimizer does not have the saved parameter
// (`sizes` is null) or has it with another shape. The last makes the error for a parameter that no
// shard has.
void check_optimizer(const std::filesystem::path& file, const ShardHeader& header,
                     const std::string& optimizer);
void check_groups(const std::filesystem::path& file, std::size_t saved, std::size_t groups);
void check_saved(const std::filesystem::path& file, const SavedParameter& saved,
                 const std::vector<std::int64_t>* sizes);
[[nodiscard]] Error missing_parameter(const std::filesystem::path& folder,
                                      const std::string& parameter);

}  // namespace stitch::optim
