#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/future/runtime.h"
#include "stitch/rpc/membership/membership_watch.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

// One callback of a user about the members of a world. Its calls run on the user-function threads,
// one at a time and in the order of the events. Shared by the MembershipWatch, the list of the
// worker and the task that calls it. Thread contract: any thread; the callback runs under no lock.
class Watcher : public std::enable_shared_from_this<Watcher> {
 public:
  using Callback = std::function<void(const WorkerInfo&, LeaveReason)>;
  explicit Watcher(Callback callback) : callback_(std::move(callback)) {}

  // Has the callback called. `runtime` is the worker's, current while it runs.
  void notify(const std::shared_ptr<Runtime>& runtime, const WorkerInfo& info, LeaveReason reason)
      STITCH_EXCLUDES(mutex_);
  // As MembershipWatch::stop(), or without waiting.
  void stop(bool wait) noexcept STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool stopped() const STITCH_EXCLUDES(mutex_);

 private:
  struct Event {
    WorkerInfo info;
    LeaveReason reason;
  };
  void call_back(const std::shared_ptr<Runtime>& runtime) STITCH_EXCLUDES(mutex_);

  const Callback callback_;
  mutable base::Mutex mutex_;
  base::CondVar idle_;
  std::deque<Event> events_ STITCH_GUARDED_BY(mutex_);
  bool scheduled_ STITCH_GUARDED_BY(mutex_) = false;  // call_back() will run, or runs
  bool stopped_ STITCH_GUARDED_BY(mutex_) = false;
  std::thread::id caller_ STITCH_GUARDED_BY(mutex_);  // none while the callback does not run
};

// The callbacks of one kind of one worker. Thread contract: any thread.
class Watchers {
 public:
  [[nodiscard]] std::shared_ptr<Watcher> add(Watcher::Callback callback) STITCH_EXCLUDES(mutex_);
  void notify(const std::shared_ptr<Runtime>& runtime, const WorkerInfo& info, LeaveReason reason)
      STITCH_EXCLUDES(mutex_);
  // No callback is begun any more, also of those added later.
  void close() STITCH_EXCLUDES(mutex_);

 private:
  base::Mutex mutex_;
  bool closed_ STITCH_GUARDED_BY(mutex_) = false;
  std::vector<std::weak_ptr<Watcher>> watchers_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
