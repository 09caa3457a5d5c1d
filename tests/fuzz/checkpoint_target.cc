#include <limits>

#include "stitch/rref/checkpoint_manifest.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::checkpoints {

// The input is a manifest. Its checksum is not looked at, so that changes get behind it.
static bool run(Bytes input) {
  return accepts({ErrorCode::invalid_argument}, [&] {
    const std::string once = rref::write_manifest(rref::parse_manifest(text_of(input)));
    require(rref::write_manifest(rref::read_manifest(once)) == once, "a manifest, written again");
  });
}

static Seeds seeds() {
  Seeds list;
  rref::Manifest manifest;
  const auto add = [&](const char* name) {
    list.push_back({name, bytes_of(rref::write_manifest(manifest))});
  };
  add("empty");
  const double inf = std::numeric_limits<double>::infinity();
  manifest.values = {{"step", std::int64_t{7}},
                     {"rate", 0.1},
                     {"best", -inf},
                     {"name", "a"},
                     {"list", std::vector<double>{1, inf}},
                     {"done", true}};
  add("values");
  auto& part = manifest.parts["optimizer"];
  part.type = "torch::optim::Adam";
  part.options = {{"0.lr", 0.25}};
  part.files.push_back({"ps0", "run.1.optimizer.0.safetensors", "00ff", 96, {}});
  part.files[0].parameters = {{"w", "F32", {2, 3}, {{"exp_avg", {}, {}}, {"step", {}, {}}}},
                              {"b", "BF16", {}, {}}};
  add("part");
  return list;
}

}  // namespace stitch::fuzz::checkpoints

namespace stitch::fuzz {
const Target checkpoint{"checkpoint", checkpoints::run, checkpoints::seeds, 512,
                        std::size_t{16} << 20};
}  // namespace stitch::fuzz
