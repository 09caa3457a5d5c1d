#include "stitch/transport/polling/core_demand.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "stitch/base/descriptor.h"
#include "stitch/base/forked.h"

namespace stitch::transport {

namespace {

// "0.42 0.13 0.04 3/123 4567": 3 threads run or could, the caller's included.
std::optional<bool> probe_this_machine() noexcept {
  static const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < cores)
    return std::nullopt;
  std::array<char, 96> text{};
  const base::Descriptor load(::open("/proc/loadavg", O_RDONLY | O_CLOEXEC));
  const ssize_t count = load ? ::read(load.get(), text.data(), text.size() - 1) : -1;
  const char* running = text.data();
  for (int field = 0; count > 0 && running != nullptr && field < 3; ++field) {
    running = std::strchr(running, ' ');
    if (running != nullptr) ++running;
  }
  if (count <= 0 || running == nullptr) return std::nullopt;
  return std::strtol(running, nullptr, 10) - 1 >= cores;
}

}  // namespace

CoreDemand& CoreDemand::of_this_process() {
  static CoreDemand demand(&probe_this_machine);
  return demand;
}

void CoreDemand::update(Clock::time_point now, bool lost) noexcept {
  const std::uint64_t process = std::uint64_t{base::fork_count()} + 1;
  std::uint64_t prober = prober_.load();
  if (prober == process || !prober_.compare_exchange_strong(prober, process)) return;
  next_probe_.store((now + kProbeInterval).time_since_epoch().count(), std::memory_order_relaxed);
  const bool may_be = probe_().value_or(true);
  if (!may_be) {
    block_ = kMinBlock;
    blocked_until_ = last_loss_ = {};
  } else if (lost) {
    // Since the last block ended the cores were polled on for less than that took.
    const bool at_once = now - blocked_until_ < block_;
    const bool again = now - std::exchange(last_loss_, now) < kPassing;
    if (at_once || again) {
      block_ = at_once ? std::min<Clock::duration>(block_ * 2, kMaxBlock) : kMinBlock;
      blocked_until_ = now + block_;
    }
  }
  wanted_.store(now < blocked_until_, std::memory_order_relaxed);
  prober_.store(0);
}

}  // namespace stitch::transport
