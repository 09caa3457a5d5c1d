#include "stitch/rpc/membership/watcher.h"

#include <cstdio>
#include <deque>
#include <exception>
#include <string>
#include <utility>

#include "stitch/rpc/future/execution_context.h"

namespace stitch {

std::string_view to_string(LeaveReason reason) noexcept {
  return reason == LeaveReason::left ? "left" : "dead";
}

MembershipWatch::MembershipWatch(std::shared_ptr<rpc::Watcher> watcher) noexcept
    : watcher_(std::move(watcher)) {}

MembershipWatch& MembershipWatch::operator=(MembershipWatch&& other) noexcept {
  if (this != &other) {
    stop();
    watcher_ = std::move(other.watcher_);
  }
  return *this;
}

MembershipWatch::~MembershipWatch() { stop(); }

void MembershipWatch::stop() noexcept {
  if (const auto watcher = std::exchange(watcher_, nullptr)) watcher->stop(true);
}

namespace rpc {

void Watcher::call(const std::string& name, const WorkerInfo& info, LeaveReason reason) {
  {
    const base::MutexLock lock(mutex_);
    if (stopped_) return;
    caller_ = std::this_thread::get_id();
  }
  try {
    callback_(info, reason);
  } catch (...) {
    std::fprintf(stderr, "stitch: a callback about %s on worker \"%s\" failed: %s\n",
                 to_string(info).c_str(), name.c_str(), describe(std::current_exception()).c_str());
  }
  const base::MutexLock lock(mutex_);
  caller_ = {};
  idle_.notify_all();
}

void Watcher::stop(bool wait) noexcept {
  base::MutexLock lock(mutex_);
  stopped_ = true;
  while (wait && caller_ != std::thread::id() && caller_ != std::this_thread::get_id())
    idle_.wait(mutex_);
}

std::shared_ptr<Watcher> Watchers::add(Kind kind, Watcher::Callback callback) {
  auto watcher = std::make_shared<Watcher>(std::move(callback));
  const base::MutexLock lock(mutex_);
  std::erase_if(watchers_, [](const Entry& each) { return each.watcher.expired(); });
  if (closed_) {
    watcher->stop(false);
  } else {
    watchers_.push_back({kind, watcher});
  }
  return watcher;
}

void Watchers::notify(const std::shared_ptr<Runtime>& runtime, Kind kind, const WorkerInfo& info,
                      LeaveReason reason) {
  Event event{info, reason, {}};
  {
    const base::MutexLock lock(mutex_);
    for (const Entry& each : watchers_) {
      if (each.kind == kind) event.watchers.push_back(each.watcher);
    }
    if (closed_ || event.watchers.empty()) return;
    events_.push_back(std::move(event));
    if (std::exchange(scheduled_, true)) return;
  }
  runtime->post([this, runtime] { call_all(runtime); });
}

void Watchers::call_all(const std::shared_ptr<Runtime>& runtime) {
  ExecutionContext context;
  context.runtime = runtime;
  const ExecutionContextScope scope(std::move(context));
  for (;;) {
    Event event;
    {
      const base::MutexLock lock(mutex_);
      if (events_.empty()) {
        scheduled_ = false;
        return;
      }
      event = std::move(events_.front());
      events_.pop_front();
    }
    for (const auto& weak : event.watchers) {
      if (const auto watcher = weak.lock())
        watcher->call(runtime->name(), event.info, event.reason);
    }
  }
}

void Watchers::close() {
  std::vector<Entry> watchers;
  std::deque<Event> events;
  {
    const base::MutexLock lock(mutex_);
    closed_ = true;
    watchers.swap(watchers_);
    events.swap(events_);
  }
  for (const Entry& each : watchers) {
    if (const auto watcher = each.watcher.lock()) watcher->stop(false);
  }
}

}  // namespace rpc
}  // namespace stitch
