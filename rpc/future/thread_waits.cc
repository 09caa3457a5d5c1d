#include "stitch/rpc/future/thread_waits.h"

#include <algorithm>
#include <array>

#include "stitch/base/forked.h"
#include "stitch/base/mutex.h"
#include "stitch/base/thread_id.h"
#include "stitch/rpc/future/execution_context.h"

namespace stitch::rpc {

namespace {

// The waits of one thread. Written by that thread; every field is atomic for those who look.
struct Waits {
  static constexpr int kDepths = 8;  // deeper ones are counted, not described
  struct One {
    std::atomic<std::uint64_t> call{0};
    std::atomic<const void*> worker{nullptr};
    std::atomic<const void*> under{nullptr};
    std::atomic<Clock::rep> since{0};
  };
  int thread = 0;
  std::atomic<int> depth{0};
  std::array<One, kDepths> waits{};
};

// The threads that have ever waited and still exist. Never destroyed: threads may end after it.
struct AllWaits {
  base::Mutex mutex;
  std::vector<const Waits*> threads STITCH_GUARDED_BY(mutex);
  const std::uint32_t fork = base::fork_count();

  // A forked child begins anew: the lock of its parent may stay held, and the threads are gone.
  static AllWaits& of_this_process() {
    static std::atomic<AllWaits*> current{new AllWaits};
    AllWaits* known = current.load(std::memory_order_acquire);
    while (known->fork != base::fork_count()) {
      auto* const fresh = new AllWaits;
      if (current.compare_exchange_strong(known, fresh)) return *fresh;
      delete fresh;
    }
    return *known;
  }
};

constinit thread_local Waits* own_waits = nullptr;
// For what waits while the thread ends, after its Member.
constinit thread_local Waits unlisted_waits{};

// Takes part in AllWaits as long as its thread exists.
class Member {
 public:
  Member() : all_(&AllWaits::of_this_process()) {
    waits_.thread = base::this_thread_id();
    base::MutexLock lock(all_->mutex);
    all_->threads.push_back(&waits_);
  }
  ~Member() {
    own_waits = &unlisted_waits;
    if (all_->fork != base::fork_count()) return;
    base::MutexLock lock(all_->mutex);
    std::erase(all_->threads, &waits_);
  }
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;
  Waits& waits() noexcept { return waits_; }

 private:
  AllWaits* const all_;
  Waits waits_;
};

Waits& join() noexcept {
  thread_local Member member;
  own_waits = &member.waits();
  return *own_waits;
}

}  // namespace

ThreadWaitScope::ThreadWaitScope(std::uint64_t call) noexcept {
  Waits& here = own_waits != nullptr ? *own_waits : join();
  depth_ = here.depth.load(std::memory_order_relaxed);
  if (depth_ < Waits::kDepths) {
    Waits::One& one = here.waits[static_cast<std::size_t>(depth_)];
    const ExecutionContext& context = ExecutionContext::current();
    one.call.store(call, std::memory_order_relaxed);
    one.worker.store(context.runtime.get(), std::memory_order_relaxed);
    one.under.store(context.stop ? context.stop->call() : nullptr, std::memory_order_relaxed);
    one.since.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  }
  here.depth.store(depth_ + 1, std::memory_order_release);
}

ThreadWaitScope::~ThreadWaitScope() { own_waits->depth.store(depth_, std::memory_order_release); }

std::vector<ThreadWait> thread_waits() {
  std::vector<ThreadWait> found;
  AllWaits& all = AllWaits::of_this_process();
  base::MutexLock lock(all.mutex);
  for (const Waits* each : all.threads) {
    const int depths = std::min(each->depth.load(std::memory_order_acquire), Waits::kDepths);
    for (int depth = 0; depth < depths; ++depth) {
      const Waits::One& one = each->waits[static_cast<std::size_t>(depth)];
      ThreadWait wait;
      wait.thread = each->thread;
      wait.call = one.call.load(std::memory_order_relaxed);
      wait.worker = one.worker.load(std::memory_order_relaxed);
      wait.under = one.under.load(std::memory_order_relaxed);
      wait.depth = depth;
      wait.since = Clock::time_point(Clock::duration(one.since.load(std::memory_order_relaxed)));
      found.push_back(wait);
    }
  }
  return found;
}

}  // namespace stitch::rpc
