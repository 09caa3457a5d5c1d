#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "stitch/base/descriptor.h"
#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"

namespace stitch::transport {

// Something that bytes come from and go to: a connection or a listener. Shared by its owner and its
// poller. Thread contract: one call at a time, on whichever thread polls; no lock of the poller is
// held.
class PollSource {
 public:
  virtual ~PollSource() = default;
  // Moves what can be moved without waiting, and delivers it. True when something moved.
  virtual bool poll() = 0;
  // The kernel says that its descriptor is ready (epoll's events). True when something moved.
  virtual bool ready(std::uint32_t events) = 0;
  // Whether poll() is worth calling again and again because it makes no system call.
  [[nodiscard]] virtual bool cheap() const noexcept { return false; }
  // Whether poll() never does anything, as with a listener: only ready() is called.
  [[nodiscard]] virtual bool passive() const noexcept { return false; }
  // Of a source that is not cheap: whether poll() has something to write, so that it is called even
  // if nothing has come lately.
  [[nodiscard]] virtual bool pending() const noexcept { return false; }
  // Likewise: whether it waits for room to write, so that the kernel is asked instead of calling
  // poll().
  [[nodiscard]] virtual bool blocked() const noexcept { return false; }
  // Nobody will poll until the descriptor is ready or poll_soon() is called: from now on the other
  // side must wake us. False when something has come meanwhile, and it must be polled first.
  virtual bool sleep() { return true; }
  // Somebody polls again: no need to wake us.
  virtual void wake() {}
};

// Watches sources for one endpoint: polls them while traffic is hot, sleeps in the kernel
// otherwise.
//
// Polled again and again are the sources that make no system call, and of the others those that
// moved something lately or asked for it; the rest costs nothing until the kernel reports it. A
// source that throws is let go of; it should have dealt with its errors itself.
//
// At any time at most one thread polls: one of the poller's own two, or one that has nothing better
// to do because it waits for what a message will bring (see help()). The poller's own threads spin
// after a message for as long as that has paid off lately, at most kMaxSpin, giving way to other
// threads all the time. When those want the processor, they sleep earlier, and try another
// processor: at once, and again after ever longer whiles as long as that does not help.
//
// Waking a thread costs more than most handlers do. So when messages bring work that may block, the
// thread that read them does the work itself (see defer()) once nothing more has come: it leaves
// the polling to the other one, which sleeps in the kernel and wakes only if something comes
// meanwhile.
//
// Shared by an endpoint, its connections and its own threads, which are detached: one that never
// returns from deferred work cannot keep the endpoint from ending. Thread contract: any thread
// unless said otherwise. No lock is held while sources are called, but calls from inside them to
// help() do nothing.
class Poller : public std::enable_shared_from_this<Poller> {
 public:
  using Clock = std::chrono::steady_clock;
  using SourceId = std::uint64_t;

  // Its threads run from now on. Throws Error(internal) or Error(overloaded) when the system
  // refuses.
  [[nodiscard]] static std::shared_ptr<Poller> start(const std::string& thread_name);
  Poller();  // use start()
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // A name for a source, for good.
  [[nodiscard]] SourceId new_id() noexcept { return next_id_.fetch_add(1); }
  // Starts polling `source` and watching `fd` for what comes in. Throws Error(internal) when the
  // kernel refuses. REQUIRES: nothing is watched under `id` now.
  void add(SourceId id, int fd, std::shared_ptr<PollSource> source) STITCH_EXCLUDES(mutex_);
  // Watches also for room to write, or no longer. Does nothing when it has been removed.
  void watch_room(SourceId id, bool watch) STITCH_EXCLUDES(mutex_);
  // Stops watching for what comes in, but for its end, or starts again.
  void pause(SourceId id, bool paused) STITCH_EXCLUDES(mutex_);
  // Lets go of the source; a call to it that runs goes on. Before its descriptor is closed.
  void remove(SourceId id) noexcept STITCH_EXCLUDES(mutex_);

  // Polls on this thread until `done` is set or polling has brought nothing for a while. True when
  // it is set.
  bool help(const std::atomic<bool>& done, Clock::time_point deadline);
  // Whether this thread is inside a call to a source of this poller.
  [[nodiscard]] bool on_this_thread() const noexcept;
  // Work that messages brought. work(true) does a piece of it on this thread, which may block, and
  // says whether there is more; work(false) has other threads do it and returns at once.
  using Work = base::UniqueFunction<bool(bool here)>;
  // Asks this thread to do `work` when everything that has come is delivered, with nobody polling
  // on it meanwhile. Several pieces that come together are one: only the first `work` is kept.
  // False, and nothing is taken, when this thread cannot: it is not the poller's own, or there is
  // no other one to poll. REQUIRES: on_this_thread().
  [[nodiscard]] bool defer(Work& work);
  // Within work(true), when what follows will not block any more and will bring messages: polling
  // is this thread's again.
  void reclaim() STITCH_NO_THREAD_SAFETY_ANALYSIS;  // may leave with the role
  // Has a source that has become pending() polled soon: by the thread that polls, or by one that is
  // woken for it. Does nothing when it has been removed.
  void poll_soon(SourceId id) noexcept STITCH_EXCLUDES(mutex_);
  // Runs `source`->poll() when what is being delivered on this thread has been delivered. False,
  // and it does not, when there is no memory. REQUIRES: on_this_thread().
  [[nodiscard]] bool poll_after_delivery(std::shared_ptr<PollSource> source) noexcept;

  // Ends the threads. One that is inside deferred work is waited for 50 ms at most; it ends when
  // that returns, and nothing is polled any more. Not from a source. A second call does nothing.
  void join() STITCH_EXCLUDES(mutex_);

  static constexpr std::chrono::microseconds kMaxSpin{100};

 private:
  struct Watched {
    int fd = -1;
    bool room = false;
    bool paused = false;
    bool changed = false;  // whether it is among changes_
    std::shared_ptr<PollSource> source;
  };
  // What the thread that polls knows of a source.
  struct Polled {
    SourceId id = 0;
    std::shared_ptr<PollSource> source;
    bool cheap = false;
    bool passive = false;
    std::optional<std::size_t> at;  // in active_; nothing: it sleeps
    Clock::time_point last_moved;
  };
  enum class Spun : std::uint8_t { done, nothing_came, wanted, work };

  void run() STITCH_NO_THREAD_SAFETY_ANALYSIS;  // may keep the role from one round to the next
  void nudge() noexcept;
  void ring() noexcept;
  void changed(SourceId id) noexcept STITCH_REQUIRES(mutex_);
  void took_role() STITCH_REQUIRES(role_) {
    if (nudged_.load()) nudged_.store(false);
  }
  void entered_work(int change) STITCH_EXCLUDES(mutex_);
  // The caller has the role of the one that polls.
  bool poll_once(bool ask_kernel) STITCH_REQUIRES(role_);
  Spun spin(const std::atomic<bool>* done, std::chrono::nanoseconds limit,
            Clock::time_point deadline) STITCH_REQUIRES(role_);
  bool take_events(int timeout_ms) STITCH_REQUIRES(role_);
  void after_delivery() noexcept STITCH_REQUIRES(role_);
  // Takes up what has been added, removed and asked for. What there is no memory for stays for the
  // next time.
  void refresh() noexcept STITCH_REQUIRES(role_) {
    if (any_changes_.load()) take_up_changes();
  }
  void take_up_changes() noexcept STITCH_REQUIRES(role_);
  void take_up(SourceId id) STITCH_REQUIRES(role_);
  void take_up_all() STITCH_REQUIRES(role_);
  void activate(Polled& polled) STITCH_REQUIRES(role_);
  void deactivate(Polled& polled) noexcept STITCH_REQUIRES(role_);
  // source->poll() or source->ready(), which should not throw.
  bool poll_source(Polled& polled) noexcept STITCH_REQUIRES(role_);
  bool source_ready(Polled& polled, std::uint32_t events) noexcept STITCH_REQUIRES(role_);
  void give_deferred_away() noexcept STITCH_REQUIRES(role_);
  void drop_sources(std::unordered_map<SourceId, Polled>& into) STITCH_REQUIRES(role_);
  bool all_asleep() STITCH_REQUIRES(role_);
  void all_awake() STITCH_REQUIRES(role_);
  void arm(bool armed) STITCH_EXCLUDES(arm_mutex_);
  void give_way(Clock::time_point now) STITCH_REQUIRES(role_);
  void yielded(Clock::time_point since, Clock::time_point until) STITCH_REQUIRES(role_);
  // Why a thread that polls leaves that to others.
  struct Pause {
    Work work;           // to be done meanwhile, if any
    bool quiet = false;  // whether the sources sleep
  };
  [[nodiscard]] Pause poll_until_idle() STITCH_REQUIRES(role_);
  void give_up_role(bool quiet) STITCH_RELEASE(role_);
  void update_epoll(const Watched& watched, SourceId id) STITCH_REQUIRES(mutex_);

  const base::Descriptor sockets_;  // epoll of all sources
  const base::Descriptor
      sleeper_;  // epoll of sockets_ (one-shot) and stop_: what the thread sleeps on
  const base::Descriptor stop_;  // eventfd: wakes the threads, for good or to look around

  std::atomic<SourceId> next_id_{1};
  std::atomic<bool> stopping_{false};
  std::atomic<int> helpers_{0};          // threads that poll or want to
  std::atomic<bool> keeps_role_{false};  // the one that polls does not make room: it waits for
                                         // something, or has much to move; written by it
  std::atomic<int> sleepers_{0};         // own threads that sleep, or are about to

  base::Mutex role_;  // held by the thread that polls
  std::unordered_map<SourceId, Polled> polled_ STITCH_GUARDED_BY(role_);  // all sources
  std::vector<SourceId> changes_taken_ STITCH_GUARDED_BY(role_);          // by refresh()
  std::vector<Polled*> active_ STITCH_GUARDED_BY(role_);  // those that are visited each round
  std::vector<std::shared_ptr<PollSource>> after_delivery_ STITCH_GUARDED_BY(role_);
  Work deferred_ STITCH_GUARDED_BY(role_);
  int rounds_since_look_ STITCH_GUARDED_BY(role_) = 0;  // at the kernel's
  std::chrono::nanoseconds spin_limit_ STITCH_GUARDED_BY(role_) = kMaxSpin;
  Clock::time_point idle_since_ STITCH_GUARDED_BY(role_);
  int short_helps_ STITCH_GUARDED_BY(role_) = 0;  // how many more waiting threads should not spin
  std::chrono::nanoseconds give_way_after_ STITCH_GUARDED_BY(role_){
      0};  // of polling that moved something every time
  // Since when somebody else runs whenever this thread gives way, when that was last so, from when
  // on the processor may be left for another one, and for how long not after that.
  int yields_that_switched_ STITCH_GUARDED_BY(role_) = 0;
  Clock::time_point last_crowded_ STITCH_GUARDED_BY(role_);
  Clock::time_point next_move_ STITCH_GUARDED_BY(role_);
  std::chrono::nanoseconds move_pause_ STITCH_GUARDED_BY(role_){0};
  std::atomic<bool> awake_{false};  // the other sides, and senders here, need not wake us; written
                                    // by the holder of role_
  base::Mutex
      arm_mutex_;  // after role_; nothing is locked under it. Keeps armed_ and the kernel in step
  // sockets_ will wake the thread. Written under arm_mutex_, and without it by the thread that has
  // been woken, which disarms sockets_: it may be wrong as long as that thread is awake.
  std::atomic<bool> armed_{false};
  // Whether somebody has been woken to look around who may have found the role taken. Set before
  // ring(), cleared by who takes the role, before it polls; who gives the role up while it is set
  // rings again, as the bell may have been heard in vain.
  std::atomic<bool> nudged_{false};

  base::Mutex mutex_;
  std::unordered_map<SourceId, Watched> watched_ STITCH_GUARDED_BY(mutex_);
  std::vector<SourceId> changes_ STITCH_GUARDED_BY(mutex_);  // added, removed, to be polled soon
  bool changes_lost_ STITCH_GUARDED_BY(mutex_) = false;      // for want of memory: look at all
  std::atomic<bool> any_changes_{false};   // whether refresh() has something to do
  std::atomic<std::size_t> expensive_{0};  // sources that are not cheap

  int threads_ STITCH_GUARDED_BY(mutex_) = 0;  // own ones that have not ended
  int working_ STITCH_GUARDED_BY(mutex_) = 0;  // of those: inside deferred work
  base::CondVar thread_changed_;
};

}  // namespace stitch::transport
