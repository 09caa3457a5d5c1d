#include "stitch/dist_optim/checkpoint.h"

#include <ATen/core/ATen_fwd.h>
#include <fcntl.h>
#include <sodium.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>

#include "stitch/base/descriptor.h"
#include "stitch/base/error.h"
#include "stitch/base/random.h"
#include "stitch/dist_optim/shard_format.h"

namespace stitch::optim {

namespace fs = std::filesystem;

namespace {

// The regular files of the folder whose names end with `suffix`, sorted.
std::vector<fs::path> files_of(const fs::path& folder, std::string_view suffix) {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (it->path().filename().string().ends_with(suffix) && it->is_regular_file(ignored))
      found.push_back(it->path());
  }
  if (error) refuse_checkpoint(folder, "cannot be read: " + error.message());
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

std::string new_save_id() {
  std::array<unsigned char, 16> id{};
  base::fill_random(std::as_writable_bytes(std::span(id)));
  const auto now = static_cast<std::uint64_t>(
      std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count());
  for (std::size_t i = 0; i < 8; ++i) id[i] = static_cast<unsigned char>(now >> (56 - 8 * i));
  std::string text(id.size() * 2 + 1, '\0');
  sodium_bin2hex(text.data(), text.size(), id.data(), id.size());
  text.pop_back();
  return text;
}

void expect_folder_for(const fs::path& folder, const std::string& optimizer,
                       const std::vector<std::vector<SavedParameter>>& parameters) {
  std::error_code ignored;
  if (!fs::exists(folder, ignored)) return;
  std::map<std::string, std::vector<std::int64_t>> own;
  for (const auto& part : parameters) {
    for (const auto& parameter : part) own.emplace(parameter.name, parameter.sizes);
  }
  for (const auto& file : files_of(folder, kShardSuffix)) {
    SavedParameter first;
    const auto header = [&] {
      try {
        return read_shard_header(file, first);
      } catch (const Error& error) {
        throw Error(error.code(),
                    std::string(error.what()) + "; to save into this folder, remove that file");
      }
    }();
    const std::string rule = ": each optimizer needs a folder of its own";
    if (header.optimizer != optimizer)
      refuse_checkpoint(file, "is of a " + header.optimizer + ", not a " + optimizer + rule);
    const auto found = own.find(first.name);
    if (found == own.end() || found->second != first.sizes) {
      refuse_checkpoint(file, "has parameter \"" + first.name + "\" of another optimizer" + rule);
    }
  }
}

void publish(const fs::path& folder, const std::vector<std::string>& owners) {
  std::set<fs::path> written;
  for (const auto& owner : owners) {
    const fs::path from = folder / (owner + std::string(kUnpublishedSuffix));
    const fs::path to = folder / (owner + std::string(kShardSuffix));
    std::error_code error;
    fs::rename(from, to, error);
    if (error) refuse_checkpoint(from, "cannot be put in place: " + error.message());
    written.insert(to);
  }
  for (const auto& file : files_of(folder, kShardSuffix)) {
    std::error_code ignored;
    if (!written.contains(file)) fs::remove(file, ignored);
  }
  const base::Descriptor directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory || ::fsync(directory.get()) != 0)
    refuse_checkpoint(folder, "cannot be written to disk: " + system_error_text(errno));
}

std::vector<fs::path> find_shards(const fs::path& folder) {
  // Keyed by save_id, which sorts by time: the owners that the save needs and the files found.
  struct Save {
    std::set<std::string> owners;
    std::map<std::string, fs::path> files;
    [[nodiscard]] bool complete() const {
      return std::all_of(owners.begin(), owners.end(),
                         [&](const auto& owner) { return files.contains(owner); });
    }
  };
  std::map<std::string, Save> saves;
  const auto add = [&](const fs::path& file, const ShardHeader& header) {
    Save& save = saves[header.save_id];
    save.owners.insert(header.owners.begin(), header.owners.end());
    save.files.emplace(header.owner, file);
  };
  const auto complete = [&]() -> std::optional<std::vector<fs::path>> {
    for (auto save = saves.rbegin(); save != saves.rend(); ++save) {  // latest first
      if (!save->second.complete()) continue;
      std::vector<fs::path> files;
      for (const auto& [owner, file] : save->second.files) files.push_back(file);
      return files;
    }
    return std::nullopt;
  };
  for (const auto& file : files_of(folder, kShardSuffix))
    add(file, read_shard(file, [](const SavedParameter&) {}));
  if (auto files = complete()) return *files;
  // The process may have died between two renames of publish(): the files not yet renamed are
  // complete.
  for (const auto& file : files_of(folder, kUnpublishedSuffix)) {
    // An unfinished one is not part of a complete save.
    static_cast<void>(
        base::failure_of([&] { add(file, read_shard(file, [](const SavedParameter&) {})); }));
  }
  if (auto files = complete()) return *files;
  if (saves.empty())
    refuse_checkpoint(folder, "is not there: no file ends in " + std::string(kShardSuffix));
  std::string missing;
  for (const auto& [id, save] : saves) {
    for (const auto& owner : save.owners) {
      if (!save.files.contains(owner)) missing += (missing.empty() ? "" : ", ") + owner;
    }
  }
  refuse_checkpoint(
      folder,
      "is not complete: the files of these owners are missing or of another save: " + missing);
}

void check_optimizer(const fs::path& file, const ShardHeader& header,
                     const std::string& optimizer) {
  if (header.optimizer != optimizer)
    refuse_checkpoint(file, "is of a " + header.optimizer + ", not a " + optimizer);
}

void check_groups(const fs::path& file, std::size_t saved, std::size_t groups) {
  if (saved == groups) return;
  refuse_checkpoint(file, "has parameter groups: " + std::to_string(saved) +
                              "; this optimizer has " + std::to_string(groups));
}

void check_saved(const fs::path& file, const SavedParameter& saved,
                 const std::vector<std::int64_t>* sizes) {
  if (sizes == nullptr)
    refuse_checkpoint(file,
                      "has parameter \"" + saved.name + "\", which this optimizer does not have");
  if (saved.sizes == *sizes) return;
  std::ostringstream text;
  text << "has shape " << at::IntArrayRef(saved.sizes) << " for parameter \"" << saved.name
       << "\", it is " << at::IntArrayRef(*sizes);
  refuse_checkpoint(file, text.str());
}

Error missing_parameter(const fs::path& folder, const std::string& parameter) {
  return Error(ErrorCode::invalid_argument, "optimizer checkpoint " + folder.string() +
                                                " has no parameter \"" + parameter + '"');
}

}  // namespace stitch::optim
