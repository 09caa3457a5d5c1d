#include "stitch/rpc/agent/bounded_task.h"

#include <exception>
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

void perform(base::UniqueFunction<void()>& task) {
  try {
    task();
  } catch (const std::exception&) {
    // Without memory, for example: it ends.
  }
}

}  // namespace

bool run_until(std::chrono::steady_clock::time_point deadline, base::UniqueFunction<void()> task) {
  std::shared_ptr<Run> run;
  std::thread thread;
  try {
    run = std::make_shared<Run>();
    run->task = std::move(task);
    thread = std::thread([run] {
      perform(run->task);
      run->task = nullptr;  // before the waiting thread goes on: it may hold the last reference
      base::MutexLock lock(run->mutex);
      run->done = true;
      run->changed.notify_all();
    });
  } catch (const std::exception&) {  // no thread, or no memory for one
    perform(run && run->task ? run->task : task);
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
