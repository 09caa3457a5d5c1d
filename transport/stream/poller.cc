#include "stitch/transport/stream/poller.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/callback_scope.h"
#include "stitch/base/error.h"
#include "stitch/base/forked.h"
#include "stitch/transport/stream/cpu_migration.h"

namespace stitch::transport {

namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

// Empty rounds before a spinning thread begins to offer the processor to others.
constexpr int kRoundsBeforeYield = 8;
constexpr int kPausesPerRound = 8;
// Every so many rounds the kernel is asked about all descriptors, not only those that were busy
// lately.
constexpr int kRoundsPerKernelLook = 16;
// A source that costs a system call is polled without asking for this long after it moved
// something.
constexpr microseconds kHot{500};
// A yield that takes longer ran somebody else: processors are wanted.
constexpr microseconds kYieldRanOthers{200};
// One that takes longer than this ran somebody else for a moment.
constexpr microseconds kYieldSwitched{4};
constexpr int kCrowdedYields = 3;
constexpr microseconds kMinSpin{5};
// A processor that was not crowded for this long was well chosen.
constexpr std::chrono::milliseconds kCalm{2};
constexpr std::chrono::milliseconds kMinMovePause{1};
constexpr microseconds kSecondThoughts{50};
constexpr std::chrono::seconds kMaxMovePause{1};
// How often a thread gives way while it moves much, and how often when that has cost it much.
constexpr microseconds kFrequentYields{50};
constexpr microseconds kRareYields{4000};
// Rounds that may bring more before deferred work is given to other threads.
constexpr int kWorkDelays = 2;
// A sleep shorter than this would have been worth spinning through.
constexpr microseconds kShortSleep{150};
// One may be busy with what a message brought; the other one polls meanwhile.
constexpr int kThreads = 2;
// A waiting thread spins for about what it costs to put it to sleep and to wake it: never much
// worse than sleeping at once. After it has seen that processors are wanted, the next few waits
// sleep at once.
constexpr microseconds kHelpSpin{60};
constexpr int kShortHelps = 16;
constexpr int kRoundsAfterHelp = 2;
// How long a thread that wants to help waits for the one that polls to make room.
constexpr microseconds kTakeOver{20};

thread_local const Poller* polling = nullptr;
thread_local const Poller* own_thread_of = nullptr;
// Of a thread that does deferred work: whose, and whether it has become the one that polls again.
thread_local Poller* working_for = nullptr;
thread_local bool reclaimed = false;

class PollingHere {
 public:
  explicit PollingHere(const Poller* poller) : before_(std::exchange(polling, poller)) {}
  ~PollingHere() { polling = before_; }
  PollingHere(const PollingHere&) = delete;
  PollingHere& operator=(const PollingHere&) = delete;

 private:
  const Poller* const before_;
  const base::CallbackScope callbacks_;
};

void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

[[nodiscard]] int checked(int result, const char* what) {
  if (result < 0)
    throw Error(ErrorCode::internal, std::string(what) + " failed: " + std::strerror(errno));
  return result;
}

}  // namespace

Poller::Poller()
    : sockets_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      sleeper_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      stop_(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  epoll_event event{};
  event.events = 0;
  event.data.fd = sockets_.get();
  static_cast<void>(
      checked(epoll_ctl(sleeper_.get(), EPOLL_CTL_ADD, sockets_.get(), &event), "epoll_ctl"));
  event.events = EPOLLIN;
  event.data.fd = stop_.get();
  static_cast<void>(
      checked(epoll_ctl(sleeper_.get(), EPOLL_CTL_ADD, stop_.get(), &event), "epoll_ctl"));
}

Poller::~Poller() = default;

std::shared_ptr<Poller> Poller::start(const std::string& thread_name) {
  auto poller = std::make_shared<Poller>();
  for (int i = 0; i < kThreads; ++i) {
    {
      base::MutexLock lock(poller->mutex_);
      ++poller->threads_;
    }
    try {
      std::thread([poller, name = thread_name.substr(0, 15)] {
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

void Poller::join() {
  // A thread that is just leaving its work is worth waiting for; one that is stuck in it is not:
  // whoever joins has waited for that work already.
  constexpr std::chrono::milliseconds kPatience{50};
  stopping_.store(true);
  ring();
  {
    base::MutexLock lock(mutex_);
    while (threads_ > working_) thread_changed_.wait(mutex_);
    const auto give_up = Clock::now() + kPatience;
    while (threads_ > 0 && thread_changed_.wait_until(mutex_, give_up)) {
    }
  }
  std::unordered_map<SourceId, Polled> polled;  // destroyed without the role
  if (working_for == this && reclaimed) {
    // Deferred work of this thread had the last reference to the endpoint, and the role is back.
    role_.assert_held();
    drop_sources(polled);
  } else {
    base::MutexLock role(role_);
    drop_sources(polled);
  }
  std::unordered_map<SourceId, Watched> watched;
  base::MutexLock lock(mutex_);
  watched.swap(watched_);
}

void Poller::drop_sources(std::unordered_map<SourceId, Polled>& into) {
  active_.clear();
  into.swap(polled_);
}

void Poller::ring() noexcept {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(stop_.get(), &one, sizeof(one)));
}

void Poller::entered_work(int change) {
  base::MutexLock lock(mutex_);
  working_ += change;
  thread_changed_.notify_all();
}

// Makes the thread look at its sources again, unless that is what this thread is doing.
void Poller::nudge() noexcept {
  if (on_this_thread()) return;
  nudged_.store(true);
  ring();
}

bool Poller::on_this_thread() const noexcept { return polling == this; }

bool Poller::poll_after_delivery(std::shared_ptr<PollSource> source) noexcept {
  role_.assert_held();
  for (const auto& each : after_delivery_) {
    if (each == source) return true;
  }
  try {
    after_delivery_.push_back(std::move(source));
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

bool Poller::defer(Work& work) {
  role_.assert_held();
  // A thread that does such work already, and only helps meanwhile, has to go back to it.
  if (own_thread_of != this || working_for != nullptr || sleepers_.load() == 0) return false;
  if (!deferred_) deferred_ = std::move(work);
  return true;
}

void Poller::reclaim() {
  if (working_for != this || polling != nullptr || reclaimed || !role_.try_lock()) return;
  role_.assert_held();
  reclaimed = true;
  polling = this;
  took_role();
  if (expensive_.load() > 0) arm(false);
  all_awake();
}

void Poller::after_delivery() noexcept {
  while (!after_delivery_.empty()) {
    const auto source = std::move(after_delivery_.back());
    after_delivery_.pop_back();
    try {
      source->poll();
    } catch (...) {
      // It is still watched, and throws again where it can be let go of.
    }
  }
}

void Poller::give_deferred_away() noexcept {
  try {
    if (deferred_) std::exchange(deferred_, nullptr)(false);
  } catch (...) {
    // Other threads find the work where it is queued, later.
  }
}

bool Poller::poll_source(Polled& polled) noexcept {
  try {
    return polled.source->poll();
  } catch (...) {
    remove(polled.id);
    return true;
  }
}

bool Poller::poll_once(bool ask_kernel) {
  refresh();
  after_delivery();  // of a thread that has polling back after deferred work: nobody delivers then
  bool moved = false;
  bool any_expensive = false;
  Clock::time_point now{};
  for (std::size_t i = 0; i < active_.size();) {
    Polled& polled = *active_[i];
    if (!polled.cheap) {
      if (now == Clock::time_point{}) now = Clock::now();
      if (polled.source->blocked() ||
          (now - polled.last_moved > kHot && !polled.source->pending())) {
        // From now on the kernel reports it, or whoever makes it pending. Its place is another's.
        if (polled.source->sleep()) {
          deactivate(polled);
        } else {
          ++i;
        }
        continue;
      }
      any_expensive = true;
    }
    ++i;
    const bool source_moved = poll_source(polled);
    after_delivery();
    if (!source_moved) continue;
    moved = true;
    polled.last_moved = now == Clock::time_point{} ? Clock::now() : now;
  }
  // With nothing hot that costs a system call, the kernel's own look is the only one. However busy
  // some sources are, others get one.
  const bool only_look = !moved && !any_expensive && expensive_.load(std::memory_order_relaxed) > 0;
  if (ask_kernel || only_look || ++rounds_since_look_ >= kRoundsPerKernelLook) {
    rounds_since_look_ = 0;
    if (take_events(0)) moved = true;
  }
  return moved;
}

Poller::Spun Poller::spin(const std::atomic<bool>* done, nanoseconds limit,
                          Clock::time_point deadline) {
  Clock::time_point last = Clock::now();
  Clock::time_point now = last;
  Clock::time_point idle = last;  // when a round last moved nothing
  int delays = 0;
  for (int round = 0;; ++round) {
    if (done != nullptr ? done->load(std::memory_order_acquire)
                        : helpers_.load() > 0 || stopping_.load()) {
      return done != nullptr ? Spun::done : Spun::wanted;
    }
    if (poll_once(false)) {
      last = Clock::now();
      round = 0;
      // A thread that only helps has something else to do by then, however much there is to move.
      if (last >= deadline)
        return done != nullptr && done->load(std::memory_order_acquire) ? Spun::done
                                                                        : Spun::nothing_came;
      if (last - idle > give_way_after_) {
        give_way(last);
        idle = Clock::now();
      }
      // Work does not wait for a stream of messages to end.
      if (deferred_ && ++delays > kWorkDelays) give_deferred_away();
      continue;
    }
    if (deferred_) return Spun::work;
    now = idle = Clock::now();
    if (now - last >= limit || now >= deadline) return Spun::nothing_came;
    if (round < kRoundsBeforeYield) {
      for (int i = 0; i < kPausesPerRound; ++i) relax();
      continue;
    }
    sched_yield();
    const auto after = Clock::now();
    yielded(now, after);
    if (after - now > kYieldRanOthers) {
      spin_limit_ = std::max<nanoseconds>(spin_limit_ / 2, kMinSpin);
      short_helps_ = kShortHelps;
      if (!poll_once(true))
        return done != nullptr && done->load(std::memory_order_acquire) ? Spun::done
                                                                        : Spun::nothing_came;
      if (deferred_) return Spun::work;
      last = Clock::now();
    }
  }
}

// When much moves: who waits for this processor, perhaps for an answer that was just read, would
// otherwise have it at the next tick of the system's clock, milliseconds later. Those that keep it
// once they have it are not asked again for a while.
void Poller::give_way(Clock::time_point now) {
  sched_yield();
  give_way_after_ = Clock::now() - now > kYieldRanOthers ? kRareYields : kFrequentYields;
}

// If somebody else runs whenever this thread gives way, this processor is not the one to poll on.
void Poller::yielded(Clock::time_point since, Clock::time_point until) {
  yields_that_switched_ = until - since > kYieldSwitched ? yields_that_switched_ + 1 : 0;
  if (yields_that_switched_ < kCrowdedYields) return;
  if (since - std::exchange(last_crowded_, until) > kCalm) move_pause_ = kMinMovePause;
  // Threads of the user's stay where they are.
  if (own_thread_of != this || until < next_move_) return;
  // Not both of two that have found each other: a coin is tossed, with what the clock's last bits
  // are.
  const bool stay = (until.time_since_epoch().count() / 32) % 2 == 0;
  if (stay) {
    next_move_ = until + kSecondThoughts;
    return;
  }
  leave_processor();
  next_move_ = until + move_pause_;
  move_pause_ = std::min<nanoseconds>(move_pause_ * 2, kMaxMovePause);
}

void Poller::all_awake() {
  if (awake_.exchange(true)) return;
  for (Polled* const each : active_) each->source->wake();
}

bool Poller::all_asleep() {
  awake_.store(false);
  refresh();
  bool asleep = !any_changes_.load() && after_delivery_.empty();
  for (std::size_t i = 0; asleep && i < active_.size(); ++i) asleep = active_[i]->source->sleep();
  if (!asleep) all_awake();
  return asleep;
}

// Whoever has given the role up arms while the next one may already disarm: without the lock,
// armed_ could end up true although the kernel was told last to watch nothing. The change alone
// need not look under the lock: who sees the state it wants while the other one changes it is
// either about to arm again, as the holder of the role, or awake and about to poll.
void Poller::arm(bool armed) {
  if (armed_.load() == armed) return;
  base::MutexLock lock(arm_mutex_);
  if (armed_.exchange(armed) == armed) return;
  epoll_event event{};
  event.events = armed ? EPOLLIN | EPOLLONESHOT : 0;
  event.data.fd = sockets_.get();
  epoll_ctl(sleeper_.get(), EPOLL_CTL_MOD, sockets_.get(), &event);
}

Poller::Pause Poller::poll_until_idle() {
  all_awake();
  for (;;) {
    const Spun spun = spin(nullptr, spin_limit_, Clock::time_point::max());
    const bool quiet = all_asleep();
    keeps_role_.store(!quiet);
    if (spun == Spun::work) return {std::exchange(deferred_, nullptr), quiet};
    give_deferred_away();
    if (quiet) return {nullptr, true};
    poll_once(true);  // however many want to take over: each round moves something
  }
}

void Poller::run() {
  own_thread_of = this;
  const auto fork = base::fork_count();
  bool came = false;  // something has, which woke this thread
  bool held = false;  // the role, from the last round
  bool woken = false;
  while (held || !stopping_.load()) {
    if (held || role_.try_lock()) {
      role_.assert_held();
      took_role();
      Pause pause;
      {
        const PollingHere here(this);
        // How long nothing came, whichever thread slept through it.
        if (came && Clock::now() - idle_since_ > kShortSleep) {
          spin_limit_ = std::max<nanoseconds>(spin_limit_ / 2, kMinSpin);
        } else if (came) {
          spin_limit_ = std::min<nanoseconds>(spin_limit_ * 2, kMaxSpin);
        }
        came = false;
        if (woken)
          rounds_since_look_ = kRoundsPerKernelLook;  // it was the kernel that woke this thread
        woken = false;
        pause = poll_until_idle();
        idle_since_ = Clock::now();
        keeps_role_.store(false);
      }
      held = false;
      give_up_role(pause.quiet);
      if (Work& work = pause.work) {
        working_for = this;
        reclaimed = false;
        entered_work(1);
        try {
          while (work(true)) {
            if (!reclaimed) continue;
            work(false);
            break;
          }
        } catch (...) {
          // What is left is queued where other threads find it.
        }
        if (fork != base::fork_count()) ::_exit(EXIT_FAILURE);  // it has come back in a child, too
        work = nullptr;
        entered_work(-1);
        working_for = nullptr;
        held = reclaimed;
        polling = nullptr;
        continue;
      }
    }
    std::array<epoll_event, 2> events;
    sleepers_.fetch_add(1);
    const int count =
        epoll_wait(sleeper_.get(), events.data(), static_cast<int>(events.size()), -1);
    sleepers_.fetch_sub(1);
    woken = true;
    for (int i = 0; i < count; ++i) {
      if (events[static_cast<std::size_t>(i)].data.fd == sockets_.get()) {
        armed_.store(false);
        came = true;
      } else if (!stopping_.load()) {
        std::uint64_t value = 0;
        static_cast<void>(!::read(stop_.get(), &value, sizeof(value)));
        if (stopping_.load())
          ring();  // what was read may have been join()'s: it is for all threads
      }
    }
  }
}

// Whoever polled has to leave things so that nothing that comes goes unseen: the sources asleep and
// the sockets watched, or another thread woken that polls on.
void Poller::give_up_role(bool quiet) {
  role_.unlock();
  // After unlocking: the other thread may just have found the role taken and gone to sleep. It may
  // have done so in vain, too, for a source that had been asked already whether it may sleep.
  arm(true);
  if (!quiet || nudged_.load()) ring();
}

bool Poller::help(const std::atomic<bool>& done, Clock::time_point deadline) {
  if (polling != nullptr || stopping_.load()) return false;
  helpers_.fetch_add(1);
  const auto give_up = Clock::now() + kTakeOver;
  for (int round = 0; !role_.try_lock(); ++round) {
    if (done.load(std::memory_order_acquire) || keeps_role_.load() || Clock::now() > give_up) {
      helpers_.fetch_sub(1);
      return done.load(std::memory_order_acquire);
    }
    // The one that polls may be waiting for this very processor.
    round < kRoundsBeforeYield ? relax() : static_cast<void>(sched_yield());
  }
  bool finished = false;
  bool quiet = false;
  {
    const PollingHere here(this);
    took_role();
    keeps_role_.store(true);
    if (expensive_.load() > 0) arm(false);
    refresh();
    all_awake();
    const nanoseconds limit = short_helps_ > 0 ? kMinSpin : kHelpSpin;
    if (short_helps_ > 0) --short_helps_;
    finished = spin(&done, limit, deadline) == Spun::done;
    // What goes on and on is not this thread's to see through.
    for (int round = 0; !(quiet = all_asleep()) && round < kRoundsAfterHelp; ++round)
      poll_once(false);
    idle_since_ = Clock::now();
    keeps_role_.store(false);
  }
  give_up_role(quiet);
  helpers_.fetch_sub(1);
  return finished || done.load(std::memory_order_acquire);
}

}  // namespace stitch::transport
