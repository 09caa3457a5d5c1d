#pragma once

#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "stitch/base/descriptor.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/polling/poll_source.h"

namespace stitch::transport {

// The sources that a poller watches, and the descriptors its threads sleep on.
//
// The kernel watches all sources (sockets_). A round of polling visits the active ones: those that
// make no system call, and of the others those that moved something lately or have something
// pending; the rest costs nothing until the kernel reports it.
//
// Thread contract: any thread for what needs no role. The role is the right to poll: what requires
// role() is for the thread that holds it. Lock order: role() before mutex_ and arm_mutex_; nothing
// is locked under these. Only the role is held while sources are called.
class PollSet {
 public:
  using Clock = std::chrono::steady_clock;
  using SourceId = std::uint64_t;

  // Throws Error(internal) when the system refuses the descriptors.
  PollSet();

  // Registration: as Poller's functions of these names, which wake a thread afterwards if need be.
  [[nodiscard]] SourceId new_id() noexcept { return next_id_.fetch_add(1); }
  void add(SourceId id, int fd, std::shared_ptr<PollSource> source) STITCH_EXCLUDES(mutex_);
  void watch_room(SourceId id, bool watch) STITCH_EXCLUDES(mutex_);
  void pause(SourceId id, bool paused) STITCH_EXCLUDES(mutex_);
  // Returns the source, null when there was none: the caller drops it without locks.
  std::shared_ptr<PollSource> remove(SourceId id) noexcept STITCH_EXCLUDES(mutex_);
  // True when a thread must be woken for it.
  [[nodiscard]] bool poll_soon(SourceId id) noexcept STITCH_EXCLUDES(mutex_);
  // Whether any source makes system calls when it is polled.
  [[nodiscard]] bool any_expensive() const noexcept { return expensive_.load() > 0; }

  // Held by the thread that polls.
  [[nodiscard]] base::Mutex& role() STITCH_THREAD_ANNOTATION(lock_returned(role_)) { return role_; }
  // Calls poll() of the active sources, and asks the kernel about all of them every so many rounds,
  // or now when `ask_kernel_now`. True when something moved.
  bool poll_once(bool ask_kernel_now) STITCH_REQUIRES(role_);
  // Whether a source is moving().
  [[nodiscard]] bool any_moving() const noexcept STITCH_REQUIRES(role_);
  // The next round, on whichever thread, asks the kernel. Any thread.
  void ask_kernel_soon() noexcept { ask_kernel_soon_.store(true, std::memory_order_relaxed); }
  // The next round asks the kernel.
  void ask_kernel_next() STITCH_REQUIRES(role_);
  // Whether the last round has made system calls, or moved something: it took as long as
  // kQuickRounds others.
  [[nodiscard]] bool last_was_slow() const noexcept STITCH_REQUIRES(role_) { return slow_; }
  // A round that makes system calls counts as so many that make none.
  static constexpr int kQuickRounds = 4;
  // The last round was quick, and the caller has waited so long that it counts as a slow one.
  void waited() noexcept STITCH_REQUIRES(role_) { rounds_since_kernel_ += kQuickRounds - 1; }
  // Runs source->poll() when the delivery under way is finished.
  void poll_after_delivery(std::shared_ptr<PollSource> source) noexcept STITCH_REQUIRES(role_);
  // Takes up what has been added, removed and asked for.
  void refresh() noexcept STITCH_REQUIRES(role_) {
    if (any_changes_.load()) take_up_changes();
  }
  void wake_sources() STITCH_REQUIRES(role_);
  // Puts all sources to sleep. False, and all are awake again, when something must be polled first.
  [[nodiscard]] bool put_sources_to_sleep() STITCH_REQUIRES(role_);

  // Sleeps in the kernel with the role until a source is ready, `done` is set, the bell is rung or
  // `limit` has passed, then calls what is ready. False, at once, when `done` is set or wakes
  // another thread, or the kernel refuses. REQUIRES: put_sources_to_sleep(), after arm(false).
  [[nodiscard]] bool wait_with_role(base::AwaitedFlag& done, std::chrono::milliseconds limit)
      STITCH_REQUIRES(role_);
  // Wakes the thread in wait_with_role(), or the next one.
  void ring_bell() noexcept;

  // Has sockets_ wake a thread in wait(), once, or no longer.
  void arm(bool armed) STITCH_EXCLUDES(arm_mutex_);
  // Wakes the threads in wait(), until clear_doorbell().
  void ring_doorbell() noexcept;
  void clear_doorbell() noexcept;
  struct WakeUp {
    bool traffic = false;   // a source is ready
    bool doorbell = false;  // the doorbell was rung
  };
  // Sleeps in the kernel until a source is ready (see arm()) or the doorbell is rung; it may return
  // without either.
  WakeUp wait();
  // Sleeps until the doorbell is rung, which it returns, or `limit` has passed.
  [[nodiscard]] bool wait_for_doorbell(std::chrono::nanoseconds limit);

  // The end. What is returned is destroyed without the role.
  struct Polled;
  using Dropped = std::unordered_map<SourceId, Polled>;
  void drop_polled(Dropped& into) STITCH_REQUIRES(role_);
  void drop_watched() STITCH_EXCLUDES(mutex_);

  // What the thread that polls knows of a source.
  struct Polled {
    SourceId id = 0;
    std::shared_ptr<PollSource> source;
    bool cheap = false;
    bool passive = false;
    std::optional<std::size_t> at;  // in active_; nothing while it sleeps
    Clock::time_point last_moved;   // unless it is cheap
  };

 private:
  // Quick rounds between two looks at the kernel's report of all descriptors. More rounds would
  // delay sources that are not active; fewer would spend a system call on most rounds.
  static constexpr int kRoundsPerKernelLook = 16 * kQuickRounds;

  struct Watched {
    int fd = -1;
    bool room = false;
    bool paused = false;
    bool changed = false;  // whether it is among changes_
    std::shared_ptr<PollSource> source;
  };

  void changed(SourceId id) noexcept STITCH_REQUIRES(mutex_);
  void update_epoll(const Watched& watched, SourceId id) STITCH_REQUIRES(mutex_);
  void take_up_changes() noexcept STITCH_REQUIRES(role_);
  void take_up(SourceId id) STITCH_REQUIRES(role_);
  void activate(Polled& polled) STITCH_REQUIRES(role_);
  void deactivate(Polled& polled) noexcept STITCH_REQUIRES(role_);
  bool ask_kernel() STITCH_REQUIRES(role_);
  using Events = std::array<epoll_event, 32>;  // the kernel keeps the rest for the next time
  bool call_ready(const Events& events, int count) STITCH_REQUIRES(role_);
  void after_delivery() noexcept STITCH_REQUIRES(role_) {
    if (!after_delivery_.empty()) [[unlikely]]
      poll_after_delivery_now();
  }
  void poll_after_delivery_now() noexcept STITCH_REQUIRES(role_);

  const base::Descriptor sockets_;  // epoll of all sources and bell_
  const base::Descriptor bell_;     // eventfd
  const base::Descriptor wake_;     // eventfd: the doorbell
  const base::Descriptor sleeper_;  // epoll of sockets_ (one-shot) and wake_: what wait() sleeps on
  std::atomic<SourceId> next_id_{1};

  base::Mutex role_;
  std::unordered_map<SourceId, Polled> polled_ STITCH_GUARDED_BY(role_);  // all sources
  std::vector<Polled*> active_ STITCH_GUARDED_BY(role_);  // those that are visited each round
  std::vector<SourceId> changes_taken_ STITCH_GUARDED_BY(role_);  // by refresh()
  std::vector<std::shared_ptr<PollSource>> after_delivery_ STITCH_GUARDED_BY(role_);
  bool slow_ STITCH_GUARDED_BY(role_) = false;            // the last round
  int rounds_since_kernel_ STITCH_GUARDED_BY(role_) = 0;  // was asked; quick ones
  std::atomic<bool> ask_kernel_soon_{false};
  // The active sources need no wake-ups: a thread polls, or one stands by. Written by the holder of
  // role_.
  std::atomic<bool> awake_{false};

  base::Mutex mutex_;
  std::unordered_map<SourceId, Watched> watched_ STITCH_GUARDED_BY(mutex_);
  std::vector<SourceId> changes_ STITCH_GUARDED_BY(mutex_);  // added, removed, to be polled soon
  std::atomic<bool> any_changes_{false};   // whether refresh() has something to do
  std::atomic<std::size_t> expensive_{0};  // sources that are neither cheap nor passive

  base::Mutex arm_mutex_;  // keeps armed_ and the kernel in step
  // Whether sockets_ wakes a thread. Written under arm_mutex_, and without it by the thread that
  // has been woken, which disarms sockets_: it may be wrong only while that thread is awake.
  std::atomic<bool> armed_{false};
};

}  // namespace stitch::transport
