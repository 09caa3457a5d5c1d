#include "stitch/rpc/worker.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/forked.h"
#include "stitch/rpc/options/security_options.h"
#include "stitch/rpc/world/rendezvous.h"
#include "stitch/rpc/world/slow_blas.h"

namespace stitch {

namespace {

// The workers of this process, so that a program with one need not say which.
// No last reference to an agent is let go of under the lock: ending one calls back into here.
class LiveAgents {
 public:
  // Whether some thread may be in here, or in the parts that workers share, at any time.
  [[nodiscard]] bool in_use() const noexcept { return count_.load() > 0; }
  [[nodiscard]] std::vector<std::shared_ptr<Agent>> all() {
    std::vector<std::shared_ptr<Agent>> agents;
    MutexLock lock(mutex_);
    for (const Entry& entry : agents_) {
      if (auto agent = entry.owner.lock()) agents.push_back(std::move(agent));
    }
    return agents;
  }
  void add(const std::shared_ptr<Agent>& agent) {
    MutexLock lock(mutex_);
    agents_.push_back({agent.get(), agent});
    count_.store(agents_.size());
  }
  void remove(const Agent* agent) {
    MutexLock lock(mutex_);
    std::erase_if(
        agents_, [&](const Entry& entry) { return entry.agent == agent || entry.owner.expired(); });
    count_.store(agents_.size());
    last_gone_ = true;
  }
  // Null when there is none or more than one.
  [[nodiscard]] std::shared_ptr<Agent> sole() {
    MutexLock lock(mutex_);
    return agents_.size() == 1 ? agents_.front().owner.lock() : nullptr;
  }
  // Null when there is none.
  [[nodiscard]] std::shared_ptr<Agent> any() {
    MutexLock lock(mutex_);
    for (const Entry& entry : agents_) {
      if (auto agent = entry.owner.lock()) return agent;
    }
    return nullptr;
  }
  [[nodiscard]] std::shared_ptr<Agent> only() {
    std::vector<std::shared_ptr<Agent>> several;
    {
      MutexLock lock(mutex_);
      std::erase_if(agents_, [](const Entry& entry) { return entry.owner.expired(); });
      if (agents_.size() == 1) {
        if (auto agent = agents_.front().owner.lock()) return agent;
      }
      for (const Entry& entry : agents_) {
        if (auto agent = entry.owner.lock()) several.push_back(std::move(agent));
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
    for (const auto& agent : several) sorted.insert(agent->self().name);
    std::string names;
    for (const auto& name : sorted) names += (names.empty() ? "" : ", ") + name;
    throw Error(ErrorCode::invalid_argument,
                "there is no current worker on this thread, and this process has several (" +
                    names + "): make one current with stitch::WorkerScope");
  }

 private:
  struct Entry {
    const Agent* agent;  // a name only
    std::weak_ptr<Agent> owner;
  };
  Mutex mutex_;
  std::vector<Entry> agents_ STITCH_GUARDED_BY(mutex_);
  bool last_gone_ STITCH_GUARDED_BY(mutex_) = false;
  std::atomic<std::size_t> count_{0};  // of agents_
};

// A forked child has a list of its own: a thread of the parent may hold the lock of the other one.
struct AgentsOfProcess {
  const std::uint32_t fork = transport::fork_count();
  const bool forked_from_workers = false;
  LiveAgents agents{};
};

AgentsOfProcess& of_this_process() {
  // Never destroyed: workers may outlive other static objects.
  static std::atomic<AgentsOfProcess*> current{new AgentsOfProcess};
  AgentsOfProcess* known = current.load();
  while (known->fork != transport::fork_count()) {
    auto* const fresh = new AgentsOfProcess{.forked_from_workers = known->forked_from_workers ||
                                                                   known->agents.in_use()};
    if (current.compare_exchange_strong(known, fresh)) return *fresh;
    delete fresh;
  }
  return *known;
}

LiveAgents& live_agents() { return of_this_process().agents; }

// The error of a shutdown of `agent` on this thread; nothing where it may be called.
std::optional<Error> why_not_here(const std::shared_ptr<Agent>& agent, bool graceful) {
  auto refusal = agent->why_not_here();
  if (refusal || !graceful || agent->stopped()) return refusal;
  for (const auto& other : live_agents().all()) {
    if (other == agent || other->world() != agent->world() || !other->serves_here()) continue;
    return Error(ErrorCode::invalid_argument,
                 "shutdown of " + to_string(agent->self()) + " was called from a handler of " +
                     to_string(other->self()) +
                     ", which has to leave, too: it would wait for itself");
  }
  return std::nullopt;
}

void leave(Agent& agent, ShutdownOptions options) {
  const auto error =
      agent.shutdown(options.graceful, options.timeout.value_or(agent.options().shutdown_timeout));
  if (agent.stopped()) live_agents().remove(&agent);
  if (error) throw *error;
}

void leave_or_say_why(Agent& agent) noexcept {
  try {
    leave(agent, {});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stitch: %s\n", error.what());
  }
}

}  // namespace

std::shared_ptr<Agent> detail::sole_agent() { return live_agents().sole(); }
std::shared_ptr<Agent> detail::any_agent() { return live_agents().any(); }

namespace {
[[noreturn]] void refuse_forked_child(const char* what) {
  throw Error(ErrorCode::invalid_argument,
              std::string(what) +
                  " in a process that was forked from one with a worker: fork before that starts, "
                  "or exec");
}
}  // namespace

bool detail::help_current_worker(const std::atomic<bool>& done, Clock::time_point deadline) {
  auto agent = Ambient::current().agent;
  if (!agent) agent = sole_agent();
  if (!agent && of_this_process().forked_from_workers)
    refuse_forked_child("a future cannot be waited for");
  return agent ? agent->help(done, deadline) : done.load(std::memory_order_acquire);
}

std::shared_ptr<Agent> current_agent() {
  if (const auto& agent = Ambient::current().agent) return agent;
  return live_agents().only();
}

Worker::Worker(std::shared_ptr<Agent> agent) : agent_(std::move(agent)) {
  live_agents().add(agent_);
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
    // The parent's. Its threads are not here to end it, and its locks may be held for ever.
    static_cast<void>(new std::shared_ptr<Agent>(std::move(agent_)));
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

void Worker::shutdown(ShutdownOptions options) {
  const auto agent = agent_;  // a second caller may outlast the Worker
  if (auto refusal = why_not_here(agent, options.graceful)) throw std::move(*refusal);
  leave(*agent, options);
}

std::vector<std::string> Worker::all_names() const {
  std::vector<std::string> names;
  for (const auto& info : workers()) names.push_back(info.name);
  return names;
}

Worker::Gathering Worker::begin_gathering(std::vector<std::string> names, Value value) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  if (!std::binary_search(names.begin(), names.end(), name())) {
    throw Error(ErrorCode::invalid_argument,
                "worker \"" + name() + "\" cannot wait in a barrier that does not name it");
  }
  Gathering gathering;
  for (const auto& each : names) {
    const WorkerInfo& info = worker(each);
    if (info.id != id()) gathering.others.push_back(info);
  }
  agent_->throw_if_stopped();
  gathering.key = agent_->board().next_key(names);
  agent_->board().post(gathering.key, std::move(value), gathering.others.size());
  return gathering;
}

void Worker::fail_gathering(const std::string& what,
                            const std::vector<std::pair<WorkerInfo, Error>>& failures) const {
  const std::string here = what + " on " + to_string(info()) + " failed: ";
  for (const auto& [info, error] : failures) {  // whoever is in another one did answer
    if (error.code() == ErrorCode::invalid_argument)
      throw Error(error.code(), here + error.what()).with_worker(error.worker());
  }
  const Error& first = failures.front().second;
  std::string names;
  for (const auto& [info, error] : failures) names += (names.empty() ? "" : ", ") + to_string(info);
  throw Error(first.code(), here + "no answer from " + names + ": " + first.what())
      .with_worker(first.worker());
}

void Worker::barrier(const std::vector<std::string>& names) {
  static_cast<void>(gather<detail::Presence>(
      begin_gathering(names, Value::of(std::make_shared<detail::Presence>())), "barrier"));
}

Worker init(Options options) {
  const SecretWiper wiper(options.secret);
  if (of_this_process().forked_from_workers) refuse_forked_child("a worker cannot be started");
  try {
    warn_about_slow_blas();
    FunctionRegistry::instance().check();
    return Worker(join_world(resolve_options(std::move(options))));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    // A thread or memory that the system does not give.
    throw Error(ErrorCode::overloaded, std::string("a worker cannot be started: ") + error.what());
  }
}

}  // namespace stitch
