#include <cstdint>

// A kernel library of a later version, of which a loader may read the first two fields only.
namespace {
constexpr std::uint32_t kTable[] = {999, 16, 0, 0};
}  // namespace

extern "C" const void* stitch_kernel_table() { return static_cast<const void*>(kTable); }
