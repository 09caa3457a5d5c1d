// A checkpoint of a tensor of the other worker, in turns with a plain file of as many bytes.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "measure.h"
#include "stitch/base/descriptor.h"
#include "stitch/rref/checkpoint.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace saving_measure {
namespace {

namespace fs = std::filesystem;

struct Folder {
  Folder() {
    if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("cannot make " + path);
  }
  ~Folder() { fs::remove_all(path); }
  std::string path = fs::temp_directory_path() / "stitch-bench-XXXXXX";
};

at::Tensor random_bytes(std::int64_t size) { return at::randint(256, {size}, at::kByte); }

// As `dd conv=fsync bs=4M`.
void write_file(const fs::path& path, const std::vector<char>& block, int blocks) {
  const stitch::base::Descriptor file(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  bool good = static_cast<bool>(file);
  for (int i = 0; i < blocks && good; ++i)
    good = ::write(file.get(), block.data(), block.size()) == static_cast<::ssize_t>(block.size());
  if (!good || ::fsync(file.get()) != 0) throw std::runtime_error("cannot write " + path.string());
}

void first(Side& side) {
  const stitch::Worker self = join_world(side);
  const auto& sizes = side.settings().sizes_mib;
  const int blocks = (*std::max_element(sizes.begin(), sizes.end()) + 3) / 4;
  const std::vector<char> block(std::size_t{4} << 20, 'x');
  const Folder folder;
  stitch::Checkpoint checkpoint(folder.path);
  const auto tensor =
      stitch::remote<&random_bytes>(other(side), blocks * static_cast<std::int64_t>(block.size()));
  checkpoint.add("tensors", {{"tensor", tensor}});
  std::vector<double> files, saves;
  for (int i = 0; i < 4; ++i) {
    const auto start = Clock::now();
    write_file(folder.path + "/file", block, blocks);
    files.push_back(seconds_since(start));
    const auto then = Clock::now();
    checkpoint.save();
    saves.push_back(seconds_since(then));
  }
  const auto report = [&](const std::string& key, std::vector<double> times,
                          const std::string& floor) {
    times.erase(times.begin());  // nothing is replaced yet
    side.result(key, 4 * blocks / median(times), "MiB/s", floor);
  };
  report("floor.saving.write", files, "");
  report("saving." + side.path() + ".checkpoint", saves, "floor.saving.write");
  finish(side);
}

}  // namespace
}  // namespace saving_measure

Measure saving() {
  using namespace saving_measure;
  return {.name = "saving",
          .about = "a checkpoint of a tensor of the other worker, beside write() and fsync()",
          .paths = {"same_host"},
          .first = &first,
          .second = &serve};
}

}  // namespace stitch_bench
