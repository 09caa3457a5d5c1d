#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "stitch/base/descriptor.h"
#include "stitch/base/error.h"
#include "stitch/dist_optim/shard.h"
#include "stitch/dist_optim/shard_format.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {
namespace {

optim::ShardChecksum checksum_of(Bytes bytes) {
  optim::ShardHasher hasher;
  hasher.update(bytes.data(), bytes.size());
  return hasher.finish();
}

// The input: whether the checksum that follows is right, then a file without it.
bool run(Bytes input) {
  Choices choices(input);
  const bool right = (choices.byte() & 1) == 0;
  const Bytes content = choices.rest();
  base::Bytes bytes = copy_of(content);
  auto checksum = checksum_of(content);
  if (!right) checksum[0] ^= 1;
  bytes.append(checksum.data(), checksum.size());
  const base::Descriptor file(::memfd_create("shard", MFD_CLOEXEC));
  if (::write(file.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()))
    return false;
  const std::filesystem::path path = "/proc/self/fd/" + std::to_string(file.get());
  try {
    static_cast<void>(optim::read_shard(path, [](const optim::SavedParameter&) {}));
    if (!right) std::abort();
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::vector<base::Bytes> seeds() {
  const auto folder =
      std::filesystem::temp_directory_path() / ("stitch-fuzz-" + std::to_string(::getpid()));
  optim::ShardHeader header;
  header.optimizer = "torch::optim::Adam";
  header.owner = "ps0";
  header.owners = {"ps0", "ps1"};
  header.save_id = "1";
  header.options = {{"lr", 0.1}, {"amsgrad", false}, {"betas", std::vector<double>{0.9, 0.99}}};
  {
    optim::ShardWriter writer(folder, header, 2);
    writer.add({"weight",
                {2, 3},
                optim::NamedValues{{"step", std::int64_t{4}}, {"moment", at::ones({2, 3})}}});
    writer.add({"bias", {3}, std::nullopt});
    writer.finish();
    std::vector<base::Bytes> list;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
      base::Bytes seed = bytes_of(std::string(1, '\0'));
      seed.append(bytes.data(), bytes.size() - optim::kChecksumBytes);
      list.push_back(std::move(seed));
    }
    std::filesystem::remove_all(folder);
    return list;
  }
}

}  // namespace

const Target checkpoint{"checkpoint", run, seeds, 64, std::size_t{8} << 20};

}  // namespace stitch::fuzz
