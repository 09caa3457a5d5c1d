#include "stitch/rpc/future/live_runtimes.h"

#include <set>
#include <string>

#include "stitch/base/error.h"
#include "stitch/base/forked.h"
#include "stitch/base/name_list.h"
#include "stitch/rpc/future/execution_context.h"

namespace stitch::rpc {

LiveRuntimes& LiveRuntimes::of_this_process() {
  static std::atomic<LiveRuntimes*> current{new LiveRuntimes(base::fork_count(), false)};
  LiveRuntimes* known = current.load();
  while (known->fork_ != base::fork_count()) {
    // The lock of the parent's list may stay held in this process: only its count is read.
    auto* const fresh = new LiveRuntimes(base::fork_count(),
                                         known->forked_from_workers_ || known->count_.load() > 0);
    if (current.compare_exchange_strong(known, fresh)) return *fresh;
    delete fresh;
  }
  return *known;
}

void LiveRuntimes::add(const std::shared_ptr<Runtime>& runtime) {
  base::MutexLock lock(mutex_);
  records_.push_back({runtime.get(), runtime});
  count_.store(records_.size());
}

void LiveRuntimes::remove(const Runtime* runtime) {
  base::MutexLock lock(mutex_);
  std::erase_if(records_, [&](const Record& record) {
    return record.runtime == runtime || record.owner.expired();
  });
  count_.store(records_.size());
  last_gone_ = true;
}

std::vector<std::shared_ptr<Runtime>> LiveRuntimes::all() {
  std::vector<std::shared_ptr<Runtime>> runtimes;
  base::MutexLock lock(mutex_);
  for (const Record& record : records_) {
    if (auto runtime = record.owner.lock()) runtimes.push_back(std::move(runtime));
  }
  return runtimes;
}

std::shared_ptr<Runtime> LiveRuntimes::sole() {
  base::MutexLock lock(mutex_);
  return records_.size() == 1 ? records_.front().owner.lock() : nullptr;
}

std::shared_ptr<Runtime> LiveRuntimes::any() {
  base::MutexLock lock(mutex_);
  for (const Record& record : records_) {
    if (auto runtime = record.owner.lock()) return runtime;
  }
  return nullptr;
}

std::shared_ptr<Runtime> LiveRuntimes::only() {
  std::vector<std::shared_ptr<Runtime>> several;
  {
    base::MutexLock lock(mutex_);
    std::erase_if(records_, [](const Record& record) { return record.owner.expired(); });
    for (const Record& record : records_) {
      auto runtime = record.owner.lock();
      if (runtime && records_.size() == 1) return runtime;
      if (runtime) several.push_back(std::move(runtime));
    }
    if (several.empty() && last_gone_) {
      throw Error(ErrorCode::shutting_down,
                  "there is no current worker: the one of this process has shut down");
    }
  }
  if (several.empty())
    throw Error(ErrorCode::invalid_argument,
                "there is no current worker: call stitch::init() first");
  std::set<std::string> sorted;
  for (const auto& runtime : several) sorted.insert(runtime->name());
  const std::string names = base::join_names({sorted.begin(), sorted.end()});
  throw Error(ErrorCode::invalid_argument,
              "there is no current worker on this thread, and this process has several (" + names +
                  "): make one current with stitch::WorkerScope");
}

std::shared_ptr<Runtime> current_runtime() {
  if (const auto& runtime = ExecutionContext::current().runtime) return runtime;
  return LiveRuntimes::of_this_process().only();
}

bool help_current_runtime(base::AwaitedFlag& done, Clock::time_point deadline) {
  auto runtime = ExecutionContext::current().runtime;
  if (!runtime) runtime = LiveRuntimes::of_this_process().sole();
  if (!runtime && LiveRuntimes::of_this_process().forked_from_workers())
    refuse_forked_child("a future cannot be waited for");
  return runtime ? runtime->help(done, deadline) : done.is_set();
}

void refuse_forked_child(const char* what) {
  throw Error(ErrorCode::invalid_argument,
              std::string(what) +
                  " in a process that was forked from one with a worker: fork before that starts, "
                  "or exec");
}

}  // namespace stitch::rpc
