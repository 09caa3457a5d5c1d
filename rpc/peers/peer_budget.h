#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/message/peer_limits.h"

namespace stitch::rpc {

// The budget of requests between this worker and one peer: `bytes` and `calls` of PeerLimits. A
// request takes room from its beginning to its answer:
//
//   a thread of the program:           sum of bytes <= 1 budget, else the thread waits its turn
//   a handler, continuation, callback: sum of bytes <= 4 budgets, else the call fails
//
// and the same for the number of calls; a request goes when no other one is under way. So callers
// bound what a callee holds, which refuses what exceeds 4 budgets.
//
// Whatever room a request has, it is passed to the transport only while few bytes are unwritten
// there (the window): a request that is cancelled or late before that is never written. Small
// requests pass large ones that wait for the window.
//
// Thread contract: any thread. No lock is received while a request's `go` is called.
class PeerBudget {
 public:
  using Clock = std::chrono::steady_clock;
  // Room that a call takes beside its message.
  static constexpr std::size_t kCallBytes = 2048;
  // Budgets that calls of handlers may take.
  static constexpr std::size_t kBudgets = 4;
  // Windows of small requests and of large ones.
  static constexpr std::size_t kSmallWindow = std::size_t{1} << 20;
  static constexpr std::size_t kLargeWindow = std::size_t{4} << 20;
  static constexpr std::size_t kSmallBytes = std::size_t{32} << 10;

  explicit PeerBudget(const PeerLimits& limits);

  // ---- room of a request, whose message has `bytes`
  // Who makes a call.
  enum class Caller : std::uint8_t { program, handler };
  // Takes room. False: there is none, or threads wait for some.
  [[nodiscard]] bool try_take(std::size_t bytes, Caller caller) noexcept {
    if (caller == Caller::program && waiting_.load() != 0) return false;
    return take(bytes, caller == Caller::program ? 1 : kBudgets);
  }
  // Takes room on a thread of the program, which waits behind the threads that wait already. False
  // once `deadline` has passed. After give_up() there is room for all. `ask` is
  // called once any_wait(), without a lock: it asks the peer for room.
  [[nodiscard]] bool wait(
      std::size_t bytes, Clock::time_point deadline, const std::function<void()>& ask = [] {})
      STITCH_EXCLUDES(mutex_);
  void give_back(std::size_t bytes, std::size_t calls = 1) noexcept STITCH_EXCLUDES(mutex_) {
    used_.fetch_sub(packed(bytes, calls));
    if (waiting_.load() != 0) wake();
  }
  // Whether threads wait for room.
  [[nodiscard]] bool any_wait() const noexcept { return waiting_.load() != 0; }

  // ---- the window, of requests that have room
  // Counts a request as unwritten. False: it goes through send_later().
  [[nodiscard]] bool try_send(std::size_t bytes) noexcept {
    return queued_[small(bytes)].load() == 0 && open_window(bytes);
  }
  // `go()` passes the request to the transport; false: it is not wanted any more. In the order of
  // `id`, by the thread that makes the window; destroyed without a call by drop().
  void send_later(std::uint64_t id, std::size_t bytes, base::UniqueFunction<bool()> go)
      STITCH_EXCLUDES(mutex_);
  void drop(std::uint64_t id) noexcept STITCH_EXCLUDES(mutex_);
  // The transport has written the request, or dropped it.
  void written(std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_) {
    unwritten_[small(bytes)].fetch_sub(bytes);
    if (queued_[0].load() + queued_[1].load() != 0) pump();
  }

  // The peer is lost, or this worker stops: each request goes, and fails at the session.
  void give_up() noexcept STITCH_EXCLUDES(mutex_);

  // ---- requests of the peer
  // Counts one until end_received(). The limit that it exceeds, as text; null when there is room.
  static constexpr char kBytesName[] = "max_inflight_bytes";
  static constexpr char kCallsName[] = "max_inflight_calls";
  [[nodiscard]] const char* count_received(std::size_t bytes) noexcept;
  void end_received(std::size_t bytes) noexcept { received_.fetch_sub(packed(bytes)); }

  struct Numbers {
    std::size_t calls = 0;            // under way
    std::size_t bytes = 0;            // likewise, with kCallBytes each
    std::size_t unwritten_bytes = 0;  // of these, with the transport
    std::size_t waiting = 0;          // threads for room, and requests for the window
    std::size_t waiting_bytes = 0;    // of these requests
    std::size_t received_calls = 0;   // of the peer
    std::size_t received_bytes = 0;
  };
  [[nodiscard]] Numbers numbers() const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] const PeerLimits& limits() const noexcept { return limits_; }

 private:
  // Calls in the upper bits, bytes in the others.
  static constexpr int kByteBits = 41;
  static constexpr std::uint64_t kByteMask = (std::uint64_t{1} << kByteBits) - 1;
  [[nodiscard]] static std::uint64_t packed(std::size_t bytes, std::size_t calls = 1) noexcept {
    return (std::uint64_t{calls} << kByteBits) + bytes + calls * kCallBytes;
  }
  [[nodiscard]] static bool small(std::size_t bytes) noexcept { return bytes <= kSmallBytes; }
  [[nodiscard]] bool take(std::size_t bytes, std::size_t budgets) noexcept;
  [[nodiscard]] bool open_window(std::size_t bytes) noexcept;
  void wake() noexcept STITCH_EXCLUDES(mutex_);
  // Passes on what the window lets go; one thread at a time, so that requests keep their order.
  void pump() noexcept STITCH_EXCLUDES(mutex_);
  struct Unsent {
    std::size_t bytes = 0;
    base::UniqueFunction<bool()> go;
  };
  [[nodiscard]] std::optional<Unsent> next() STITCH_REQUIRES(mutex_);

  const PeerLimits limits_;
  alignas(64) std::atomic<std::uint64_t> used_{0};  // packed
  std::atomic<std::size_t> waiting_{0};             // size of threads_
  std::array<std::atomic<std::size_t>, 2> unwritten_{};
  std::array<std::atomic<std::size_t>, 2> queued_{};  // of unsent_, and the one in pump()
  std::atomic<bool> given_up_{false};
  alignas(64) std::atomic<std::uint64_t> received_{0};  // packed

  mutable base::Mutex mutex_;
  std::list<base::CondVar> threads_ STITCH_GUARDED_BY(mutex_);  // in the order of their waits
  // Requests that wait for the window, large and small, by id.
  std::array<std::map<std::uint64_t, Unsent>, 2> unsent_ STITCH_GUARDED_BY(mutex_);
  bool pumping_ STITCH_GUARDED_BY(mutex_) = false;
  bool pump_again_ STITCH_GUARDED_BY(mutex_) = false;
};

// The room of one request, until it is destroyed. Moved, not copied.
class Room {
 public:
  Room() = default;
  // Of a request that has taken it.
  Room(PeerBudget& budget, std::size_t bytes) noexcept : budget_(&budget), bytes_(bytes) {}
  Room(Room&& other) noexcept
      : budget_(std::exchange(other.budget_, nullptr)), bytes_(other.bytes_) {}
  Room& operator=(Room&& other) noexcept {
    if (this != &other) {
      end();
      budget_ = std::exchange(other.budget_, nullptr);
      bytes_ = other.bytes_;
    }
    return *this;
  }
  ~Room() { end(); }
  void end() noexcept {
    if (budget_ != nullptr) std::exchange(budget_, nullptr)->give_back(bytes_);
  }
  // It is given back elsewhere.
  void release() noexcept { budget_ = nullptr; }

 private:
  PeerBudget* budget_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace stitch::rpc
