#include "stitch/base/event_ring.h"

#include <algorithm>

namespace stitch::base {

EventRing::EventRing()
    : begin_time_(std::chrono::steady_clock::now()),
      begin_ticks_(clock_ticks()),
      records_(std::make_unique<std::array<Record, kEvents>>()) {}

std::vector<Event> EventRing::list() const {
  using Clock = std::chrono::steady_clock;
  // The two clocks were read together when the ring was made, and are now: between these moments a
  // tick is as long as it was on average.
  const Clock::time_point end_time = Clock::now();
  const std::uint64_t end_ticks = clock_ticks();
  const double span = static_cast<double>((end_time - begin_time_).count());
  const double ticks = static_cast<double>(std::max<std::uint64_t>(1, end_ticks - begin_ticks_));
  const auto time_of = [&](std::uint64_t at) {
    if ((at & kSteady) != 0)
      return Clock::time_point(Clock::duration(static_cast<Clock::rep>(at & ~kSteady)));
    const std::uint64_t since = at < begin_ticks_ ? 0 : std::min(at, end_ticks) - begin_ticks_;
    return begin_time_ +
           Clock::duration(static_cast<Clock::rep>(static_cast<double>(since) / ticks * span));
  };

  std::vector<Event> events;
  const std::uint64_t end = next_.load(std::memory_order_acquire);
  for (std::uint64_t number = end > kEvents ? end - kEvents : 0; number < end; ++number) {
    const Record& record = (*records_)[number % kEvents];
    const std::uint64_t before = record.state.load(std::memory_order_acquire);
    Event event;
    event.when = time_of(record.time.load(std::memory_order_relaxed));
    event.what = record.what.load(std::memory_order_relaxed);
    event.id = record.id.load(std::memory_order_relaxed);
    const std::uint64_t peer = record.peer.load(std::memory_order_relaxed);
    const char* const name = record.name.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (before >> 16 != number + 1 || record.state.load(std::memory_order_relaxed) != before)
      continue;  // being written, or overwritten by now
    if (peer >> 32 != kNoPeer) event.peer = static_cast<std::uint32_t>(peer >> 32);
    event.epoch = static_cast<std::uint32_t>(peer);
    if (name != nullptr) event.name = std::string_view(name, before & 0xffffU);
    events.push_back(event);
  }
  return events;
}

}  // namespace stitch::base
