#include "stitch/base/event_loop.h"

#include <pthread.h>
#include <signal.h>
#include <uv.h>

#include <map>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/callback_scope.h"
#include "stitch/base/error.h"
#include "stitch/base/mutex.h"

namespace stitch::base {

namespace {

using Task = UniqueFunction<void()>;
using Time = EventLoop::Clock::time_point;

// Blocks all signals while it lives: a thread started meanwhile inherits that. The loop's thread
// must not run the program's signal handlers, and writing to a socket whose peer is gone must give
// EPIPE there, not kill the process.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

void check(int status, const char* what) {
  if (status < 0)
    throw Error(ErrorCode::internal,
                std::string("event loop cannot ") + what + ": " + uv_strerror(status));
}

}  // namespace

// Timers wait in an ordered map; one uv timer is set for `looks_at_`, never later than the first of
// them. A new timer wakes the loop only when it is earlier than that, and cancelling wakes nobody:
// the loop then looks once in vain.
class EventLoop::Impl {
 public:
  explicit Impl(const std::string& thread_name) {
    check(uv_loop_init(&loop_), "be made");
    wake_.data = this;
    timer_.data = this;
    if (const int status = uv_async_init(
            &loop_, &wake_, [](uv_async_t* wake) { static_cast<Impl*>(wake->data)->on_wake(); });
        status < 0) {
      uv_loop_close(&loop_);
      check(status, "be woken");
    }
    uv_timer_init(&loop_, &timer_);
    try {
      const SignalsBlocked blocked;
      thread_ = std::thread([this, name = thread_name.substr(0, kThreadNameBytes)] {
        pthread_setname_np(pthread_self(), name.c_str());
        run();
      });
    } catch (const std::system_error& error) {
      close_handles();
      run();
      throw Error(
          ErrorCode::overloaded,
          "event loop \"" + thread_name + "\" cannot start its thread: " + error.code().message());
    }
    thread_id_ = thread_.get_id();
  }

  bool post(Task& task) STITCH_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    if (closing_) return false;
    tasks_.push_back(std::move(task));
    wake();
    return true;
  }

  TimerId call_at(Time when, Task& task) STITCH_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    const TimerId id = next_id_++;
    if (closing_) return id;
    // Not due in the pass that is running now, or a timer that sets itself anew for the past would
    // never let it end.
    if (when <= pass_) when = pass_ + Clock::duration(1);
    const auto at = timers_.emplace_hint(timers_.end(), Key{when, id}, std::move(task));
    by_id_.emplace(id, at);
    if (when < looks_at_) {
      looks_at_ = when;
      wake();
    }
    return id;
  }

  bool cancel(TimerId timer) STITCH_EXCLUDES(mutex_) {
    Timers::node_type dropped;  // destroyed after the lock is released: the task may own anything
    const MutexLock lock(mutex_);
    const auto found = by_id_.find(timer);
    if (found == by_id_.end()) return false;
    dropped = timers_.extract(found->second);
    by_id_.erase(found);
    return true;
  }

  bool on_loop_thread() const { return std::this_thread::get_id() == thread_id_; }

  void close() STITCH_EXCLUDES(mutex_, join_mutex_) {
    {
      const MutexLock lock(mutex_);
      if (!closing_) {
        closing_ = true;
        uv_async_send(&wake_);
      }
    }
    const MutexLock lock(join_mutex_);
    if (thread_.joinable()) thread_.join();
  }

  uv_loop_t* raw() { return &loop_; }

 private:
  static constexpr std::size_t kThreadNameBytes = 15;
  using Key = std::pair<Time, TimerId>;
  using Timers = std::map<Key, Task>;

  void run() noexcept {
    const CallbackScope callbacks;
    uv_run(&loop_, UV_RUN_DEFAULT);
    uv_loop_close(&loop_);
  }

  // After closing_ is set nobody comes here, so the handle is never woken once it is closed.
  void wake() STITCH_REQUIRES(mutex_) {
    if (awake_ || closing_) return;
    awake_ = true;
    uv_async_send(&wake_);
  }

  void on_wake() STITCH_EXCLUDES(mutex_) {
    bool closing = false;
    {
      const MutexLock lock(mutex_);
      awake_ = false;
      running_.swap(tasks_);
      closing = closing_;
    }
    for (Task& task : running_) {
      task();
      task = nullptr;
    }
    running_.clear();
    if (closing) {
      close_handles();
    } else {
      run_due_timers();
    }
  }

  void run_due_timers() STITCH_EXCLUDES(mutex_) {
    const Time now = Clock::now();
    {
      const MutexLock lock(mutex_);
      pass_ = now;
    }
    for (;;) {
      Timers::node_type due;
      {
        const MutexLock lock(mutex_);
        if (closing_) return;  // on_wake comes once more and closes
        if (timers_.empty() || timers_.begin()->first.first > now) {
          looks_at_ = timers_.empty() ? Time::max() : timers_.begin()->first.first;
          break;
        }
        due = timers_.extract(timers_.begin());
        by_id_.erase(due.key().second);
      }
      due.mapped()();
    }
    set_timer();
  }

  void set_timer() STITCH_EXCLUDES(mutex_) {
    const Time now = Clock::now();
    Time when;
    {
      const MutexLock lock(mutex_);
      when = looks_at_;
      // Not by a timer of no delay: libuv would run that, and all that follow it, before it looks
      // at anything else.
      if (when <= now) wake();
    }
    if (when <= now || when == Time::max()) {
      uv_timer_stop(&timer_);
      return;
    }
    // A far deadline is looked at once a day, which also keeps the sum below from overflowing.
    constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24);
    const auto delay =
        when - now > kLongest ? kLongest : std::chrono::ceil<std::chrono::milliseconds>(when - now);
    uv_update_time(&loop_);
    uv_timer_start(
        &timer_, [](uv_timer_t* timer) { static_cast<Impl*>(timer->data)->run_due_timers(); },
        static_cast<std::uint64_t>(delay.count()), 0);
  }

  void close_handles() STITCH_EXCLUDES(mutex_) {
    Timers dropped;
    {
      const MutexLock lock(mutex_);
      closing_ = true;
      dropped.swap(timers_);
      by_id_.clear();
    }
    dropped.clear();
    // Whatever users of raw() have left open would keep the loop running for ever.
    uv_walk(
        &loop_,
        [](uv_handle_t* handle, void*) {
          if (!uv_is_closing(handle)) uv_close(handle, nullptr);
        },
        nullptr);
  }

  // Constant after construction.
  std::thread::id thread_id_;

  // Loop thread only.
  uv_loop_t loop_;
  uv_async_t wake_;
  uv_timer_t timer_;
  std::vector<Task> running_;

  Mutex mutex_;
  bool closing_ STITCH_GUARDED_BY(mutex_) = false;
  bool awake_ STITCH_GUARDED_BY(mutex_) =
      false;  // wake_ has been sent and on_wake has not come yet
  std::vector<Task> tasks_ STITCH_GUARDED_BY(mutex_);
  Timers timers_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<TimerId, Timers::iterator> by_id_ STITCH_GUARDED_BY(mutex_);
  TimerId next_id_ STITCH_GUARDED_BY(mutex_) = 1;
  Time looks_at_ STITCH_GUARDED_BY(mutex_) =
      Time::max();  // when the loop next looks at timers_ by itself
  Time pass_ STITCH_GUARDED_BY(mutex_) = Time::min();  // when it last did

  Mutex join_mutex_;  // never held together with mutex_
  std::thread thread_ STITCH_GUARDED_BY(join_mutex_);
};

EventLoop::EventLoop(const std::string& thread_name) : impl_(std::make_unique<Impl>(thread_name)) {}
EventLoop::~EventLoop() { impl_->close(); }
bool EventLoop::post(UniqueFunction<void()> task) { return impl_->post(task); }
EventLoop::TimerId EventLoop::call_at(Clock::time_point when, UniqueFunction<void()> task) {
  return impl_->call_at(when, task);
}
bool EventLoop::cancel(TimerId timer) { return impl_->cancel(timer); }
bool EventLoop::on_loop_thread() const { return impl_->on_loop_thread(); }
void EventLoop::close() { impl_->close(); }
uv_loop_s* EventLoop::raw() { return impl_->raw(); }

}  // namespace stitch::base
