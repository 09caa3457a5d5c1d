#include "stitch/rpc/worker.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/base/error.h"
#include "stitch/base/process_setup.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/gather_exchange.h"
#include "stitch/rpc/agent/stop_signals.h"
#include "stitch/rpc/function/registry.h"
#include "stitch/rpc/future/live_runtimes.h"
#include "stitch/rpc/options/security_options.h"
#include "stitch/rpc/world/join_world.h"
#include "stitch/rpc/world/world_extension.h"

namespace stitch {

namespace {

// The error of a shutdown of `agent` on this thread; nothing where it may be called.
std::optional<Error> why_not_here(const std::shared_ptr<rpc::Agent>& agent, bool graceful) {
  auto refusal = agent->why_not_here();
  if (refusal || !graceful || agent->stopped()) return refusal;
  for (const auto& runtime : rpc::LiveRuntimes::of_this_process().all()) {
    const auto other = std::static_pointer_cast<rpc::Agent>(runtime);
    if (other == agent || other->world() != agent->world() || !other->serves_here()) continue;
    return Error(ErrorCode::invalid_argument,
                 "shutdown of " + to_string(agent->self()) + " was called from a handler of " +
                     to_string(other->self()) +
                     ", which has to leave, too: it would wait for itself");
  }
  return std::nullopt;
}

void leave(rpc::Agent& agent, ShutdownOptions options) {
  const auto began = std::chrono::steady_clock::now();
  const std::chrono::nanoseconds limit = options.timeout.value_or(agent.options().shutdown_timeout);
  const bool first = rpc::WorldExtension::of(agent).leave_by(base::deadline_after(limit));
  // A worker that starts from here on is not to find a world that is about to end. A fixed world
  // that is left gracefully goes on until all have agreed; see WorldExtension::on_all_leave().
  const bool alone_decides = !options.graceful || agent.options().world_size.is_elastic();
  if (first && alone_decides && !agent.stopped() && agent.live_members().size() == 1)
    rpc::WorldExtension::of(agent).end_world();
  if (!agent.stopped() && options.graceful && agent.options().world_size.is_elastic()) {
    agent.gather_exchange().close(
        Error(ErrorCode::shutting_down, to_string(agent.self()) + " leaves the world"));
  }
  const std::chrono::nanoseconds spent = std::chrono::steady_clock::now() - began;
  const auto error = agent.shutdown(
      options.graceful, std::max<std::chrono::nanoseconds>(limit - spent, std::chrono::seconds(0)),
      options.wait);
  if (agent.stopped()) rpc::LiveRuntimes::of_this_process().remove(&agent);
  if (error) throw *error;
}

void leave_or_say_why(rpc::Agent& agent) noexcept {
  try {
    leave(agent, {});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stitch: %s\n", error.what());
  }
}

}  // namespace

Worker::Worker(std::shared_ptr<rpc::Agent> agent) : agent_(std::move(agent)) {
  rpc::LiveRuntimes::of_this_process().add(agent_);
}

Worker& Worker::operator=(Worker&& other) noexcept {
  if (this != &other) {
    Worker old(std::move(*this));  // leaves its world when this block ends
    agent_ = std::move(other.agent_);
  }
  return *this;
}

Worker::~Worker() {
  if (!agent_) return;
  if (agent_->forked()) {
    // It belongs to the parent process: its threads do not exist here, and its locks may stay held.
    static_cast<void>(new std::shared_ptr<rpc::Agent>(std::move(agent_)));
    return;
  }
  if (!why_not_here(agent_, true)) {
    leave_or_say_why(*agent_);
    return;
  }
  std::fprintf(stderr,
               "stitch: %s is destroyed on a thread that its shutdown would wait for: it leaves in "
               "the background\n",
               to_string(agent_->self()).c_str());
  try {
    std::thread([agent = agent_] { leave_or_say_why(*agent); }).detach();
  } catch (const std::system_error& error) {
    std::fprintf(stderr, "stitch: %s cannot leave: %s\n", to_string(agent_->self()).c_str(),
                 error.what());
  }
}

void Worker::fail_moved_from() {
  throw Error(ErrorCode::invalid_argument,
              "this Worker was moved from: use the one that it was moved to");
}

const WorkerInfo& Worker::info() const { return agent()->self(); }

std::vector<WorkerInfo> Worker::workers() const {
  const auto& agent = this->agent();
  return agent->options().world_size.is_elastic() ? agent->live_members() : agent->peers().infos();
}

const WorkerInfo& Worker::worker(std::string_view name) const {
  return agent()->peers().find(name);
}

const WorkerInfo& Worker::worker(WorkerId id) const { return agent()->peers().find(id); }

MembershipWatch Worker::on_join(std::function<void(const WorkerInfo&)> callback) {
  return MembershipWatch(rpc::WorldExtension::of(*agent()).watchers().add(
      rpc::Watchers::Kind::joins,
      [callback = std::move(callback)](const WorkerInfo& info, LeaveReason) { callback(info); }));
}

MembershipWatch Worker::on_leave(std::function<void(const WorkerInfo&, LeaveReason)> callback) {
  return MembershipWatch(rpc::WorldExtension::of(*agent()).watchers().add(
      rpc::Watchers::Kind::leaves, std::move(callback)));
}

std::map<std::string, std::int64_t> Worker::debug_info() const { return agent()->debug_info(); }

std::string Worker::dump(const std::string& folder) const { return agent()->dumps().write(folder); }

void Worker::serve() { agent()->served_calls().serve(); }

void Worker::shutdown(ShutdownOptions options) {
  const auto agent = this->agent();  // a second caller may outlast the Worker
  if (auto refusal = why_not_here(agent, options.graceful)) throw std::move(*refusal);
  leave(*agent, options);
}

std::vector<std::string> Worker::all_names() const {
  if (agent()->options().world_size.is_elastic()) {
    throw Error(ErrorCode::invalid_argument,
                "barrier() and all_gather() take names in an elastic world, whose workers come and "
                "go: say who takes part, as in barrier({\"a\", \"b\"})");
  }
  std::vector<std::string> names;
  for (const auto& info : workers()) names.push_back(info.name);
  return names;
}

detail::Gathering Worker::begin_gathering(std::vector<std::string> names, std::string what,
                                          rpc::OwnedObject value) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  const auto self = std::lower_bound(names.begin(), names.end(), name());
  if (self == names.end() || *self != name()) {
    throw Error(ErrorCode::invalid_argument,
                "worker \"" + name() +
                    "\" cannot take part in a barrier or all_gather that does not "
                    "name it");
  }
  std::vector<WorkerInfo> lives;
  for (const auto& each : names) lives.push_back(worker(each));
  agent_->throw_if_stopped();
  auto begun = agent_->gather_exchange().begin(lives, what, std::move(value));
  for (const auto& each : lives) {  // the exchange may have heard of it before
    if (agent_->peers().lost(each)) agent_->gather_exchange().on_lost(each);
  }
  std::rotate(names.begin(), std::next(self), names.end());
  std::reverse(names.begin(), names.end());
  return {begun.key.set,    begun.key.number,     std::move(what), std::move(begun.sources),
          std::move(names), std::move(begun.done)};
}

void Worker::fail_gathering(const detail::Gathering& gathering, const Error& why) const {
  const std::string what = gathering.what.substr(gathering.what.find(' ') + 1);
  throw Error(why.code(), what + " on " + to_string(info()) + " failed: " + why.what())
      .with_worker(why.worker());
}

void Worker::barrier(const std::vector<std::string>& names) {
  static_cast<void>(gather<detail::Presence>(begin_gathering(
      names, "a barrier", rpc::OwnedObject::of(std::make_shared<detail::Presence>()))));
}

namespace {

rpc::ExecutionContext context_of(const Worker& worker) {
  rpc::ExecutionContext context;
  context.runtime = worker.agent();
  return context;
}

}  // namespace

WorkerScope::WorkerScope(const Worker& worker) : scope_(context_of(worker)) {}

bool stop_requested() noexcept { return rpc::stop_requested_at().has_value(); }

void wait_for_stop() { rpc::await_stop_signal(); }

const std::any& detail::user_data_of(const rpc::Agent& agent) noexcept {
  return agent.options().user_data;
}

void detail::fail_user_data(const rpc::Agent& agent, const std::type_info& wanted) {
  const std::any& given = user_data_of(agent);
  throw Error(ErrorCode::invalid_argument,
              "user_data of " + to_string(agent.self()) + " is " +
                  (given.has_value() ? base::demangle(given.type().name()) : "not set") +
                  "; wanted: " + base::demangle(wanted.name()));
}

WorkerInfo current_worker() { return rpc::current_agent()->self(); }

Worker init(Options options) {
  const rpc::SecretWiper wiper(options.secret);
  if (rpc::LiveRuntimes::of_this_process().forked_from_workers())
    rpc::refuse_forked_child("a worker cannot be started");
  try {
    base::set_up_process();
    rpc::FunctionRegistry::instance().check();
    options = resolve_options(std::move(options));
    const WorldSize& size = options.world_size;
    base::expect_descriptors_for(size.max() == WorldSize::kNoLimit ? size.min() : size.max());
    if (options.stop_on_signals) rpc::take_stop_signals();
    return Worker(rpc::join_world(std::move(options)));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    // A thread that the system does not give, or what a store of the program throws.
    throw Error(ErrorCode::overloaded, std::string("a worker cannot be started: ") + error.what());
  }
}

}  // namespace stitch
