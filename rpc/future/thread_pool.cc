#include "stitch/rpc/future/thread_pool.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/forked.h"
#include "stitch/base/mutex.h"

namespace stitch::rpc {

struct ThreadPool::State : std::enable_shared_from_this<ThreadPool::State> {
  State(int threads, std::string thread_name, std::chrono::nanoseconds idle_time)
      : max_running(threads), name(std::move(thread_name)), linger(idle_time) {}
  const int max_running;  // threads at a time, blocked ones not counted
  const std::string name;
  const std::chrono::nanoseconds linger;

  base::Mutex mutex;
  base::CondVar work;
  base::CondVar ended;
  std::deque<base::UniqueFunction<void()>> queue STITCH_GUARDED_BY(mutex);
  std::atomic<std::size_t> queued{0};  // a copy of queue.size(), written under the lock
  // Counted as running already: for each there is a thread that is idle or just starting, and every
  // thread looks here first. So none of them waits for another task to end.
  std::deque<base::UniqueFunction<void()>> begun STITCH_GUARDED_BY(mutex);
  int alive STITCH_GUARDED_BY(mutex) = 0;
  int idle STITCH_GUARDED_BY(mutex) = 0;
  int blocked STITCH_GUARDED_BY(mutex) = 0;      // own threads that wait inside a task
  int running STITCH_GUARDED_BY(mutex) = 0;      // tasks, blocked ones not counted
  int guests STITCH_GUARDED_BY(mutex) = 0;       // other threads inside run_one_here()
  bool waking STITCH_GUARDED_BY(mutex) = false;  // a thread was woken and does not run yet
  bool closed STITCH_GUARDED_BY(mutex) = false;
  std::uint64_t missed STITCH_GUARDED_BY(mutex) = 0;  // threads that could not be added

  // Until when an idle thread waits for work.
  [[nodiscard]] std::chrono::steady_clock::time_point idle_deadline() const STITCH_REQUIRES(mutex) {
    return idle > 1 ? std::chrono::steady_clock::now() + linger
                    : std::chrono::steady_clock::time_point::max();
  }
  // There is one thread too many: one that was replaced while it was blocked runs again.
  [[nodiscard]] bool surplus() const STITCH_REQUIRES(mutex) {
    return alive - blocked > max_running;
  }
  void enqueue(base::UniqueFunction<void()>& task) STITCH_REQUIRES(mutex) {
    queue.push_back(std::move(task));
    queued.store(queue.size(), std::memory_order_relaxed);
  }
  // A task has ended or is blocked: another one may begin. `self`: this thread looks for one, too.
  void make_room(bool self) STITCH_REQUIRES(mutex) {
    if (running + (self ? 1 : 0) < max_running) wake_one();
  }
  // One at a time: each wakes the next as long as there is work. Avoids a thundering herd for short
  // tasks.
  void wake_one() STITCH_REQUIRES(mutex) {
    if (queue.empty() || waking) return;
    if (idle > 0) {
      waking = true;
      work.notify_one();
    } else if (alive - blocked < max_running) {
      add_thread();
    }
  }
  // Of BlockingRegion.
  void begin_wait() STITCH_EXCLUDES(mutex);
  void end_wait() STITCH_EXCLUDES(mutex);
  // Adds a thread. When the system has none, only counts that: the existing threads serve on.
  void add_thread() noexcept STITCH_REQUIRES(mutex);
  // Says why, the first time.
  void miss_thread(const std::string& why) noexcept STITCH_REQUIRES(mutex);
  [[nodiscard]] base::UniqueFunction<void()> take_begun() STITCH_REQUIRES(mutex) {
    base::UniqueFunction<void()> task = std::move(begun.front());
    begun.pop_front();
    if (running < max_running) wake_one();  // this thread may have been woken for what is queued
    return task;
  }
  [[nodiscard]] base::UniqueFunction<void()> begin_task(bool alone) STITCH_REQUIRES(mutex) {
    base::UniqueFunction<void()> task = std::move(queue.front());
    queue.pop_front();
    queued.store(queue.size(), std::memory_order_relaxed);
    ++running;
    if (!alone && running < max_running) wake_one();
    return task;
  }
};

void ThreadPool::State::add_thread() noexcept {
  if (alive >= max_running + kMaxExtra) {
    std::string why = std::to_string(kMaxExtra);  // not operator+: g++ 12 warns of that here
    why += " of its handlers wait for something, and no more threads are added";
    return miss_thread(why);
  }
  ++alive;
  waking = true;
  try {
    start_thread(shared_from_this());
  } catch (const std::system_error& error) {
    --alive;
    waking = false;
    miss_thread(std::string("the system has no thread for it: ") + error.what());
  }
}

void ThreadPool::State::miss_thread(const std::string& why) noexcept {
  if (missed++ > 0) return;
  std::fprintf(stderr, "stitch: calls wait in thread pool \"%s\": %s\n", name.c_str(), why.c_str());
}

namespace {
thread_local ThreadPool::State* serving = nullptr;
thread_local std::weak_ptr<ThreadPool::State>* serving_owner = nullptr;
thread_local bool guest = false;  // it serves inside run_one_here()
}  // namespace

ThreadPool::ThreadPool(int threads, std::string name, std::chrono::nanoseconds linger)
    : state_(std::make_shared<State>(threads, std::move(name), linger)) {
  {
    base::MutexLock lock(state_->mutex);
    state_->alive = 1;
  }
  try {
    start_thread(state_);  // one thread has to exist, or no task would ever run
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::overloaded, "thread pool \"" + state_->name +
                                           "\" cannot start a thread: " + error.code().message());
  }
}

ThreadPool::~ThreadPool() {
  close();
  // The last reference to the pool's owner may be that of a task on this pool, which cannot wait
  // for itself.
  if (!on_pool_thread()) join_until(std::chrono::steady_clock::time_point::max());
}

// Threads own the state and are detached: a thread that never returns from a task cannot keep the
// pool's owner from leaving.
void ThreadPool::start_thread(const std::shared_ptr<State>& state) {
  std::thread([state] {
    pthread_setname_np(pthread_self(), state->name.substr(0, 15).c_str());
    serve(state);
  }).detach();
}

void ThreadPool::serve(const std::shared_ptr<State>& state) {
  std::weak_ptr<State> owner = state;
  serving = state.get();
  serving_owner = &owner;
  const auto fork = base::fork_count();
  base::MutexLock lock(state->mutex);
  state->waking = false;
  for (bool expired = false;;) {
    while (!expired && state->begun.empty() && !state->surplus() &&
           (state->queue.empty() ? !state->closed : state->running >= state->max_running)) {
      ++state->idle;
      const bool woken = state->work.wait_until(state->mutex, state->idle_deadline());
      // Only if another idle thread stays.
      expired = !woken && state->queue.empty() && state->begun.empty() && state->idle > 1;
      --state->idle;
      state->waking = false;
    }
    if (expired) break;
    if (state->begun.empty() && (state->queue.empty() || state->surplus())) {
      if (state->queue.empty() || !state->closed)
        break;  // closed and drained, or surplus after a blocked thread came back
    }
    base::UniqueFunction<void()> task =
        state->begun.empty() ? state->begin_task(false) : state->take_begun();
    lock.unlock();
    task();
    // The task forked and has returned in the child, where even destroying it may block forever: on
    // a mutex that another thread held at the fork.
    if (fork != base::fork_count()) ::_exit(EXIT_FAILURE);
    task = nullptr;  // destroyed before the next wait, outside the lock
    lock.lock();
    --state->running;
    state->make_room(true);
  }
  --state->alive;
  // A surplus thread may have consumed a wake-up meant for a task.
  state->wake_one();
  state->ended.notify_all();
}

bool ThreadPool::post(base::UniqueFunction<void()>& task) {
  base::MutexLock lock(state_->mutex);
  if (state_->closed) return false;
  state_->enqueue(task);
  state_->wake_one();
  return true;
}

bool ThreadPool::post_if_free(base::UniqueFunction<void()>& task) {
  State& state = *state_;
  base::MutexLock lock(state.mutex);
  // What is queued may wait for a guest, and not for a thread.
  const bool others_wait = !state.queue.empty() && state.guests == 0;
  if (state.closed || others_wait || state.running >= state.max_running) return false;
  if (static_cast<std::size_t>(state.idle) <= state.begun.size()) {
    const int before = state.alive;
    if (before - state.blocked < state.max_running) state.add_thread();
    if (state.alive == before) return false;
  }
  state.begun.push_back(std::move(task));
  ++state.running;
  state.work.notify_one();
  return true;
}

bool ThreadPool::post_quietly(base::UniqueFunction<void()>& task) {
  base::MutexLock lock(state_->mutex);
  if (state_->closed) return false;
  state_->enqueue(task);
  return true;
}

void ThreadPool::wake() {
  base::MutexLock lock(state_->mutex);
  state_->make_room(false);  // when all are busy, the next one to end a task takes it
}

bool ThreadPool::run_one_here(bool watched) {
  State& state = *state_;
  base::UniqueFunction<void()> task;
  {
    base::MutexLock lock(state.mutex);
    if (state.queue.empty() || serving != nullptr) return false;
    if (state.running >= state.max_running) return false;  // the next thread to end a task takes it
    task = state.begin_task(watched);
    ++state.guests;
  }
  std::weak_ptr<State> owner = state_;
  serving = &state;
  serving_owner = &owner;
  guest = true;
  const auto fork = base::fork_count();
  task();
  if (fork != base::fork_count()) ::_exit(EXIT_FAILURE);  // as in serve()
  task = nullptr;
  serving = nullptr;
  serving_owner = nullptr;
  guest = false;
  base::MutexLock lock(state.mutex);
  --state.running;
  --state.guests;
  if (state.guests == 0) state.ended.notify_all();
  if (!watched) state.make_room(true);
  return !state.queue.empty();
}

void ThreadPool::close() {
  base::MutexLock lock(state_->mutex);
  state_->closed = true;
  state_->work.notify_all();
  state_->wake_one();
}

bool ThreadPool::join_until(std::chrono::steady_clock::time_point deadline) {
  base::MutexLock lock(state_->mutex);
  while (state_->alive > 0 || state_->guests > 0) {
    if (!state_->ended.wait_until(state_->mutex, deadline))
      return state_->alive == 0 && state_->guests == 0;
  }
  return true;
}

bool ThreadPool::on_pool_thread() const noexcept { return serving == state_.get(); }

bool ThreadPool::on_any_pool_thread() noexcept { return serving != nullptr; }

// Relaxed: what the caller itself has queued it sees in any case, and what others do meanwhile it
// could miss under the lock as well.
std::size_t ThreadPool::queued() const { return state_->queued.load(std::memory_order_relaxed); }

int ThreadPool::max_running() const noexcept { return state_->max_running; }

int ThreadPool::threads() const {
  base::MutexLock lock(state_->mutex);
  return state_->alive;
}

std::uint64_t ThreadPool::threads_missed() const {
  base::MutexLock lock(state_->mutex);
  return state_->missed;
}

std::shared_ptr<ThreadPool::State> ThreadPool::of_this_thread() {
  return serving_owner == nullptr ? nullptr : serving_owner->lock();
}

void ThreadPool::State::begin_wait() {
  base::MutexLock lock(mutex);
  --running;
  if (!guest) ++blocked;
  make_room(false);
}

void ThreadPool::State::end_wait() {
  base::MutexLock lock(mutex);
  ++running;
  if (guest) return;
  --blocked;
  if (surplus()) work.notify_one();  // one idle thread
}

}  // namespace stitch::rpc

namespace stitch {

BlockingRegion::BlockingRegion()
    : pool_(rpc::ThreadPool::of_this_thread()), waits_(rpc::waits_here) {
  if (!pool_) return;
  if (waits_ != nullptr) waits_->fetch_add(1, std::memory_order_relaxed);
  static_cast<rpc::ThreadPool::State*>(pool_.get())->begin_wait();
}

BlockingRegion::~BlockingRegion() {
  if (!pool_) return;
  if (waits_ != nullptr) waits_->fetch_sub(1, std::memory_order_relaxed);
  static_cast<rpc::ThreadPool::State*>(pool_.get())->end_wait();
}

}  // namespace stitch
