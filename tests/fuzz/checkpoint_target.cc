#include <ATen/ATen.h>
#include <fcntl.h>
#include <sodium.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "stitch/base/descriptor.h"
#include "stitch/dist_optim/shard.h"
#include "stitch/dist_optim/shard_format.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::checkpoints {

struct Shard {
  optim::ShardHeader header;
  std::vector<optim::SavedParameter> parameters;
};

static Shard read(const std::filesystem::path& path) {
  Shard shard;
  shard.header = optim::read_shard(path, [&](optim::SavedParameter parameter) {
    shard.parameters.push_back(std::move(parameter));
  });
  return shard;
}

static std::filesystem::path folder() {
  return std::filesystem::temp_directory_path() /
         ("stitch-fuzz-checkpoint-" + std::to_string(::getpid()));
}

// The file that a shard is written as, without its checksum.
static base::Bytes written(const Shard& shard) {
  const auto in = folder();
  {
    optim::ShardWriter writer(in, shard.header, shard.parameters.size());
    for (const auto& parameter : shard.parameters) writer.add(parameter);
    writer.finish();
  }
  base::Bytes bytes;
  for (const auto& entry : std::filesystem::directory_iterator(in)) {
    bytes.resize(static_cast<std::size_t>(entry.file_size()));
    const base::Descriptor file(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    require(::read(file.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
            "a file cannot be read");
  }
  std::filesystem::remove_all(in);
  return copy_of(bytes.span().first(bytes.size() - optim::kChecksumBytes));
}

// A file with these bytes and their checksum.
static base::Descriptor file_with(Bytes content, bool right_checksum) {
  optim::ShardHasher hasher;
  hasher.update(content.data(), content.size());
  auto checksum = hasher.finish();
  if (!right_checksum) checksum[0] ^= 1;
  base::Bytes bytes = copy_of(content);
  bytes.append(checksum.data(), checksum.size());
  return memory_file(bytes.span());
}

// A worker's name is part of a file's name.
static bool can_be_written(const Shard& shard) {
  const std::string& owner = shard.header.owner;
  return !owner.empty() && owner.size() < 100 &&
         std::all_of(owner.begin(), owner.end(),
                     [](unsigned char each) { return std::isalnum(each) != 0; });
}

// The input: whether the checksum that follows is right, then a file without it.
static bool run(Bytes input) {
  Choices choices(input);
  const bool right = (choices.byte() & 1) == 0;
  const base::Descriptor file = file_with(choices.rest(), right);
  static_cast<void>(accepts({ErrorCode::invalid_argument}, [&] {
    optim::SavedParameter first;
    const auto header = optim::read_shard_header(path_of(file), first);
    touch(std::as_bytes(std::span(header.owner)));
    touch(std::as_bytes(std::span(first.name)));
  }));
  return accepts({ErrorCode::invalid_argument}, [&] {
    const Shard shard = read(path_of(file));
    require(right, "a shard with a wrong checksum was accepted");
    if (!can_be_written(shard)) return true;
    const base::Bytes once = written(shard);
    const base::Descriptor again = file_with(once.span(), true);
    require(same(written(read(path_of(again))).span(), once.span()), "a shard, written again");
    return true;
  });
}

static Seeds seeds() {
  Shard shard;
  shard.header.optimizer = "torch::optim::Adam";
  shard.header.owner = "ps0";
  shard.header.owners = {"ps0", "ps1"};
  shard.header.save_id = "1";
  Seeds list;
  const auto add = [&](const char* name) {
    list.push_back({name, seed_for(0, written(shard).span())});
  };
  add("header");
  shard.header.options = {
      {"lr", 0.1}, {"amsgrad", false}, {"name", "x"}, {"betas", std::vector<double>{0.9, 0.99}}};
  add("options");
  shard.parameters.push_back({"bias", {3}, std::nullopt});
  add("parameter");
  shard.parameters.push_back({"weight",
                              {2, 3},
                              optim::NamedValues{{"step", std::int64_t{4}},
                                                 {"moment", at::ones({2, 3})},
                                                 {"none", at::empty({0, 2}, at::kLong)},
                                                 {"mask", at::ones({3}, at::kBool)}}});
  add("state");
  return list;
}

}  // namespace stitch::fuzz::checkpoints

namespace stitch::fuzz {
// Files are read and written a MiB at a time.
const Target checkpoint{"checkpoint", checkpoints::run, checkpoints::seeds, 512,
                        std::size_t{16} << 20};
}  // namespace stitch::fuzz
