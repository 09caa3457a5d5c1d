#include "stitch/rpc/world/slow_blas.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace slow_blas_test {
namespace {

using stitch::rpc::slow_blas_among;

TEST(SlowBlas, FollowsTheLinkToTheChosenImplementation) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("stitch-blas-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder / "blas");
  std::filesystem::create_directories(folder / "openblas-pthread");
  for (const char* kind : {"blas", "openblas-pthread"})
    std::ofstream(folder / kind / "libblas.so.3.11.0") << "x";
  const auto link = folder / "libblas.so.3";
  std::filesystem::create_symlink(folder / "blas" / "libblas.so.3.11.0", link);
  const auto slow = slow_blas_among({"", "/lib/libc.so.6", link.string()});
  ASSERT_TRUE(slow.has_value());
  EXPECT_TRUE(slow->ends_with("blas/libblas.so.3.11.0")) << *slow;
  std::filesystem::remove(link);
  std::filesystem::create_symlink(folder / "openblas-pthread" / "libblas.so.3.11.0", link);
  EXPECT_EQ(slow_blas_among({link.string()}), std::nullopt);
  std::filesystem::remove_all(folder);
}

TEST(SlowBlas, IsSilentWithoutOne) {
  EXPECT_EQ(slow_blas_among({}), std::nullopt);
  EXPECT_EQ(slow_blas_among({"/opt/torch/libtorch_cpu.so", "/lib/libcblas.so.3"}), std::nullopt);
}

}  // namespace
}  // namespace slow_blas_test
