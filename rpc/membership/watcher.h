#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/future/runtime.h"
#include "stitch/rpc/membership/membership_watch.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

// One callback of a user about the members of a world. Shared by the MembershipWatch, the list of
// the worker and the events that it is to be told. Thread contract: any thread but for call(); the
// callback runs under no lock.
class Watcher {
 public:
  using Callback = std::function<void(const WorkerInfo&, LeaveReason)>;
  explicit Watcher(Callback callback) : callback_(std::move(callback)) {}

  // Calls the callback unless it has been stopped. One call at a time. `name`: of the worker.
  void call(const std::string& name, const WorkerInfo& info, LeaveReason reason)
      STITCH_EXCLUDES(mutex_);
  // As MembershipWatch::stop(), or without waiting.
  void stop(bool wait) noexcept STITCH_EXCLUDES(mutex_);

 private:
  const Callback callback_;
  base::Mutex mutex_;
  base::CondVar idle_;
  bool stopped_ STITCH_GUARDED_BY(mutex_) = false;
  std::thread::id caller_ STITCH_GUARDED_BY(mutex_);  // none while the callback does not run
};

// All callbacks of one worker. They are called on the user-function threads, one at a time, and in
// the order of the events, whichever kind these are of: that a life is over is told before the next
// life of that worker. Thread contract: any thread; one at a time calls notify().
class Watchers {
 public:
  enum class Kind : std::uint8_t { joins, leaves };
  [[nodiscard]] std::shared_ptr<Watcher> add(Kind kind, Watcher::Callback callback)
      STITCH_EXCLUDES(mutex_);
  // Has those of that kind that are there now called. `runtime` is the worker's, which keeps this;
  // it is current while they run. Nothing has changed if this throws.
  void notify(const std::shared_ptr<Runtime>& runtime, Kind kind, const WorkerInfo& info,
              LeaveReason reason) STITCH_EXCLUDES(mutex_);
  // No callback is begun any more, also of those added later.
  void close() STITCH_EXCLUDES(mutex_);

 private:
  struct Event {
    WorkerInfo info;
    LeaveReason reason;
    std::vector<std::weak_ptr<Watcher>> watchers;
  };
  struct Entry {
    Kind kind;
    std::weak_ptr<Watcher> watcher;
  };
  void call_all(const std::shared_ptr<Runtime>& runtime) STITCH_EXCLUDES(mutex_);

  base::Mutex mutex_;
  bool closed_ STITCH_GUARDED_BY(mutex_) = false;
  bool scheduled_ STITCH_GUARDED_BY(mutex_) = false;  // call_all() will run, or runs
  std::vector<Entry> watchers_ STITCH_GUARDED_BY(mutex_);
  std::deque<Event> events_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
