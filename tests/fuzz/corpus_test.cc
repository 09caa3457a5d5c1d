// The inputs in corpus/, and changes of them that need no fuzzer.
#include "tests/fuzz/targets.h"
#include "tests/support/plain_test.h"

namespace stitch::fuzz::corpus_test {
namespace {

const std::vector<const Target*> kTargets{
    &archive, &autograd, &checkpoint, &dumps,       &frame,   &gpu,   &handshake, &member_record,
    &pt_file, &records,  &references, &safetensors, &session, &store, &tensors};

std::filesystem::path folder_of(const Target& target) {
  return std::filesystem::path(STITCH_FUZZ_CORPUS) / target.name;
}

std::vector<char> bytes_in(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A decoder that breaks a rule ends the program, and says which.
class FuzzCorpus : public ::testing::TestWithParam<const Target*> {
 protected:
  [[nodiscard]] static bool run(const std::vector<char>& bytes) {
    return GetParam()->run(std::as_bytes(std::span(bytes)));
  }
  static std::vector<std::filesystem::path> files() {
    std::vector<std::filesystem::path> list;
    for (const auto& entry : std::filesystem::directory_iterator(folder_of(*GetParam())))
      list.push_back(entry.path());
    std::sort(list.begin(), list.end());
    return list;
  }
};

// A target that refuses everything would never get behind its first check.
TEST_P(FuzzCorpus, HasWhatTheEncodersWrite) {
  const auto seeds = GetParam()->seeds();
  EXPECT_FALSE(seeds.empty());
  for (const Seed& seed : seeds) {
    SCOPED_TRACE(seed.name);
    EXPECT_TRUE(GetParam()->run(seed.bytes.span()));
    const auto kept = bytes_in(folder_of(*GetParam()) / ("seed-" + seed.name));
    EXPECT_TRUE(run(kept));
    // Other bytes: the format has changed; `fuzz_plain --target=... --write-seeds=DIR` writes them.
    EXPECT_TRUE(same(std::as_bytes(std::span(kept)), seed.bytes.span()));
  }
}

TEST_P(FuzzCorpus, EachInputIsHandled) {
  for (const auto& path : files()) {
    SCOPED_TRACE(path);
    const auto bytes = bytes_in(path);
    EXPECT_EQ(run(bytes), run(bytes)) << "the same input has another outcome";
  }
}

// Cut after each byte, and with each byte changed. Long inputs in steps.
TEST_P(FuzzCorpus, EachInputIsHandledCutAndChanged) {
  constexpr std::size_t kMaxChanges = 400;
  std::size_t refused = 0;
  for (const auto& path : files()) {
    SCOPED_TRACE(path);
    const auto bytes = bytes_in(path);
    const std::size_t step = 1 + bytes.size() / kMaxChanges;
    for (std::size_t at = 0; at < bytes.size(); at += step) {
      refused += run({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(at)}) ? 0 : 1;
      auto changed = bytes;
      changed[at] = static_cast<char>(changed[at] ^ 0xff);
      refused += run(changed) ? 0 : 1;
    }
  }
  EXPECT_GT(refused, 0U);
}

INSTANTIATE_TEST_SUITE_P(Each, FuzzCorpus, ::testing::ValuesIn(kTargets),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace stitch::fuzz::corpus_test
