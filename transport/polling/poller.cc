// One file, though long: which thread polls, and which sleeps, is one set of invariants.
#include "stitch/transport/polling/poller.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/callback_scope.h"
#include "stitch/base/error.h"
#include "stitch/base/forked.h"

namespace stitch::transport {

namespace {

// Rounds that may bring more messages before deferred work is handed to other threads: work does
// not wait for a stream of messages to end.
constexpr int kMaxWorkDelays = 2;
// Rounds in which a helping thread, done, still polls for sources that are not ready to sleep. More
// traffic than that is left to the own threads.
constexpr int kRoundsAfterHelp = 2;
// Microseconds. How long a thread in help() waits for the holder of the role to release it: a few
// rounds of polling, less than the sleep it would save costs.
constexpr std::chrono::microseconds kTakeOverTimeout{20};
// How long an own thread busy-polls after the last message, and a thread in help() that has read
// work for others: what it costs to sleep and to be woken.
constexpr std::chrono::microseconds kPollAfterTraffic{100};
// How long a thread in help() busy-polls: a call that computes for a millisecond is answered
// without a wake-up.
constexpr std::chrono::microseconds kPollForAnswer{2000};
// Empty rounds before a busy-polling thread yields in each of them: what arrives is seen the sooner
// the shorter a round is. Between quick ones there is one pause, and each fourth looks at the
// clock.
constexpr int kRoundsBeforeYield = 8 * PollSet::kQuickRounds;
constexpr int kPausesPerSlowRound = 8;
// A sleep with the role ends so long before its deadline, which the caller keeps more exactly.
constexpr std::chrono::milliseconds kDeadlineMargin{1};
// How often sources refuse to sleep until the thread that polls yields.
constexpr int kRefusedSleepsBeforeYield = 64;
// How long a sleep with the role lasts at most.
constexpr std::chrono::hours kLongestSleep{1};
// How often it looks until it yields between looks.
constexpr int kTriesBeforeYield = 8;
// Nanoseconds. By how much the kernel may prolong a tick of a thread that stands by.
constexpr std::chrono::nanoseconds kTimerSlack{1000};
// Milliseconds. join() waits for a thread that is just leaving its deferred work, not for one that
// is stuck in it: the caller has waited for that work already.
constexpr std::chrono::milliseconds kDeferredWorkTimeout{50};

struct ThisThread {
  const Poller* owner = nullptr;   // the poller whose own thread this is
  const Poller* polled = nullptr;  // the one whose role it holds
  PollRole role = PollRole::none;
};
constinit thread_local ThisThread this_thread;

// Marks a block in which this thread holds the role of a poller.
class RoleScope {
 public:
  RoleScope(const Poller* poller, PollRole role) : before_(this_thread) {
    this_thread.polled = poller;
    this_thread.role = role;
  }
  ~RoleScope() { this_thread = before_; }
  RoleScope(const RoleScope&) = delete;
  RoleScope& operator=(const RoleScope&) = delete;

 private:
  const ThisThread before_;
  const base::CallbackScope callbacks_;
};

void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Poller::join() {
  stopping_.store(true);
  set_.ring_doorbell();
  set_.ring_bell();
  {
    base::MutexLock lock(mutex_);
    while (threads_ > working_.load()) thread_changed_.wait(mutex_);
    const auto give_up = Clock::now() + kDeferredWorkTimeout;
    while (threads_ > 0 && thread_changed_.wait_until(mutex_, give_up)) {
    }
  }
  PollSet::Dropped polled;  // destroyed without the role
  if (this_thread.role == PollRole::reclaimed && this_thread.owner == this) {
    // Deferred work of this thread had the last reference to the endpoint.
    set_.role().assert_held();
    set_.drop_polled(polled);
  } else {
    base::MutexLock role(set_.role());
    set_.drop_polled(polled);
  }
  set_.drop_watched();
}

void Poller::add(SourceId id, int fd, std::shared_ptr<PollSource> source) {
  set_.add(id, fd, std::move(source));
  wake_a_thread();
}

void Poller::poll_soon(SourceId id) noexcept {
  if (set_.poll_soon(id)) wake_a_thread();
}

void Poller::remove(SourceId id) noexcept {
  const auto source = set_.remove(id);
  if (source) wake_a_thread();  // the thread that polls drops it, too
}

void Poller::wake_a_thread() noexcept {
  if (on_this_thread()) return;
  doorbell_pending_.store(true);
  sleeps_with_role_.load() ? set_.ring_bell() : set_.ring_doorbell();
}

// join() stores stopping_ before it reads working_: one of the two sees what the other has stored.
void Poller::count_working(int change) {
  working_.fetch_add(change);
  if (!stopping_.load()) return;
  base::MutexLock lock(mutex_);
  thread_changed_.notify_all();
}

bool Poller::on_this_thread() const noexcept { return this_thread.polled == this; }

void Poller::poll_after_delivery(std::shared_ptr<PollSource> source) noexcept {
  set_.role().assert_held();
  set_.poll_after_delivery(std::move(source));
}

bool Poller::defer(Work& work) {
  set_.role().assert_held();
  if (this_thread.role != PollRole::owned || asleep_.load() == 0) {
    refused_work_ = true;
    return false;
  }
  if (!deferred_) deferred_ = std::move(work);
  return true;
}

void Poller::reclaim() {
  if (this_thread.role != PollRole::working || this_thread.owner != this || !set_.role().try_lock())
    return;
  set_.role().assert_held();
  this_thread.role = PollRole::reclaimed;
  this_thread.polled = this;
  took_role();
  if (set_.any_expensive()) set_.arm(false);
  set_.wake_sources();
}

void Poller::hand_off_deferred() noexcept {
  if (deferred_) std::exchange(deferred_, nullptr)(DoWork::elsewhere);
}

Poller::SpinResult Poller::spin(const base::AwaitedFlag* done, Clock::duration limit,
                                Clock::time_point deadline) {
  Clock::time_point last_moved = last_look_ = Clock::now();
  int delays = 0;
  bool first = true;
  for (int round = 0;; ++round) {
    if (done != nullptr ? done->is_set() : helpers_.load() > 0 || stopping_.load())
      return done != nullptr ? SpinResult::done : SpinResult::role_wanted;
    const bool moved = set_.poll_once(false);
    if (std::exchange(first, false) && moved) stand_by_.found_waiting();
    if (moved) {
      if (done != nullptr && done->is_set()) return SpinResult::done;
      // Mostly nothing follows at once what brings work, and the clock is not needed.
      if (deferred_ && ++delays <= kMaxWorkDelays) continue;
      if (deferred_ && stand_by_.active() && !set_.any_moving()) return SpinResult::work_deferred;
      hand_off_deferred();
      last_moved = last_look_ = Clock::now();
      round = 0;
      // A helping thread keeps its deadline, however much there is to move.
      if (last_moved >= deadline) return SpinResult::stopped;
      continue;
    }
    if (deferred_) return SpinResult::work_deferred;
    const bool spinning = round < kRoundsBeforeYield;
    if (spinning && !set_.last_was_slow()) {
      relax();
      if ((round + 1) % PollSet::kQuickRounds != 0) continue;
    }
    const auto now = Clock::now();
    if (now - last_look_ > CoreDemand::kLoss) demand_.lost_core(now);
    last_look_ = now;
    if (now >= deadline) return SpinResult::stopped;
    if (now - last_moved >= (refused_work_ ? kPollAfterTraffic : limit) || demand_.wanted(now))
      return SpinResult::idle;
    if (spinning && set_.last_was_slow()) {
      for (int i = 0; i < kPausesPerSlowRound; ++i) relax();
      round += PollSet::kQuickRounds - 1;
    }
    if (spinning) continue;
    if (!set_.last_was_slow()) set_.waited();
    sched_yield();
    last_look_ = Clock::now();  // here, as the next round may move something
    if (last_look_ - now > CoreDemand::kLoss) demand_.lost_core(last_look_);
  }
}

Poller::Handover Poller::poll_until_idle() {
  set_.wake_sources();
  for (;;) {
    const SpinResult spun = spin(nullptr, kPollAfterTraffic, Clock::time_point::max());
    const bool sources_left = leave_sources();
    role_pinned_.store(!sources_left);
    if (spun == SpinResult::work_deferred) {
      return {std::exchange(deferred_, nullptr), sources_left};
    }
    hand_off_deferred();
    if (sources_left) return {nullptr, true};
    refused_sleep();
    set_.poll_once(true);  // although helpers may want the role: each round moves something
  }
}

Poller::Handover Poller::poll_as_owner(bool woken) {
  const RoleScope scope(this, PollRole::owned);
  if (woken) set_.ask_kernel_next();
  Handover handover = poll_until_idle();
  // Some rounds ago, where work was deferred: that need not wait for another look.
  if (!handover.work) last_look_ = Clock::now();
  role_pinned_.store(false);
  return handover;
}

bool Poller::do_deferred(Work& work, std::uint32_t forks) {
  this_thread.role = PollRole::working;
  count_working(1);
  int pieces = 1;
  bool watched = false;
  for (; work(stand_by_.begin_piece(work, watched)); ++pieces) {
    if (this_thread.role != PollRole::reclaimed) continue;
    work(DoWork::elsewhere);
    break;
  }
  if (forks != base::fork_count()) ::_exit(EXIT_FAILURE);  // it has come back in a child, too
  if ((watched || pieces > 1) && stand_by_.end_work(pieces, watched, Clock::now()))
    set_.ring_doorbell();
  work = nullptr;
  count_working(-1);
  const bool has_role = this_thread.role == PollRole::reclaimed;
  this_thread.role = PollRole::none;
  this_thread.polled = nullptr;
  return has_role;
}

void Poller::sleep() {
  this_thread.role = PollRole::asleep;
  asleep_.fetch_add(1);
  const PollSet::WakeUp wake_up = set_.wait();
  asleep_.fetch_sub(1);
  this_thread.role = PollRole::none;
  if (wake_up.traffic) stand_by_.woken(Clock::now());
  if (!wake_up.doorbell || stopping_.load()) return;
  set_.clear_doorbell();
  if (stopping_.load()) set_.ring_doorbell();  // join()'s may have been cleared: it is for all
}

bool Poller::stand_by() {
  this_thread.role = PollRole::asleep;
  asleep_.fetch_add(1);
  const int slack = prctl(PR_GET_TIMERSLACK);
  prctl(PR_SET_TIMERSLACK, kTimerSlack.count());
  bool has_role = false;
  while (!has_role && !stopping_.load()) {
    const bool rung = set_.wait_for_doorbell(StandBy::kTick);
    if (rung) set_.clear_doorbell();
    set_.ask_kernel_soon();
    has_role = (stand_by_.tick() || rung) && set_.role().try_lock();
  }
  if (stopping_.load()) set_.ring_doorbell();  // as in sleep()
  stand_by_.end(Clock::now());
  if (slack > 0) prctl(PR_SET_TIMERSLACK, slack);
  asleep_.fetch_sub(1);
  this_thread.role = PollRole::none;
  return has_role;
}

void Poller::run() {
  this_thread.owner = this;
  const auto forks = base::fork_count();
  bool woken = false;     // since it last polled
  bool has_role = false;  // kept from the last round
  while (has_role || !stopping_.load()) {
    if (has_role || set_.role().try_lock()) {
      set_.role().assert_held();
      took_role();
      Handover handover = poll_as_owner(std::exchange(woken, false));
      has_role = false;
      release_role(handover.sources_left);
      if (handover.work) {
        has_role = do_deferred(handover.work, forks);
        continue;
      }
    }
    if (!demand_.were_wanted() && !sleeps_with_role_.load() && stand_by_.begin(Clock::now())) {
      has_role = stand_by();
    } else {
      sleep();
    }
    woken = true;
  }
}

void Poller::release_role(bool sources_left) {
  const bool watched = stand_by_.active();
  stand_by_.role_released(last_look_);
  set_.role().unlock();
  if (!watched && expected_.load() == 0) set_.arm(true);
  if (!sources_left || doorbell_pending_.load()) set_.ring_doorbell();
}

// Mostly something has just come. A thread that writes may have been preempted, though.
void Poller::refused_sleep() {
  if (++refused_sleeps_ % kRefusedSleepsBeforeYield == 0) sched_yield();
}

bool Poller::sleep_with_role(base::AwaitedFlag& done, Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::min<Clock::duration>(deadline - last_look_, kLongestSleep));
  // A thread that stands by waits for the role to be free.
  if (left <= kDeadlineMargin || stand_by_.active() || stopping_.load()) return false;
  if (!set_.put_sources_to_sleep()) {
    refused_sleep();
    return true;
  }
  set_.arm(false);
  sleeps_with_role_.store(true);
  bool may_go_on = true;
  if (!doorbell_pending_.exchange(false) && !stopping_.load())
    may_go_on = set_.wait_with_role(done, left - kDeadlineMargin) || done.is_set();
  sleeps_with_role_.store(false);
  doorbell_pending_.store(false);
  set_.wake_sources();
  return may_go_on && !stopping_.load();
}

void Poller::expect_help() {
  if (!demand_.were_wanted() || on_this_thread() || !base::AnswerWait::of_request()) return;
  expected_.fetch_add(1);
  set_.arm(false);
  base::AnswerWait::set_reader(shared_from_this());
}

// While a thread holds the role that one looks at expected_ once it has released it.
void Poller::answer_not_awaited() noexcept {
  if (expected_.fetch_sub(1) > 1 || !set_.role().try_lock()) return;
  set_.role().unlock();
  set_.arm(true);
  if (doorbell_pending_.load()) set_.ring_doorbell();
}

// While others want the cores its holder may have lost its own.
bool Poller::take_over(const base::AwaitedFlag& done) {
  if (demand_.were_wanted()) return false;
  helpers_.fetch_add(1);
  const auto give_up = Clock::now() + kTakeOverTimeout;
  bool taken = false;
  for (int round = 0; !done.is_set() && !role_pinned_.load() && Clock::now() < give_up; ++round) {
    taken = set_.role().try_lock();
    if (taken) break;
    // The holder of the role may be waiting for this very core.
    round < kTriesBeforeYield ? relax() : static_cast<void>(sched_yield());
  }
  helpers_.fetch_sub(1);
  return taken;
}

bool Poller::help(base::AwaitedFlag& done, Clock::time_point deadline) {
  if (this_thread.polled != nullptr || stopping_.load()) return done.is_set();
  const bool expected = base::AnswerWait::ends_in(*this);
  if (!set_.role().try_lock() && !take_over(done)) {
    if (expected) answer_not_awaited();
    return done.is_set();
  }
  set_.role().assert_held();
  bool sources_left = false;
  {
    const RoleScope scope(this, PollRole::helping);
    took_role();
    role_pinned_.store(true);
    refused_work_ = false;
    if (set_.any_expensive()) set_.arm(false);
    if (expected) set_.ask_kernel_next();  // a wake-up for it would wake an own thread later
    set_.refresh();
    set_.wake_sources();
    while (spin(&done, kPollForAnswer, deadline) == SpinResult::idle && !refused_work_ &&
           sleep_with_role(done, deadline)) {
    }
    // Traffic that does not end is left to the own threads.
    for (int round = 0; !(sources_left = leave_sources()) && round < kRoundsAfterHelp; ++round)
      set_.poll_once(false);
    last_look_ = Clock::now();
    role_pinned_.store(false);
  }
  if (expected) expected_.fetch_sub(1);
  release_role(sources_left);
  return done.is_set();
}

// ---- its threads

namespace {
// One may be busy with deferred work; the other one polls meanwhile.
constexpr int kThreads = 2;
// Characters of a thread's name; the system allows 15.
constexpr std::size_t kMaxThreadName = 15;
}  // namespace

std::shared_ptr<Poller> Poller::start(const std::string& thread_name, CoreDemand& demand) {
  auto poller = std::make_shared<Poller>(demand);
  for (int i = 0; i < kThreads; ++i) {
    {
      base::MutexLock lock(poller->mutex_);
      ++poller->threads_;
    }
    try {
      std::thread([poller, name = thread_name.substr(0, kMaxThreadName)] {
        pthread_setname_np(pthread_self(), name.c_str());
        poller->run();
        base::MutexLock lock(poller->mutex_);
        --poller->threads_;
        poller->thread_changed_.notify_all();
      }).detach();
    } catch (const std::system_error& error) {
      {
        base::MutexLock lock(poller->mutex_);
        --poller->threads_;
      }
      poller->join();
      throw Error(ErrorCode::overloaded,
                  "the threads of an endpoint cannot be started: " + error.code().message());
    }
  }
  return poller;
}

}  // namespace stitch::transport
