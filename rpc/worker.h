#pragma once

#include <any>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/calls.h"
#include "stitch/rpc/gathering.h"
#include "stitch/rpc/membership/membership_watch.h"
#include "stitch/rpc/message/sendable.h"
#include "stitch/rpc/options/options.h"

namespace stitch {

namespace detail {
[[nodiscard]] const std::any& user_data_of(const rpc::Agent& agent) noexcept;
[[noreturn]] void fail_user_data(const rpc::Agent& agent, const std::type_info& wanted);

template <class T>
T user_data_as(const rpc::Agent& agent) {
  if (const T* const found = std::any_cast<T>(&user_data_of(agent))) return *found;
  fail_user_data(agent, typeid(T));
}
}  // namespace detail

// How Worker::shutdown() leaves.
struct ShutdownOptions {
  bool graceful = true;  // wait until all workers leave and nothing is in flight
  // How long it serves until every live worker has asked to leave; not set: without a limit.
  std::optional<std::chrono::nanoseconds> wait{};
  // How long the end takes at most once all have; default Options::shutdown_timeout.
  std::optional<std::chrono::nanoseconds> timeout{};
};

// A member of a world: makes calls and serves them. Several may live in one process, each
// independent. Owned by value; moving it moves the membership. Its destructor is shutdown(), and
// reports on stderr when that was not graceful. Where shutdown() would throw, the destructor
// reports that and the worker leaves in the background, on a thread of its own. In a forked child
// it does nothing. Methods of one that was moved from throw Error(invalid_argument). Thread
// contract: all methods from any thread but shutdown(), which see.
class Worker {
 public:
  Worker(Worker&&) noexcept = default;
  // The worker that this was before leaves as in its destructor.
  Worker& operator=(Worker&& other) noexcept;
  ~Worker();

  // "worker<rank>" unless Options::name says otherwise.
  [[nodiscard]] const std::string& name() const { return info().name; }
  // In a fixed world 0 to its size - 1; in an elastic one the id, which may be any number below the
  // number of workers that there have been.
  [[nodiscard]] int rank() const { return static_cast<int>(id().value()); }
  // The rank as a WorkerId.
  [[nodiscard]] WorkerId id() const { return info().id; }
  // How many workers there are: workers().size().
  [[nodiscard]] int world_size() const { return static_cast<int>(workers().size()); }
  // Name, id and epoch of this worker; valid as long as it.
  [[nodiscard]] const WorkerInfo& info() const;
  // Those of all workers as this one knows them at this moment, itself among them, by rank. In a
  // fixed world all, also one that is dead and may be restarted; in an elastic one those that live.
  [[nodiscard]] std::vector<WorkerInfo> workers() const;
  // Those of the present or last life of one worker; valid as long as this Worker. Throws
  // Error(not_found) naming what was looked for, and near names.
  [[nodiscard]] const WorkerInfo& worker(std::string_view name) const;
  [[nodiscard]] const WorkerInfo& worker(WorkerId id) const;

  // Calls `callback` with each worker that joins from now on, or comes back with a higher epoch, as
  // long as the result and this worker live; workers() after this misses none. Callbacks of on_join
  // and on_leave run on the user-function threads, one at a time, in the order of the events. They
  // may block; what they throw is reported on stderr.
  MembershipWatch on_join(std::function<void(const WorkerInfo&)> callback);
  // The same for each worker that leaves the world while that goes on, or dies: what was declared
  // dead by the world, not what this worker alone cannot reach. Calls to it have failed by then. In
  // a fixed world, workers that shut down together do not "leave".
  MembershipWatch on_leave(std::function<void(const WorkerInfo&, LeaveReason)> callback);
  // The same for a callback that does not ask why.
  template <class F>
  requires(std::invocable<F&, const WorkerInfo&> &&
           !std::invocable<F&, const WorkerInfo&, LeaveReason>) MembershipWatch
      on_leave(F callback) {
    return on_leave(std::function<void(const WorkerInfo&, LeaveReason)>(
        [callback = std::move(callback)](const WorkerInfo& info, LeaveReason) mutable {
          callback(info);
        }));
  }

  // With Options::start_serving false: begins with the calls of peers that have come so far, in
  // their order, and serves from now on. Before it barriers and all_gathers are answered, other
  // calls and uses of references wait. Otherwise, and a second time, without effect. A worker whose
  // shutdown comes first never serves: the calls get Error(shutting_down).
  void serve();
  // A copy of Options::user_data. Throws Error(invalid_argument), naming both types, when that is
  // not a T.
  template <class T>
  [[nodiscard]] T user_data() const {
    return detail::user_data_as<T>(*agent());
  }

  // Leaves the world; the worker can do nothing afterwards. In a fixed world it serves until every
  // live worker has called it, at most for `wait` (or `timeout` once a stop signal has come); after
  // `timeout` it says once which workers it waits for. Then everything ends within `timeout` and a
  // second. An elastic world is left once the calls of this worker, and those to it, are over. The
  // program's own threads begin no calls from here on. Throws Error(timeout) naming the workers
  // that were waited for; a second call waits for the end of the first. Throws
  // Error(invalid_argument), and the worker continues, on a thread that it would have to wait for:
  // a handler, continuation, coroutine or callback.
  void shutdown(ShutdownOptions options = {});

  // Waits until all workers, or all of `names` (this worker among them), have called it, in log2 N
  // rounds; an elastic world needs the names. Each set of lives counts its barriers and all_gathers
  // by itself. Throws Error: disconnected naming a participant that dies or leaves, timeout naming
  // one that did not arrive within Options::rpc_timeout, invalid_argument when one called
  // all_gather() instead; all participants that still wait get the same error.
  void barrier() { barrier(all_names()); }
  void barrier(const std::vector<std::string>& names);
  // Gives `value` to all workers, or all of `names` (this worker among them), and returns the
  // values of all, by worker name. T must be sendable, and the same on all workers. Errors as
  // barrier(); other types are invalid_argument, naming them.
  template <class T>
  [[nodiscard]] std::map<std::string, T> all_gather(const T& value) {
    return all_gather(value, all_names());
  }
  template <class T>
  [[nodiscard]] std::map<std::string, T> all_gather(const T& value,
                                                    const std::vector<std::string>& names);

  // Named numbers about calls, queues, references, contexts, for tests and diagnosis.
  [[nodiscard]] std::map<std::string, std::int64_t> debug_info() const;

  // Writes what this worker does now, what it waits for and what it did last into a file of
  // `folder`, by default Options::dump_dir, and returns its path; `stitch-run --diagnose` reads it.
  // Throws Error(invalid_argument) without a folder, Error(internal) if it cannot be written.
  std::string dump(const std::string& folder = {}) const;

  // As stitch::rpc_sync(), with this worker as the caller.
  template <auto F, class... Args>
  auto rpc_sync(Target target, Args&&... args) {
    const rpc::AnswerWaitScope waits;
    return detail::call<F>(agent(), target, std::forward<Args>(args)...).get();
  }
  template <auto F, class... Args>
  auto rpc_sync(TargetOptions target, Args&&... args) {
    const rpc::AnswerWaitScope waits;
    return detail::call<F>(agent(), Target(std::move(target)), std::forward<Args>(args)...).get();
  }
  // Does not compile: write rpc_sync<f>(target, arguments...).
  template <detail::FunctionValue F, class... Args>
  rpc::AnyValue rpc_sync(F&&, Args&&...) {
    return detail::refuse_function_value<F>();
  }
  // As stitch::rpc_async(), with this worker as the caller.
  template <auto F, class... Args>
  auto rpc_async(Target target, Args&&... args) {
    return detail::call<F>(agent(), target, std::forward<Args>(args)...);
  }
  template <auto F, class... Args>
  auto rpc_async(TargetOptions target, Args&&... args) {
    return detail::call<F>(agent(), Target(std::move(target)), std::forward<Args>(args)...);
  }
  // Does not compile: write rpc_async<f>(target, arguments...).
  template <detail::FunctionValue F, class... Args>
  rpc::AnyValue rpc_async(F&&, Args&&...) {
    return detail::refuse_function_value<F>();
  }
  // As stitch::notify(), with this worker as the caller.
  template <auto F, class... Args>
  void notify(Target target, Args&&... args) {
    detail::notify<F>(agent(), target, std::forward<Args>(args)...);
  }
  template <auto F, class... Args>
  void notify(TargetOptions target, Args&&... args) {
    detail::notify<F>(agent(), Target(std::move(target)), std::forward<Args>(args)...);
  }
  // Does not compile: write notify<f>(target, arguments...).
  template <detail::FunctionValue F, class... Args>
  rpc::AnyValue notify(F&&, Args&&...) {
    return detail::refuse_function_value<F>();
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

  // Does not compile: write remote<f>(target, arguments...).
  template <detail::FunctionValue F, class... Args>
  rpc::AnyValue remote(F&&, Args&&...) {
    return detail::refuse_function_value<F>();
  }
  // As stitch::make_rref(), owned by this worker. Defined by rref/rref.h.
  template <class T>
  auto make_rref(T value);

  // For the layers above. Throws as every method of a Worker that was moved from.
  [[nodiscard]] const std::shared_ptr<rpc::Agent>& agent() const {
    if (!agent_) fail_moved_from();
    return agent_;
  }

 private:
  friend Worker init(Options options);
  explicit Worker(std::shared_ptr<rpc::Agent> agent);
  [[noreturn]] static void fail_moved_from();
  [[nodiscard]] std::vector<std::string> all_names() const;
  // Begins a gathering of this worker and the others of `names`.
  [[nodiscard]] detail::Gathering begin_gathering(std::vector<std::string> names, std::string what,
                                                  rpc::OwnedObject value);
  // Throws the error of a gathering that failed.
  [[noreturn]] void fail_gathering(const detail::Gathering& gathering, const Error& why) const;
  template <class T>
  std::vector<rpc::OwnedObject> gather(const detail::Gathering& gathering);

  std::shared_ptr<rpc::Agent> agent_;
};

// Joins the world that Options::init_method names and returns when it can start, or, where it runs
// already, when all live members know this worker: under its former name and id with a higher
// epoch, or as a new one of an elastic world. Throws Error: invalid_argument (an option, no room),
// already_exists (a name or rank that is taken), timeout (naming the workers that are missing),
// disconnected (the store). Blocks for at most Options::init_timeout and a second.
[[nodiscard]] Worker init(Options options = {});

// Whether SIGTERM or SIGINT has come to this process since a worker was started with
// Options::stop_on_signals. Any thread.
[[nodiscard]] bool stop_requested() noexcept;
// Waits for that: what the main() of a server of an elastic world ends with. Throws
// Error(invalid_argument) where no worker was started with that option. Any thread.
void wait_for_stop();

// Makes a worker current on this thread for a block.
class WorkerScope {
 public:
  // Until the scope ends; scopes nest.
  explicit WorkerScope(const Worker& worker);

 private:
  rpc::ExecutionContextScope scope_;
};

// Name, id and epoch of the current worker, which the free functions act on: that of the handler,
// continuation or WorkerScope which this code runs under, else the only one of the process. Throws
// Error(invalid_argument) where there is none or several, shutting_down after its end. Any thread.
[[nodiscard]] WorkerInfo current_worker();

// Worker::user_data() of the current worker: how a function that is called remotely reaches what
// the program has made. Throws as current_worker() does, too. Any thread.
template <class T>
[[nodiscard]] T user_data() {
  return detail::user_data_as<T>(*rpc::current_agent());
}

template <class T>
std::vector<rpc::OwnedObject> Worker::gather(const detail::Gathering& gathering) {
  try {
    return detail::gather<T>(agent(), gathering);
  } catch (const Error& error) {
    fail_gathering(gathering, error);
  }
}

template <class T>
std::map<std::string, T> Worker::all_gather(const T& value, const std::vector<std::string>& names) {
  static_assert(detail::WhyNot<T, detail::Object<T>>::kSaid);
  const auto gathering =
      begin_gathering(names, "an all_gather of " + base::demangle(typeid(T).name()),
                      rpc::OwnedObject::of(std::make_shared<T>(value)));
  const auto objects = gather<T>(gathering);
  std::map<std::string, T> values;
  for (std::size_t i = 0; i < objects.size(); ++i) {
    values.emplace(gathering.participants[i], *static_cast<const T*>(objects[i].object.get()));
  }
  return values;
}

}  // namespace stitch
