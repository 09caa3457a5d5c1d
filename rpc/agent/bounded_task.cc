#include "stitch/rpc/agent/bounded_task.h"

#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/mutex.h"

namespace stitch::rpc {

namespace {

struct Run {
  base::UniqueFunction<void()> task;  // its thread's alone
  base::Mutex mutex;
  base::CondVar changed;
  bool done STITCH_GUARDED_BY(mutex) = false;
};

}  // namespace

bool run_until(std::chrono::steady_clock::time_point deadline, base::UniqueFunction<void()> task) {
  const auto run = std::make_shared<Run>();
  run->task = std::move(task);
  std::thread thread;
  try {
    thread = std::thread([run] {
      run->task();
      run->task = nullptr;  // before the waiting thread goes on: it may hold the last reference
      base::MutexLock lock(run->mutex);
      run->done = true;
      run->changed.notify_all();
    });
  } catch (const std::system_error&) {  // there is no thread
    run->task();
    return true;
  }
  bool done = false;
  {
    base::MutexLock lock(run->mutex);
    while (!run->done && run->changed.wait_until(run->mutex, deadline)) {
    }
    done = run->done;
  }
  if (done) {
    thread.join();
  } else {
    thread.detach();
  }
  return done;
}

}  // namespace stitch::rpc
