#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace stitch::base {

// The cheapest clock of the processor that advances at a constant rate on all its cores: some
// nanoseconds a reading. Its unit is not known; EventRing turns it into times.
[[nodiscard]] inline std::uint64_t clock_ticks() noexcept {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  std::uint64_t ticks = 0;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

// Something that happened, as EventRing::list() returns it.
struct Event {
  std::chrono::steady_clock::time_point when;
  const char* what = "";              // the kind of event
  std::optional<std::uint32_t> peer;  // the other worker concerned, none for events without one
  std::uint32_t epoch = 0;            // of that worker, the low 32 bits
  std::uint64_t id = 0;               // of the call, pass or context; 0 for none
  std::string_view name;              // of the function; may be empty
};

// The last events of one worker, always recorded, so that what led to a hang can be read after the
// fact. Fixed memory; an old event is overwritten by a new one. Owned by its worker's agent. Thread
// contract: any thread; record() takes no lock, allocates nothing and costs some nanoseconds.
class EventRing {
 public:
  static constexpr std::size_t kEvents = 4096;
  // Stands for "no peer".
  static constexpr std::uint32_t kNoPeer = ~std::uint32_t{0};

  EventRing();
  EventRing(const EventRing&) = delete;
  EventRing& operator=(const EventRing&) = delete;

  // `what` and `name` are not copied: literals, or names of registered functions. Of a name, the
  // first 65535 bytes count.
  void record(const char* what, std::uint32_t peer = kNoPeer, std::uint64_t epoch = 0,
              std::uint64_t id = 0, std::string_view name = {}) noexcept {
    store(clock_ticks() & ~kSteady, what, peer, epoch, id, name);
  }
  // The same where the time is known already: reading the clock is most of what record() costs.
  void record_at(std::chrono::steady_clock::time_point when, const char* what, std::uint32_t peer,
                 std::uint64_t epoch, std::uint64_t id, std::string_view name) noexcept {
    store(static_cast<std::uint64_t>(when.time_since_epoch().count()) | kSteady, what, peer, epoch,
          id, name);
  }
  // A copy of what is there, oldest first, without those being written at this moment.
  [[nodiscard]] std::vector<Event> list() const;
  // How many were ever recorded.
  [[nodiscard]] std::uint64_t recorded() const noexcept {
    return next_.load(std::memory_order_relaxed);
  }

 private:
  // A record is complete when its state holds its number, and 0 while it is being written. All
  // fields are atomic, so a reader that comes at the same time sees torn values at worst, and the
  // state tells.
  struct Record {
    std::atomic<std::uint64_t> state{0};  // number + 1, and the size of the name in 16 bits
    std::atomic<std::uint64_t> time{0};   // ticks, or kSteady and a time
    std::atomic<const char*> what{nullptr};
    std::atomic<const char*> name{nullptr};
    std::atomic<std::uint64_t> id{0};
    std::atomic<std::uint64_t> peer{0};  // its id and the low half of its epoch
  };

  // Marks a time of the steady clock among ticks.
  static constexpr std::uint64_t kSteady = std::uint64_t{1} << 63;

  void store(std::uint64_t time, const char* what, std::uint32_t peer, std::uint64_t epoch,
             std::uint64_t id, std::string_view name) noexcept {
    const std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
    Record& record = (*records_)[number % kEvents];
    // The writer of the event before in this place has stopped in the middle, or this one has and
    // is late: two would mix their fields. An event is left out.
    const std::uint64_t there = record.state.load(std::memory_order_relaxed);
    if (number >= kEvents && (there == 0 || there >> 16 > number + 1)) return;
    record.state.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    record.time.store(time, std::memory_order_relaxed);
    record.what.store(what, std::memory_order_relaxed);
    record.name.store(name.data(), std::memory_order_relaxed);
    record.id.store(id, std::memory_order_relaxed);
    record.peer.store(std::uint64_t{peer} << 32 | (epoch & 0xffffffffU), std::memory_order_relaxed);
    record.state.store((number + 1) << 16 | (name.size() & 0xffffU), std::memory_order_release);
  }

  const std::chrono::steady_clock::time_point begin_time_;
  const std::uint64_t begin_ticks_;
  const std::unique_ptr<std::array<Record, kEvents>> records_;
  alignas(64) std::atomic<std::uint64_t> next_{0};
};

}  // namespace stitch::base
