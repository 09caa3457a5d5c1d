#include "stitch/transport/gpu/gpu_libraries.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/gpu/double/fake_gpu.h"

namespace stitch::transport::gpu::gpu_libraries_test {
namespace {

// Libraries that are there: see pretend_library.cc.
GpuLibraries::Names pretended() {
  GpuLibraries::Names names;
  names.driver = {PRETEND_DRIVER_FILE};
  names.runtime = {PRETEND_RUNTIME_FILE};
  names.nccl = {PRETEND_NCCL_FILE};
  return names;
}

::testing::AssertionResult says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "\"" << part << "\" is not in: " << text;
}

TEST(GpuLibraries, OfThisProcessAreThereOrSayWhyNot) {
  const GpuLibraries& libraries = GpuLibraries::of_process();
  EXPECT_EQ(&libraries, &GpuLibraries::of_process());
  if (libraries.cuda() != nullptr) {
    EXPECT_EQ(libraries.why_no_cuda(), "");
  } else {
    EXPECT_TRUE(libraries.why_no_cuda().starts_with("no CUDA device: ")) << libraries.why_no_cuda();
    EXPECT_EQ(libraries.nccl(), nullptr);
  }
}

TEST(GpuLibraries, ThatAreThereFillBothTables) {
  const GpuLibraries libraries(pretended());
  ASSERT_NE(libraries.cuda(), nullptr) << libraries.why_no_cuda();
  ASSERT_NE(libraries.nccl(), nullptr) << libraries.why_no_nccl();
#define STITCH_THERE(member, symbol) EXPECT_NE(libraries.cuda()->member, nullptr) << #symbol;
  STITCH_CUDA_RUNTIME_FUNCTIONS(STITCH_THERE)
  STITCH_CUDA_DRIVER_FUNCTIONS(STITCH_THERE)
#undef STITCH_THERE
#define STITCH_THERE(member, symbol) EXPECT_NE(libraries.nccl()->member, nullptr) << #symbol;
  STITCH_NCCL_FUNCTIONS(STITCH_THERE)
#undef STITCH_THERE
}

TEST(GpuLibraries, WhatIsMissingOrOfNoUseIsNamedWithItsFile) {
  using Names = std::vector<std::string>;
  struct Case {
    Names driver, runtime, nccl;
    std::vector<std::string> said;  // of CUDA; of NCCL where that is there
  };
  const Names driver{PRETEND_DRIVER_FILE}, runtime{PRETEND_RUNTIME_FILE}, nccl{PRETEND_NCCL_FILE};
  const Case cases[]{
      {{"libstitch_none.so.1"},
       runtime,
       nccl,
       {"no CUDA device: the library libstitch_none.so.1 is not there: "}},
      {driver,
       {"libstitch_none.so.13", "libstitch_none.so.12"},
       nccl,
       {"libstitch_none.so.13 is not there", "libstitch_none.so.12 is not there"}},
      {driver, nccl, nccl, {" has no function cudaGetDeviceCount", PRETEND_NCCL_FILE}},
      {driver,
       {PRETEND_REFUSING_RUNTIME_FILE},
       nccl,
       {"no CUDA device: the driver is insufficient (cudaErrorInsufficientDriver"}},
      {driver,
       runtime,
       {"libstitch_none.so.2"},
       {"no NCCL: the library libstitch_none.so.2 is not there: "}},
  };
  for (const Case& each : cases) {
    GpuLibraries::Names names;
    names.driver = each.driver;
    names.runtime = each.runtime;
    names.nccl = each.nccl;
    const GpuLibraries libraries(names);
    const bool has_cuda = libraries.cuda() != nullptr;
    EXPECT_EQ(has_cuda, each.nccl != nccl);
    EXPECT_EQ(libraries.nccl(), nullptr);
    for (const std::string& text : each.said)
      EXPECT_TRUE(says(has_cuda ? libraries.why_no_nccl() : libraries.why_no_cuda(), text));
    if (has_cuda) continue;
    EXPECT_EQ(libraries.why_no_nccl(), "NCCL was not looked for: " + libraries.why_no_cuda());
  }
}

TEST(GpuLibraries, AnOlderRuntimeIsTriedWhereANewerOneFindsNoDevice) {
  auto names = pretended();
  names.runtime = {PRETEND_REFUSING_RUNTIME_FILE, PRETEND_RUNTIME_FILE};
  const GpuLibraries libraries(names);
  EXPECT_NE(libraries.cuda(), nullptr) << libraries.why_no_cuda();
}

TEST(GpuLibraries, AnNcclThatIsTooOldIsRefusedWithBothVersions) {
  setenv("PRETEND_NCCL_VERSION", "22005", 1);
  const GpuLibraries libraries(pretended());
  unsetenv("PRETEND_NCCL_VERSION");
  EXPECT_NE(libraries.cuda(), nullptr);
  EXPECT_EQ(libraries.nccl(), nullptr);
  EXPECT_TRUE(says(libraries.why_no_nccl(), "is NCCL 2.20.5; at least 2.26.0 is needed"));
}

// It would hold for all users of NCCL in the process: with NCCL_LAUNCH_ORDER_IMPLICIT a race of two
// of their launches, which is legal, is an error.
TEST(GpuLibraries, NothingIsPutIntoTheEnvironmentOfTheProcess) {
  const auto variables = [] {
    std::vector<std::string> all;
    for (char** each = environ; *each != nullptr; ++each) all.emplace_back(*each);
    return all;
  };
  const auto before = variables();
  EXPECT_NE(GpuLibraries(pretended()).nccl(), nullptr);
  EXPECT_EQ(variables(), before);
}

TEST(GpuLibraries, OfATestStandInForThoseOfTheProcess) {
  test::FakeGpu world;
  const GpuLibraries doubles(&world.cuda(), &world.nccl(), "");
  {
    const GpuLibraries::Override during(doubles);
    const GpuLibraries& libraries = GpuLibraries::of_process();
    ASSERT_NE(libraries.cuda(), nullptr);
    void* memory = nullptr;
    EXPECT_EQ(libraries.cuda()->malloc(&memory, 10), cuda::kSuccess);
    EXPECT_EQ(world.device_memory_used(0), 10u);
  }
  EXPECT_NE(&GpuLibraries::of_process(), &doubles);
}

// cudaStreamQuery -> stream_query
std::string member_name(std::string symbol) {
  if (symbol == "cuDeviceGetUuid_v2") return "device_get_uuid";
  std::string name;
  for (const char c : symbol.substr(4)) {
    if (std::isupper(static_cast<unsigned char>(c)) != 0 && !name.empty()) name += '_';
    name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return name;
}

TEST(GpuLibraries, MembersHaveTheNamesOfTheirFunctions) {
#define STITCH_NAMED(member, symbol) EXPECT_EQ(member_name(#symbol), #member);
  STITCH_CUDA_RUNTIME_FUNCTIONS(STITCH_NAMED)
  STITCH_CUDA_DRIVER_FUNCTIONS(STITCH_NAMED)
  STITCH_NCCL_FUNCTIONS(STITCH_NAMED)
#undef STITCH_NAMED
}

}  // namespace
}  // namespace stitch::transport::gpu::gpu_libraries_test
