// Which path a transfer takes, as a table; and frames of transfers, there and back.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "stitch/transport/gpu/path_choice.h"
#include "stitch/transport/gpu/transfer_frames.h"

namespace stitch::transport::gpu::test::paths_test {
namespace {

constexpr int kVersion = 22809;

PathEnd end(std::uint64_t host, std::uint64_t process, char gpu, int device,
            int nccl_version = kVersion) {
  PathEnd made;
  made.process.host = {host, host};
  made.process.process = process;
  made.device_uuid.fill(gpu);
  made.device = device;
  made.nccl_version = nccl_version;
  return made;
}

TEST(PathChoice, FollowsTheTable) {
  using S = PathState;
  const PathEnd here = end(1, 1, 'a', 0);
  struct Row {
    const char* what;
    PathEnd destination;
    PathState peer, nccl;
    std::size_t bytes;
    PathChoice expected;
  };
  const PathChoice staging;
  PathChoice by_versions;
  by_versions.versions_differ = true;
  const Row rows[] = {
      {"no bytes", end(1, 2, 'b', 1), S::open, S::open, 0, staging},
      {"same process, same device", here, S::closed, S::closed, 1, {Path::local}},
      {"same process, tested", end(1, 1, 'b', 1), S::open, S::closed, 1, {Path::peer}},
      {"same process, new",
       end(1, 1, 'b', 1),
       S::untried,
       S::open,
       1,
       {Path::staging, false, true}},
      {"same process, in test", end(1, 1, 'b', 1), S::opening, S::open, 1, staging},
      {"same process, failed test", end(1, 1, 'b', 1), S::closed, S::open, 1, staging},
      {"same GPU, other process", end(1, 2, 'a', 0), S::open, S::open, 1, staging},
      {"other GPU, open", end(1, 2, 'b', 0), S::untried, S::open, 1, {Path::nccl}},
      {"other GPU, new",
       end(1, 2, 'b', 0),
       S::untried,
       S::untried,
       1,
       {Path::staging, true, false}},
      {"other GPU, opening", end(1, 2, 'b', 0), S::open, S::opening, 1, staging},
      {"other GPU, broken", end(1, 2, 'b', 0), S::open, S::closed, 1, staging},
      {"other host, open", end(2, 2, 'b', 0), S::untried, S::open, 1, {Path::nccl}},
      {"other host, equal UUID", end(2, 2, 'a', 0), S::untried, S::open, 1, {Path::nccl}},
      {"other host, same process number", end(2, 1, 'b', 0), S::open, S::open, 1, {Path::nccl}},
      {"no NCCL there", end(1, 2, 'b', 0, 0), S::open, S::untried, 1, by_versions},
      {"other NCCL there", end(1, 2, 'b', 0, 22703), S::open, S::untried, 1, by_versions},
      {"no NCCL there and not wanted", end(1, 2, 'a', 0, 0), S::open, S::untried, 1, staging},
      {"other patch of NCCL there", end(1, 2, 'b', 0, 22803), S::open, S::open, 1, by_versions},
  };
  const PathStates within_host{S::untried, S::open, false};
  EXPECT_EQ(choose_path(here, end(1, 2, 'b', 0), within_host, 1).path, Path::nccl);
  const PathChoice between = choose_path(here, end(2, 2, 'b', 0), within_host, 1);
  EXPECT_EQ(between.path, Path::staging);
  EXPECT_TRUE(between.sealed);
  for (const Row& row : rows) {
    const PathChoice choice = choose_path(here, row.destination, {row.peer, row.nccl}, row.bytes);
    EXPECT_EQ(choice.path, row.expected.path) << row.what;
    EXPECT_EQ(choice.open_nccl, row.expected.open_nccl) << row.what;
    EXPECT_EQ(choice.test_peer, row.expected.test_peer) << row.what;
    EXPECT_EQ(choice.versions_differ, row.expected.versions_differ) << row.what;
  }
}

TEST(PathChoice, AProcessKnowsItself) {
  EXPECT_EQ(this_process(), this_process());
  EXPECT_NE(this_process().process, 0U);
}

std::vector<unsigned> bytes_of(const base::Bytes& frame) {
  std::vector<unsigned> bytes(frame.size());
  std::transform(frame.data(), frame.data() + frame.size(), bytes.begin(),
                 [](std::byte byte) { return static_cast<unsigned>(byte); });
  return bytes;
}

TEST(TransferFrames, AreTheBytesOfThePage) {
  EXPECT_EQ(bytes_of(encode(RtsFrame{0x0102, Path::nccl, {3, 4, 5}, 6, 7})),
            (std::vector<unsigned>{2, 2, 1, 0, 0, 0, 0, 0, 0, 3,  //
                                   3, 0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0,
                                   6, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(bytes_of(encode(RetryFrame{9})), (std::vector<unsigned>{4, 9, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(bytes_of(encode(GrantFrame{9, 2})),
            (std::vector<unsigned>{5, 9, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0}));
  EXPECT_EQ(bytes_of(encode(CancelFrame{9, 5, "no"})),
            (std::vector<unsigned>{8, 9, 0, 0, 0, 0, 0, 0, 0, 5, 2, 0, 0, 0, 'n', 'o'}));
  EXPECT_EQ(bytes_of(encode(ForgetFrame{9})), (std::vector<unsigned>{12, 9, 0, 0, 0, 0, 0, 0, 0}));
}

}  // namespace
}  // namespace stitch::transport::gpu::test::paths_test
