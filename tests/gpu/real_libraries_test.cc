// The loader on CUDA's and NCCL's own libraries, as far as that goes without a GPU. Built where the
// toolkit is installed.
#include <gtest/gtest.h>
#include <nccl.h>

#include <string>

#include "stitch/transport/gpu/gpu_libraries.h"

namespace stitch::transport::gpu::test::real_libraries_test {
namespace {

// By its name, or in the toolkit's folder.
LoadedLibrary real(const std::string& name) {
  return LoadedLibrary::find({name, std::string(TOOLKIT_LIBRARIES) + "/" + name});
}

TEST(RealGpuLibraries, HaveAllFunctionsOfTheTables) {
  const GpuLibraries::Names names;
  const LoadedLibrary runtime = real(names.runtime.front());
  if (!runtime.loaded()) GTEST_SKIP() << runtime.why_not();
#define STITCH_THERE(member, symbol) EXPECT_NE(runtime.function(#symbol), nullptr) << #symbol;
  STITCH_CUDA_RUNTIME_FUNCTIONS(STITCH_THERE)
#undef STITCH_THERE
  const LoadedLibrary library = real(names.nccl.front());
  if (!library.loaded()) GTEST_SKIP() << library.why_not();
#define STITCH_THERE(member, symbol) EXPECT_NE(library.function(#symbol), nullptr) << #symbol;
  STITCH_NCCL_FUNCTIONS(STITCH_THERE)
#undef STITCH_THERE
}

TEST(RealGpuLibraries, AnswerCleanlyWithoutADevice) {
  GpuLibraries::Names names;
  const LoadedLibrary runtime = real(names.runtime.front());
  if (!runtime.loaded()) GTEST_SKIP() << runtime.why_not();
  if (GpuLibraries(names).cuda() != nullptr) GTEST_SKIP() << "there is a device";
  // The driver is not there: something else has to stand in for it for the runtime to be asked.
  names.driver = {PRETEND_DRIVER_FILE};
  names.runtime = {runtime.path()};
  const GpuLibraries libraries(names);
  EXPECT_EQ(libraries.cuda(), nullptr);
  EXPECT_NE(libraries.why_no_cuda().find("cudaError"), std::string::npos)
      << libraries.why_no_cuda();
}

TEST(RealGpuLibraries, NcclTellsTheVersionOfItsHeader) {
  const LoadedLibrary library = real(GpuLibraries::Names().nccl.front());
  if (!library.loaded()) GTEST_SKIP() << library.why_not();
  NcclApi api{};
  TableFiller table(library);
  table.fill(api.get_version, "ncclGetVersion");
  ASSERT_EQ(table.why_not(), "");
  int version = 0;
  EXPECT_EQ(api.get_version(&version), nccl::kSuccess);
  EXPECT_GE(version, GpuLibraries::kOldestNccl) << library.path();
  EXPECT_EQ(version / 10000, NCCL_MAJOR);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::real_libraries_test
