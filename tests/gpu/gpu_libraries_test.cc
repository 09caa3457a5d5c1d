#include "stitch/transport/gpu/gpu_libraries.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "stitch/transport/gpu/api_symbols.h"
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
    EXPECT_GT(libraries.devices(), 0);
    EXPECT_EQ(libraries.why_no_cuda(), "");
    EXPECT_GE(libraries.cuda_version(), GpuLibraries::kOldestCuda);
  } else {
    EXPECT_TRUE(libraries.why_no_cuda().starts_with("no CUDA device: ")) << libraries.why_no_cuda();
    EXPECT_EQ(libraries.devices(), 0);
    EXPECT_EQ(libraries.nccl(), nullptr);
  }
}

TEST(GpuLibraries, ThatAreThereFillBothTables) {
  const GpuLibraries libraries(pretended());
  ASSERT_NE(libraries.cuda(), nullptr) << libraries.why_no_cuda();
  ASSERT_NE(libraries.nccl(), nullptr) << libraries.why_no_nccl();
  EXPECT_EQ(libraries.devices(), 2);
  EXPECT_EQ(libraries.cuda_version(), 13000);
  EXPECT_EQ(libraries.nccl_version(), 22809);
  EXPECT_TRUE(says(libraries.description(), "2 devices, CUDA 13.0 ("));
  EXPECT_TRUE(says(libraries.description(), "NCCL 2.28.9 ("));
#define STITCH_THERE(member, symbol) EXPECT_NE(libraries.cuda()->member, nullptr) << #symbol;
  STITCH_CUDA_RUNTIME_FUNCTIONS(STITCH_THERE)
  STITCH_CUDA_DRIVER_FUNCTIONS(STITCH_THERE)
#undef STITCH_THERE
#define STITCH_THERE(member, symbol) EXPECT_NE(libraries.nccl()->member, nullptr) << #symbol;
  STITCH_NCCL_FUNCTIONS(STITCH_THERE)
#undef STITCH_THERE
}

TEST(GpuLibraries, AMissingDriverIsNamedAndNothingElseIsLoaded) {
  auto names = pretended();
  names.driver = {"libstitch_no_driver.so.1"};
  const GpuLibraries libraries(names);
  EXPECT_EQ(libraries.cuda(), nullptr);
  EXPECT_EQ(libraries.nccl(), nullptr);
  EXPECT_TRUE(libraries.why_no_cuda().starts_with(
      "no CUDA device: the library libstitch_no_driver.so.1 is not there: "))
      << libraries.why_no_cuda();
  EXPECT_EQ(libraries.why_no_nccl(), "NCCL was not looked for: " + libraries.why_no_cuda());
  EXPECT_EQ(libraries.description(), libraries.why_no_cuda());
}

TEST(GpuLibraries, EachMissingRuntimeIsNamed) {
  auto names = pretended();
  names.runtime = {"libstitch_no_runtime.so.13", "libstitch_no_runtime.so.12"};
  const GpuLibraries libraries(names);
  EXPECT_EQ(libraries.cuda(), nullptr);
  EXPECT_TRUE(says(libraries.why_no_cuda(), "libstitch_no_runtime.so.13 is not there"));
  EXPECT_TRUE(says(libraries.why_no_cuda(), "libstitch_no_runtime.so.12 is not there"));
}

TEST(GpuLibraries, AFunctionThatALibraryLacksIsNamed) {
  auto names = pretended();
  names.runtime = {PRETEND_NCCL_FILE};
  const GpuLibraries libraries(names);
  EXPECT_EQ(libraries.cuda(), nullptr);
  EXPECT_TRUE(says(libraries.why_no_cuda(), " has no function cudaGetDeviceCount"));
  EXPECT_TRUE(says(libraries.why_no_cuda(), PRETEND_NCCL_FILE));
}

TEST(GpuLibraries, ARuntimeThatFindsNoDeviceSaysWhy) {
  auto names = pretended();
  names.runtime = {PRETEND_REFUSING_RUNTIME_FILE};
  const GpuLibraries libraries(names);
  EXPECT_EQ(libraries.cuda(), nullptr);
  EXPECT_TRUE(says(libraries.why_no_cuda(),
                   "no CUDA device: the driver is insufficient (cudaErrorInsufficientDriver"));
}

TEST(GpuLibraries, AnOlderRuntimeIsTriedWhereANewerOneFindsNoDevice) {
  auto names = pretended();
  names.runtime = {PRETEND_REFUSING_RUNTIME_FILE, PRETEND_RUNTIME_FILE};
  const GpuLibraries libraries(names);
  ASSERT_NE(libraries.cuda(), nullptr) << libraries.why_no_cuda();
  EXPECT_TRUE(says(libraries.description(), PRETEND_RUNTIME_FILE));
}

TEST(GpuLibraries, WithoutNcclThereIsStillCuda) {
  auto names = pretended();
  names.nccl = {"libstitch_no_nccl.so.2"};
  const GpuLibraries libraries(names);
  EXPECT_NE(libraries.cuda(), nullptr);
  EXPECT_EQ(libraries.nccl(), nullptr);
  EXPECT_TRUE(libraries.why_no_nccl().starts_with(
      "no NCCL: the library libstitch_no_nccl.so.2 is not there: "));
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
    EXPECT_EQ(libraries.devices(), 2);
    void* memory = nullptr;
    EXPECT_EQ(libraries.cuda()->malloc(&memory, 10), cuda::kSuccess);
    EXPECT_EQ(world.device_memory_used(0), 10u);
    EXPECT_EQ(libraries.description(), "2 devices, CUDA 13.0, NCCL 2.28.9");
  }
  EXPECT_NE(&GpuLibraries::of_process(), &doubles);
}

// cudaStreamQuery -> stream_query
std::string member_name(std::string symbol) {
  static const std::map<std::string, std::string> others = {
      {"cuDeviceGetUuid_v2", "device_get_uuid"},
      {"cudaDeviceGetPCIBusId", "device_get_pci_bus_id"}};
  if (others.contains(symbol)) return others.at(symbol);
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
