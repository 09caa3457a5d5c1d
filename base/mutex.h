#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

// Clang checks the locking discipline at compile time (-Wthread-safety); other compilers see plain
// mutexes.
#if defined(__clang__)
#define STITCH_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define STITCH_THREAD_ANNOTATION(x)
#endif
#define STITCH_CAPABILITY(x) STITCH_THREAD_ANNOTATION(capability(x))
#define STITCH_SCOPED_CAPABILITY STITCH_THREAD_ANNOTATION(scoped_lockable)
#define STITCH_GUARDED_BY(x) STITCH_THREAD_ANNOTATION(guarded_by(x))
#define STITCH_REQUIRES(...) STITCH_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define STITCH_ACQUIRE(...) STITCH_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define STITCH_RELEASE(...) STITCH_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define STITCH_EXCLUDES(...) STITCH_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define STITCH_ASSERT_CAPABILITY(x) STITCH_THREAD_ANNOTATION(assert_capability(x))
#define STITCH_TRY_ACQUIRE(...) STITCH_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define STITCH_NO_THREAD_SAFETY_ANALYSIS STITCH_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace stitch::base {

class Descriptor;

// A std::mutex that clang's thread-safety analysis understands.
class STITCH_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() STITCH_ACQUIRE() { mutex_.lock(); }
  void unlock() STITCH_RELEASE() { mutex_.unlock(); }
  [[nodiscard]] bool try_lock() STITCH_TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  // Tells the analysis that this thread holds the lock, where a caller has taken it.
  void assert_held() STITCH_ASSERT_CAPABILITY(this) {}

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a Mutex for a block; may be released and taken again inside it.
class STITCH_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) STITCH_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() STITCH_RELEASE() {
    if (held_) mutex_.unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() STITCH_RELEASE() {
    held_ = false;
    mutex_.unlock();
  }
  void lock() STITCH_ACQUIRE() {
    mutex_.lock();
    held_ = true;
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

// A condition variable over Mutex. Wait in a loop that tests the condition.
class CondVar {
 public:
  void wait(Mutex& mutex) STITCH_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  // False when `deadline` passed first. time_point::max() waits without a limit.
  bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point deadline)
      STITCH_REQUIRES(mutex) {
    if (deadline == std::chrono::steady_clock::time_point::max()) {
      wait(mutex);
      return true;
    }
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const bool in_time = condition_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }
  void notify_one() noexcept { condition_.notify_one(); }
  void notify_all() noexcept { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

// A flag that a thread waits for, perhaps asleep in a poller: set() wakes that one. Thread
// contract: any thread; set() is called while the flag is kept alive by more than its waiter.
class AwaitedFlag {
 public:
  [[nodiscard]] bool is_set() const noexcept { return set_.load(std::memory_order_acquire); }
  void set() noexcept {
    set_.store(true);
    if (waker_.load() != nullptr) [[unlikely]]
      wake();
  }
  // REQUIRES: no thread sleeps until it is set.
  void clear() noexcept { set_.store(false, std::memory_order_relaxed); }

  // The caller is about to sleep on `eventfd`, and calls wake_no_more() afterwards. False when the
  // flag is set already, or another thread sleeps until it is.
  [[nodiscard]] bool wake_through(const Descriptor& eventfd) noexcept;
  void wake_no_more(const Descriptor& eventfd) noexcept;

 private:
  void wake() noexcept;

  std::atomic<bool> set_{false};
  std::atomic<const Descriptor*> waker_{nullptr};
};

}  // namespace stitch::base
