// Sends a tensor of bytes to the other worker and back.
#include <ATen/ATen.h>

#include <stdexcept>

#include "handlers.h"
#include "measure.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace bandwidth_measure {
namespace {

void first(Side& side) {
  const stitch::Worker self = join_world(side);
  for (const int mib : side.settings().sizes_mib) {
    const auto tensor = at::randint(0, 256, {static_cast<std::int64_t>(mib) << 20}, at::kByte);
    if (!at::equal(stitch::rpc_sync<&echo>(other(side), tensor), tensor))
      throw std::runtime_error("what came back is not what was sent");
    const auto times = time_each_us(side.settings().seconds, least_repetitions(mib), [&] {
      static_cast<void>(stitch::rpc_sync<&echo>(other(side), tensor));
    });
    const std::string size = std::to_string(mib) + "MiB";
    side.result("bandwidth." + side.path() + ".echo." + size,
                2.0 * mib * kMiB / kGiB / (median(times) * 1e-6), "GiB/s",
                side.floor("tensorpipe.shm.echo.", "tensorpipe.uv.echo.") + size);
  }
  finish(side);
}

}  // namespace
}  // namespace bandwidth_measure

Measure bandwidth() {
  using namespace bandwidth_measure;
  return {.name = "bandwidth",
          .about =
              "echo of a tensor of random bytes, --sizes MiB; bytes of both directions over the "
              "median time",
          .quick = true,
          .paths = {"same_host", "tcp"},
          .floors = {"floor-tensorpipe-bandwidth", "floor-memcpy"},
          .first = &first,
          .second = &serve};
}

}  // namespace stitch_bench
