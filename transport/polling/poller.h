#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "stitch/base/answer_wait.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/deferred_work.h"
#include "stitch/transport/polling/core_demand.h"
#include "stitch/transport/polling/poll_set.h"
#include "stitch/transport/polling/poll_source.h"
#include "stitch/transport/polling/stand_by.h"

namespace stitch::transport {

// What a thread is to the poller that it polls or works for. Own threads:
//
//             woken               idle, work deferred           reclaim()
//   asleep ----------> owned ------------------------> working ----------> reclaimed
//     ^                | ^ ^                              |                   |
//     '----------------' | '-----------work done----------'                   |
//           idle         '------------work done: the role is kept-------------'
//
// Other threads, and own ones that wait within their work:
//
//                       help()              done, deadline, work for others
//   none, working ----------------> helping -----------------------------------> none, working
//
// owned, helping and reclaimed are entered only when the role is free: a thread that is woken, or
// whose work is done, sleeps otherwise; help() and reclaim() return.
//
//   state      holds the role   calls sources   does deferred work   is woken by
//   none       no               no              no                   -
//   asleep     no               no              no                   armed sockets, doorbell (or a
//                                                                    tick: StandBy)
//   owned      yes              yes             no                   -
//   helping    yes              yes             when it was working  all sockets, bell
//   working    no               no              yes                  -
//   reclaimed  yes              not yet         yes, its end         -
//
// Invariants:
// 1. At most one thread holds the role (owned, helping, reclaimed). It alone calls sources.
// 2. A thread that releases the role leaves all sources asleep and the sockets armed, or rings the
//    doorbell so that another thread polls on, or an own thread stands by, or a thread is about to
//    be in help() (AnswerWait): the last of these to give that up arms. It arms after the release:
//    the other own thread may have found the role taken and gone to sleep just before. A thread
//    that stands by stops only with the role, which it takes when that has been free for a tick.
// 3. A wake-up requested by doorbell (doorbell_pending_) is pending until a thread takes the role.
//    A thread that releases the role while one is pending rings again: the thread that was woken
//    may have found the role taken and gone back to sleep. A thread that is about to sleep with the
//    role looks at it after it has said so (sleeps_with_role_), and a thread that rings looks at
//    that afterwards: one of the two sees the other.
// 4. A change of the sources is entered before it is read whether they are awake; the thread that
//    puts them to sleep clears that mark before it looks at the changes. One of the two sees the
//    other (PollSet::poll_soon).
// 5. Work is deferred only by an owned thread, and only while the other own thread is asleep or
//    stands by, so that messages which arrive meanwhile are read.
// 6. stopping_ is set before the doorbell is rung for the last time, and a thread that clears the
//    doorbell looks at stopping_ afterwards: all own threads end.
enum class PollRole : std::uint8_t { none, asleep, owned, helping, working, reclaimed };

// Polls the sources of one endpoint: busy-polls while traffic is hot and a core is free for that
// (CoreDemand), sleeps in the kernel otherwise. Which thread polls is decided here, which sources
// are visited in PollSet.
//
// At any time at most one thread polls: one of the poller's own two, or one that waits for what a
// message will bring (help()). That one sleeps with the role, so that the kernel wakes it, and not
// a thread that then wakes it. Waking a thread costs more than most handlers do. So when messages
// bring work that may block, the own thread that read them does the work itself (defer()) once no
// more messages arrive: it releases the role, and the other own thread, asleep in the kernel, wakes
// up only if something arrives meanwhile.
//
// With several messages on their way something always does arrive while no thread polls; an own
// thread that has been woken in vain like that stands by (StandBy): meanwhile messages wake no
// thread, but wait for the next one that polls.
//
// Shared by an endpoint, its connections and its own threads, which are detached: one that never
// returns from deferred work cannot keep the endpoint from ending. Thread contract: any thread
// unless said otherwise. No lock but the role is held while sources are called; calls from inside
// them to help() do nothing. Lock order: PollSet's role before mutex_.
class Poller final : public base::AnswerWait::Reader, public std::enable_shared_from_this<Poller> {
 public:
  using Clock = PollSet::Clock;
  using SourceId = PollSet::SourceId;

  // Starts its threads. Throws Error(internal) or Error(overloaded) when the system refuses.
  // `demand` outlives the poller.
  [[nodiscard]] static std::shared_ptr<Poller> start(
      const std::string& thread_name, CoreDemand& demand = CoreDemand::of_this_process());
  explicit Poller(CoreDemand& demand) : demand_(demand) {}  // use start()

  // A new id for a source, never reused.
  [[nodiscard]] SourceId new_id() noexcept { return set_.new_id(); }
  // Starts polling `source` and watching `fd` for input. Throws Error(internal) when the kernel
  // refuses. REQUIRES: nothing is watched under `id` now.
  void add(SourceId id, int fd, std::shared_ptr<PollSource> source);
  // Watches also for room to write, or no longer. Does nothing when it has been removed.
  void watch_room(SourceId id, bool watch) { set_.watch_room(id, watch); }
  // Stops watching for input, except for the end of the stream, or starts again.
  void pause(SourceId id, bool paused) { set_.pause(id, paused); }
  // Drops the source; a call to it that is running continues. Call before its descriptor is closed.
  void remove(SourceId id) noexcept;
  // Has a source that has become pending() polled soon: by the thread that polls, or by one that is
  // woken for it; while one stands by, by the next that polls. Does nothing when it has been
  // removed.
  void poll_soon(SourceId id) noexcept;

  // Polls and sleeps on this thread until `done` is set or `deadline` passes. Returns earlier when
  // another thread polls, when what arrives is work for others, and at its last milliseconds. True
  // when `done` is set.
  bool help(base::AwaitedFlag& done, Clock::time_point deadline)
      STITCH_NO_THREAD_SAFETY_ANALYSIS;  // returns without the role
  // Before this thread sends: if that is a request whose answer it waits for at once, and others
  // want the cores, messages wake no own thread until it is in help().
  void expect_help();
  void answer_not_awaited() noexcept override;
  // Whether this thread holds the role of this poller, as within a call to a source.
  [[nodiscard]] bool on_this_thread() const noexcept;
  using Work = DeferredWork;
  // Asks this thread to do `work` once all that has arrived is delivered, without the role. Several
  // pieces that come together are one: only the first `work` is kept. False, and nothing is taken,
  // when this thread cannot (invariant 5). REQUIRES: on_this_thread().
  [[nodiscard]] bool defer(Work& work);
  // Within a piece of work, when what follows will not block any more and will bring messages: this
  // thread takes the role back if it is free.
  void reclaim() STITCH_NO_THREAD_SAFETY_ANALYSIS;  // may return with the role
  // Runs source->poll() when the delivery under way on this thread is finished. REQUIRES:
  // on_this_thread().
  void poll_after_delivery(std::shared_ptr<PollSource> source) noexcept;

  // Ends the threads. Waits at most 50 ms for one inside deferred work; it ends when that returns,
  // and nothing is polled any more. Not from a source. A second call does nothing.
  void join() STITCH_EXCLUDES(mutex_);

 private:
  // Why spin() returned: `done` was set; nothing arrived, or other threads want the core; the
  // deadline passed; another thread wants the role, or the poller ends; nothing more arrived and
  // work was deferred.
  enum class SpinResult : std::uint8_t { done, idle, stopped, role_wanted, work_deferred };
  // What is left when an owned thread releases the role.
  struct Handover {
    Work work;                  // to be done without the role, if any
    bool sources_left = false;  // invariant 2; otherwise another thread must poll on
  };

  void run() STITCH_NO_THREAD_SAFETY_ANALYSIS;  // may keep the role from one round to the next
  void sleep();
  // True when it has the role.
  [[nodiscard]] bool stand_by() STITCH_NO_THREAD_SAFETY_ANALYSIS;
  [[nodiscard]] Handover poll_as_owner(bool woken) STITCH_REQUIRES(set_.role());
  [[nodiscard]] Handover poll_until_idle() STITCH_REQUIRES(set_.role());
  // True when the role is back afterwards. `forks`: base::fork_count() of this thread's process.
  [[nodiscard]] bool do_deferred(Work& work, std::uint32_t forks);
  // Busy-polls until nothing has arrived for `limit`, or others want the core.
  SpinResult spin(const base::AwaitedFlag* done, Clock::duration limit, Clock::time_point deadline)
      STITCH_REQUIRES(set_.role());
  // Waits for the holder of the role to release it, for microseconds. True when it has it.
  [[nodiscard]] bool take_over(const base::AwaitedFlag& done) STITCH_NO_THREAD_SAFETY_ANALYSIS;
  void refused_sleep() STITCH_REQUIRES(set_.role());
  // Sleeps with the role until something arrives, `done` is set or `deadline` nears, and polls what
  // arrived. False, at once, when this thread must not.
  [[nodiscard]] bool sleep_with_role(base::AwaitedFlag& done, Clock::time_point deadline)
      STITCH_REQUIRES(set_.role());
  void hand_off_deferred() noexcept STITCH_REQUIRES(set_.role());
  // Puts the sources to sleep, unless a thread stands by. False when they must be polled on.
  [[nodiscard]] bool leave_sources() STITCH_REQUIRES(set_.role()) {
    return stand_by_.active() ? !set_.any_moving() : set_.put_sources_to_sleep();
  }
  void took_role() STITCH_REQUIRES(set_.role()) {
    stand_by_.role_taken();
    if (doorbell_pending_.load()) doorbell_pending_.store(false);
  }
  void release_role(bool sources_left) STITCH_RELEASE(set_.role());
  // Has a thread look at the sources again, unless this thread polls them anyway.
  void wake_a_thread() noexcept;
  void count_working(int change) STITCH_EXCLUDES(mutex_);

  PollSet set_;
  CoreDemand& demand_;
  StandBy stand_by_;
  Work deferred_ STITCH_GUARDED_BY(set_.role());
  bool refused_work_ STITCH_GUARDED_BY(set_.role()) =
      false;  // the thread in help() has, in defer()
  unsigned refused_sleeps_ STITCH_GUARDED_BY(set_.role()) = 0;
  Clock::time_point last_look_ STITCH_GUARDED_BY(set_.role());  // at the clock, about now

  std::atomic<bool> stopping_{false};
  std::atomic<int> helpers_{0};           // threads in help() that want the role
  std::atomic<bool> role_pinned_{false};  // its holder does not release it for helpers: it helps
                                          // itself, or has much to move; written by it
  std::atomic<int> asleep_{0};            // own threads that sleep or stand by, or are about to
  std::atomic<bool> doorbell_pending_{false};  // invariant 3
  std::atomic<int> expected_{0};  // threads that are about to be in help(); invariant 2
  std::atomic<bool> sleeps_with_role_{false};  // the holder of the role does, or is about to

  base::Mutex mutex_;
  int threads_ STITCH_GUARDED_BY(mutex_) = 0;  // own ones that have not ended
  base::CondVar thread_changed_;
  std::atomic<int> working_{0};  // own threads inside deferred work
};

}  // namespace stitch::transport
