// The time to copy memory within one process.
#include <cstring>
#include <vector>

#include "measure.h"
#include "timing.h"

namespace stitch_bench {

namespace floors_memcpy_measure {
namespace {

void first(Side& side) {
  for (const int mib : side.settings().sizes_mib) {
    const std::size_t bytes = static_cast<std::size_t>(mib) << 20;
    std::vector<char> from(bytes, 'x');
    std::vector<char> to(bytes, 'y');
    const auto times = time_each_us(side.settings().seconds, least_repetitions(mib), [&] {
      std::memcpy(to.data(), from.data(), bytes);
      asm volatile(""
                   :
                   : "r"(to.data())
                   : "memory");  // the copy is wanted although its result is not read
    });
    side.result("floor.memcpy." + std::to_string(mib) + "MiB",
                mib * kMiB / kGiB / (median(times) * 1e-6), "GiB/s");
  }
}

}  // namespace
}  // namespace floors_memcpy_measure

Measure floor_memcpy() {
  using namespace floors_memcpy_measure;
  return {.name = "floor-memcpy",
          .about = "memcpy between two buffers that are in memory already",
          .first = &first};
}

}  // namespace stitch_bench
