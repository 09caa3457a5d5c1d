#include "stitch/rpc/membership/watcher.h"

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "stitch/base/patience.h"
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

void Watcher::notify(const std::shared_ptr<Runtime>& runtime, const WorkerInfo& info,
                     LeaveReason reason) {
  {
    const base::MutexLock lock(mutex_);
    if (stopped_) return;
    events_.push_back({info, reason});
    if (std::exchange(scheduled_, true)) return;
  }
  try {
    runtime->post([self = shared_from_this(), runtime] { self->call_back(runtime); });
  } catch (const std::bad_alloc&) {
    // Told again, or with the next event: as it was before.
    const base::MutexLock lock(mutex_);
    scheduled_ = false;
    if (!events_.empty()) events_.pop_back();
    throw;
  }
}

void Watcher::call_back(const std::shared_ptr<Runtime>& runtime) {
  ExecutionContext context;
  context.runtime = runtime;
  const ExecutionContextScope scope(std::move(context));
  for (;;) {
    Event event;
    {
      const base::MutexLock lock(mutex_);
      caller_ = {};
      idle_.notify_all();
      if (stopped_ || events_.empty()) {
        scheduled_ = false;
        return;
      }
      event = std::move(events_.front());
      events_.pop_front();
      caller_ = std::this_thread::get_id();
    }
    try {
      callback_(event.info, event.reason);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "stitch: a callback about %s on worker \"%s\" failed: %s\n",
                   to_string(event.info).c_str(), runtime->name().c_str(), error.what());
    } catch (...) {
      std::fprintf(stderr, "stitch: a callback about %s on worker \"%s\" failed\n",
                   to_string(event.info).c_str(), runtime->name().c_str());
    }
  }
}

void Watcher::stop(bool wait) noexcept {
  base::MutexLock lock(mutex_);
  stopped_ = true;
  events_.clear();
  while (wait && caller_ != std::thread::id() && caller_ != std::this_thread::get_id())
    idle_.wait(mutex_);
}

bool Watcher::stopped() const {
  const base::MutexLock lock(mutex_);
  return stopped_;
}

std::shared_ptr<Watcher> Watchers::add(Watcher::Callback callback) {
  auto watcher = std::make_shared<Watcher>(std::move(callback));
  const base::MutexLock lock(mutex_);
  std::erase_if(watchers_, [](const auto& weak) { return weak.expired(); });
  if (closed_) {
    watcher->stop(false);
  } else {
    watchers_.push_back(watcher);
  }
  return watcher;
}

void Watchers::notify(const std::shared_ptr<Runtime>& runtime, const WorkerInfo& info,
                      LeaveReason reason) {
  std::vector<std::weak_ptr<Watcher>> watchers;
  {
    const base::MutexLock lock(mutex_);
    watchers = watchers_;
  }
  for (const auto& weak : watchers) {
    const auto watcher = weak.lock();
    if (!watcher) continue;
    // Each for itself: those before it must not be told twice.
    base::patiently([&] { watcher->notify(runtime, info, reason); });
  }
}

void Watchers::close() {
  std::vector<std::weak_ptr<Watcher>> watchers;
  {
    const base::MutexLock lock(mutex_);
    closed_ = true;
    watchers.swap(watchers_);
  }
  for (const auto& weak : watchers) {
    if (const auto watcher = weak.lock()) watcher->stop(false);
  }
}

}  // namespace rpc
}  // namespace stitch
