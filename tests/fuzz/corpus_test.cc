#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/fuzz/targets.h"

namespace stitch::fuzz {
namespace {

const std::vector<const Target*> kTargets{&archive, &checkpoint,    &frame,   &handshake,
                                          &ledger,  &member_record, &options, &records,
                                          &store,   &tensors};

class FuzzCorpus : public testing::TestWithParam<const Target*> {};

TEST_P(FuzzCorpus, KeptInputsAreHandled) {
  const auto folder = std::filesystem::path(STITCH_FUZZ_CORPUS) / GetParam()->name;
  std::size_t inputs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    SCOPED_TRACE(entry.path());
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    static_cast<void>(GetParam()->run(std::as_bytes(std::span(bytes))));
    ++inputs;
  }
  EXPECT_GT(inputs, 0u);
}

// A target that refuses everything would never get behind its first check.
TEST_P(FuzzCorpus, SeedsAreAccepted) {
  const auto seeds = GetParam()->seeds();
  EXPECT_FALSE(seeds.empty());
  for (std::size_t i = 0; i < seeds.size(); ++i) {
    const Bytes seed(seeds[i].data(), seeds[i].size());
    EXPECT_TRUE(GetParam()->run(seed)) << "seed " << i;
    EXPECT_FALSE(GetParam()->run(seed.first(seed.size() / 2))) << "half of seed " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Each, FuzzCorpus, testing::ValuesIn(kTargets),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace stitch::fuzz
