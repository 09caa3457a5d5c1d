#include "stitch/base/event_loop.h"

#include <pthread.h>
#include <uv.h>

#include <map>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/base/callback_scope.h"
#include "stitch/base/errno_text.h"
#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/signals.h"

namespace stitch::base {

namespace {

using Task = UniqueFunction<void()>;
using Time = EventLoop::Clock::time_point;

void check(int status, const char* what) {
  if (status < 0)
    throw Error(ErrorCode::internal,
                std::string("event loop cannot ") + what + ": " + errno_text(-status));
}

}  // namespace

// Timers are kept in an ordered map; one uv timer is set for `next_check_`, never later than the
// first of them. A new timer wakes the loop only when it is earlier than that, and cancelling does
// not wake it: the loop may then wake once for nothing.
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
      const SignalsBlocked blocked;  // the thread inherits that
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
    // Not due in the check that is running now: a timer that sets itself again for the past would
    // keep that check from ending.
    if (when <= last_check_) when = last_check_ + Clock::duration(1);
    const auto at = timers_.emplace_hint(timers_.end(), Key{when, id}, std::move(task));
    by_id_.emplace_hint(by_id_.end(), id, at);
    if (when < next_check_) {
      next_check_ = when;
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

  // Not called once closing_ is set, so the handle is never signalled after it is closed.
  void wake() STITCH_REQUIRES(mutex_) {
    if (wake_pending_ || closing_) return;
    wake_pending_ = true;
    uv_async_send(&wake_);
  }

  void on_wake() noexcept STITCH_EXCLUDES(mutex_) {
    bool closing = false;
    {
      const MutexLock lock(mutex_);
      wake_pending_ = false;
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

  void run_due_timers() noexcept STITCH_EXCLUDES(mutex_) {
    const Time now = Clock::now();
    {
      const MutexLock lock(mutex_);
      last_check_ = now;
    }
    for (;;) {
      Timers::node_type due;
      {
        const MutexLock lock(mutex_);
        if (closing_) return;  // on_wake() runs once more and closes
        if (timers_.empty() || timers_.begin()->first.first > now) {
          next_check_ = timers_.empty() ? Time::max() : timers_.begin()->first.first;
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
      when = next_check_;
      // Not by a timer without delay: libuv would run that, and those after it, before any I/O.
      if (when <= now) wake();
    }
    if (when <= now || when == Time::max()) {
      uv_timer_stop(&timer_);
      return;
    }
    // A distant deadline is checked once a day, which also keeps the sum below from overflowing.
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
    // Handles that users of raw() have left open would keep the loop from ending.
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
  bool wake_pending_ STITCH_GUARDED_BY(mutex_) = false;  // on_wake() will run
  std::vector<Task> tasks_ STITCH_GUARDED_BY(mutex_);
  Timers timers_ STITCH_GUARDED_BY(mutex_);
  std::map<TimerId, Timers::iterator> by_id_ STITCH_GUARDED_BY(mutex_);
  TimerId next_id_ STITCH_GUARDED_BY(mutex_) = 1;
  Time next_check_ STITCH_GUARDED_BY(mutex_) =
      Time::max();  // when the loop next checks timers_ by itself
  Time last_check_ STITCH_GUARDED_BY(mutex_) = Time::min();  // when it last did

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
