#include "stitch/transport/gpu/kernel_table.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "tests/gpu/device/kernel_report.h"
#include "tests/support/temporary_folder.h"

namespace stitch::transport::gpu::kernel_table_test {
namespace {

// Sets STITCH_KERNELS until the end of the scope.
class ChosenLibrary {
 public:
  explicit ChosenLibrary(const char* path) { setenv("STITCH_KERNELS", path, 1); }
  ~ChosenLibrary() { unsetenv("STITCH_KERNELS"); }
  ChosenLibrary(const ChosenLibrary&) = delete;
  ChosenLibrary& operator=(const ChosenLibrary&) = delete;
};

TEST(KernelLibrary, IsNotLoadedWhereThereIsNoDevice) {
  const ChosenLibrary chosen("/nonexistent/kernels.so");
  const KernelLibrary library = load_kernels(0);
  EXPECT_EQ(library.table, nullptr);
  EXPECT_EQ(library.why_not, "kernels were not loaded: there is no CUDA device");
}

TEST(KernelLibrary, ThatIsMissingIsNamed) {
  const ChosenLibrary chosen("/nonexistent/kernels.so");
  const KernelLibrary library = load_kernels(1);
  EXPECT_EQ(library.table, nullptr);
  EXPECT_NE(library.why_not.find("/nonexistent/kernels.so: cannot open"), std::string::npos)
      << library.why_not;
  EXPECT_NE(library.why_not.find("STITCH_KERNELS names this file"), std::string::npos);
}

TEST(KernelLibrary, OfAnotherVersionIsRefusedWithBothVersions) {
  const KernelLibrary library = load_kernels_from(OTHER_KERNELS);
  EXPECT_EQ(library.table, nullptr);
  EXPECT_NE(library.why_not.find("has version 999 of the kernel table (16 bytes); this stitch "
                                 "needs version " +
                                 std::to_string(kKernelAbi)),
            std::string::npos)
      << library.why_not;
}

TEST(KernelLibrary, WithoutATableIsRefused) {
  const KernelLibrary library = load_kernels_from("libc.so.6");
  EXPECT_EQ(library.table, nullptr);
  EXPECT_EQ(library.why_not,
            "kernels were not loaded: libc.so.6 has no " STITCH_KERNEL_TABLE_SYMBOL);
}

#ifdef STITCH_KERNELS_LIBRARY
// Also where there is no device: nothing of CUDA runs until a function of the table is called.
TEST(KernelLibrary, LoadsFromTheFileThatTheEnvironmentNames) {
  const ChosenLibrary chosen(STITCH_KERNELS_LIBRARY);
  const KernelLibrary library = load_kernels(1);
  ASSERT_NE(library.table, nullptr) << library.why_not;
  EXPECT_EQ(library.path, STITCH_KERNELS_LIBRARY);
  PackedTensor tensor{};
  tensor.packed_offset = 8;
  alignas(256) static char packed[256];
  const int status =
      library.table->pack(0, &tensor, 1, packed + 1, sizeof packed, nullptr, nullptr);
  EXPECT_EQ(status, kKernelMisaligned);
  const Error error = kernel_error(*library.table, "pack 1 tensor on device 0", status);
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_STREQ(error.what(),
               "pack 1 tensor on device 0: an address is not aligned to its type (-5)");
}
#endif

// What a run that is cut off has found is there.
TEST(KernelReport, IsKeptInAFileThatIsWholeAfterEachFinding) {
  const stitch::testing::TemporaryFolder folder;
  const std::string file = folder.path() / "kernels.json";
  const auto read = [&] {
    std::ifstream in(file);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  KernelReport report;
  report.set("device", "none");
  report.keep_in(file);
  EXPECT_EQ(read(), report.json());
  report.check("load", "");
  EXPECT_NE(read().find("\"load\": \"pass\""), std::string::npos);
  EXPECT_EQ(read(), report.json());
  report.figure("copy", 1e9, 1);
  EXPECT_NE(read().find("\"copy\": {"), std::string::npos);
  EXPECT_EQ(read(), report.json());
  EXPECT_THROW(KernelReport().keep_in(folder.path() / "none" / "file"), std::invalid_argument);
}

}  // namespace
}  // namespace stitch::transport::gpu::kernel_table_test
