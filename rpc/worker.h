#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "stitch/rpc/agent/gather_exchange.h"
#include "stitch/rpc/calls.h"
#include "stitch/rpc/gathering.h"
#include "stitch/rpc/options/options.h"

namespace stitch {

// How Worker::shutdown() leaves.
struct ShutdownOptions {
  bool graceful = true;  // wait until all workers leave and nothing is in flight
  std::optional<std::chrono::nanoseconds> timeout{};  // default Options::shutdown_timeout
};

// A member of a world: makes calls and serves them. Several may live in one process, each
// independent. Owned by value; moving it moves the membership. Its destructor shuts down
// gracefully, within Options::shutdown_timeout, and says on stderr when that could not be graceful.
// Where shutdown() would throw, the destructor says so and the worker leaves in the background, on
// a thread of its own. In a forked child it does nothing. Thread contract: all methods from any
// thread but shutdown(), which see.
class Worker {
 public:
  Worker(Worker&&) noexcept = default;
  // The worker that this was before leaves as in its destructor.
  Worker& operator=(Worker&& other) noexcept;
  ~Worker();

  // "worker<rank>" unless Options::name says otherwise.
  [[nodiscard]] const std::string& name() const { return agent_->self().name; }
  // 0 to world_size() - 1.
  [[nodiscard]] int rank() const { return static_cast<int>(agent_->self().id.value()); }
  // The rank as a WorkerId.
  [[nodiscard]] WorkerId id() const { return agent_->self().id; }
  // How many workers there are.
  [[nodiscard]] int world_size() const { return static_cast<int>(agent_->world_size()); }
  // Name, id and epoch of this worker.
  [[nodiscard]] const WorkerInfo& info() const { return agent_->self(); }
  // Those of all workers, this one among them, by rank.
  [[nodiscard]] const std::vector<WorkerInfo>& workers() const { return agent_->peers().infos(); }
  // Those of one worker. Throws Error(invalid_argument) naming what was looked for, and near names.
  [[nodiscard]] const WorkerInfo& worker(std::string_view name) const {
    return agent_->peers().find(name);
  }
  [[nodiscard]] const WorkerInfo& worker(WorkerId id) const { return agent_->peers().find(id); }

  // Leaves the world; the worker can do nothing afterwards. From here on the program's own threads
  // begin no calls any more (`shutting_down`); handlers and continuations do, until nothing is in
  // flight. Everything ends within the timeout (plus at most a second); throws Error(timeout)
  // naming who was waited for when it could not be graceful. A second call waits for the end of the
  // first and does nothing else. Throws Error(invalid_argument), and the worker goes on as before,
  // on a thread that it would have to wait for: in a handler, continuation or coroutine of this
  // worker, or, if graceful, of any worker of its world; in an inline function, an on_ready
  // callback, a stop callback or a canceller that one of stitch's threads runs.
  void shutdown(ShutdownOptions options = {});

  // Waits until all workers, or all of `names` (this worker among them), have called it. Each set
  // of names counts its barriers and all_gathers by itself. Throws Error(timeout) naming the
  // workers that did not come within Options::rpc_timeout, and Error(invalid_argument), on each of
  // them, when one called all_gather() instead.
  void barrier() { barrier(all_names()); }
  void barrier(const std::vector<std::string>& names);
  // Gives `value` to all workers and returns the values of all, by worker name. T must be sendable,
  // and the same on all workers. Errors as barrier(); other types are invalid_argument, naming
  // them.
  template <class T>
  [[nodiscard]] std::map<std::string, T> all_gather(const T& value);

  // Named numbers about calls, queues, references, contexts: for tests and for people.
  [[nodiscard]] std::map<std::string, std::int64_t> debug_info() const {
    return agent_->debug_info();
  }

  // As stitch::rpc_sync(), with this worker as the caller.
  template <auto F, class... Args>
  auto rpc_sync(Target target, Args&&... args) {
    return detail::call<F>(agent_, target, std::forward<Args>(args)...).get();
  }
  template <auto F, class... Args>
  auto rpc_sync(TargetOptions target, Args&&... args) {
    return detail::call<F>(agent_, Target(std::move(target)), std::forward<Args>(args)...).get();
  }
  // As stitch::rpc_async(), with this worker as the caller.
  template <auto F, class... Args>
  auto rpc_async(Target target, Args&&... args) {
    return detail::call<F>(agent_, target, std::forward<Args>(args)...);
  }
  template <auto F, class... Args>
  auto rpc_async(TargetOptions target, Args&&... args) {
    return detail::call<F>(agent_, Target(std::move(target)), std::forward<Args>(args)...);
  }
  // As stitch::notify(), with this worker as the caller.
  template <auto F, class... Args>
  void notify(Target target, Args&&... args) {
    detail::notify<F>(agent_, target, std::forward<Args>(args)...);
  }
  template <auto F, class... Args>
  void notify(TargetOptions target, Args&&... args) {
    detail::notify<F>(agent_, Target(std::move(target)), std::forward<Args>(args)...);
  }
  // As stitch::remote<f>() and stitch::remote<T>(), with this worker as the caller: the result
  // stays on the target, an RRef to it comes back. Defined by rref/rref.h.
  template <auto F, class... Args>
  auto remote(Target target, Args&&... args);
  template <auto F, class... Args>
  auto remote(TargetOptions target, Args&&... args);
  template <class T, class... Args>
  auto remote(Target target, Args&&... args);
  template <class T, class... Args>
  auto remote(TargetOptions target, Args&&... args);

  // For the layers above.
  [[nodiscard]] const std::shared_ptr<rpc::Agent>& agent() const noexcept { return agent_; }

 private:
  friend Worker init(Options options);
  explicit Worker(std::shared_ptr<rpc::Agent> agent);
  [[nodiscard]] std::vector<std::string> all_names() const;
  // Runs one gathering: posts `value` for the others of `names` under the key, and returns the key
  // and the others.
  struct Gathering {
    std::string key;
    std::vector<WorkerInfo> others;
  };
  [[nodiscard]] Gathering begin_gathering(std::vector<std::string> names, rpc::OwnedObject value);
  // The values of the others, complete.
  template <class T>
  [[nodiscard]] std::vector<Future<T>> gather(const Gathering& gathering, const std::string& what);
  // Throws the error of a gathering that failed, naming those that did not answer.
  [[noreturn]] void fail_gathering(const std::string& what,
                                   const std::vector<std::pair<WorkerInfo, Error>>& failures) const;

  std::shared_ptr<rpc::Agent> agent_;
};

// Joins the world: finds the others by Options::init_method and returns when all world_size workers
// are there. Throws Error: invalid_argument (an option, a variable, a duplicate name or rank,
// naming both workers), timeout (naming who is missing), disconnected (the store cannot be
// reached). Blocks for at most Options::init_timeout.
[[nodiscard]] Worker init(Options options = {});

// Makes a worker current on this thread for a block.
class WorkerScope {
 public:
  // Until the scope ends; scopes nest.
  explicit WorkerScope(const Worker& worker) : scope_(with_agent(worker.agent())) {}

 private:
  static rpc::ExecutionContext with_agent(std::shared_ptr<rpc::Agent> agent) {
    rpc::ExecutionContext ambient;
    ambient.runtime = std::move(agent);
    return ambient;
  }
  rpc::ExecutionContextScope scope_;
};

namespace detail {
// Until all are complete or one has failed for another reason than that its time is up, which is
// everybody's.
template <class T>
void wait_until_settled(const std::vector<Future<T>>& futures) {
  if (futures.empty()) return;
  const Promise<void> settled;
  const auto left = std::make_shared<std::atomic<std::size_t>>(futures.size());
  for (const auto& future : futures) {
    future.on_ready([settled, left, future] {
      const bool failed = future.has_error() && future.error().code() != ErrorCode::timeout;
      if (left->fetch_sub(1) == 1 || failed) settled.set_value();
    });
  }
  settled.future().get();
}
}  // namespace detail

template <class T>
std::vector<Future<T>> Worker::gather(const Gathering& gathering, const std::string& what) {
  std::vector<Future<T>> futures;
  for (const auto& other : gathering.others)
    futures.push_back(detail::fetch_gathered<T>(agent_, other, gathering.key));
  detail::wait_until_settled(futures);
  std::vector<std::pair<WorkerInfo, Error>> failures;
  for (std::size_t i = 0; i < futures.size(); ++i) {
    if (futures[i].has_error()) failures.emplace_back(gathering.others[i], futures[i].error());
  }
  if (!failures.empty()) {
    for (const auto& future : futures) future.cancel();  // no longer wanted
    fail_gathering(what, failures);
  }
  return futures;
}

template <class T>
std::map<std::string, T> Worker::all_gather(const T& value) {
  static_assert(Sendable<T>, "stitch: all_gather needs a sendable type");
  const auto gathering =
      begin_gathering(all_names(), rpc::OwnedObject::of(std::make_shared<T>(value)));
  auto others = gather<T>(gathering, "all_gather of " + base::demangle(typeid(T).name()));
  std::map<std::string, T> values{{name(), value}};
  for (std::size_t i = 0; i < others.size(); ++i)
    values.emplace(gathering.others[i].name, std::move(others[i]).get());
  return values;
}

}  // namespace stitch
