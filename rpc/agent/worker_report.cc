#include "stitch/rpc/agent/worker_report.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/thread_state.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/gather_exchange.h"
#include "stitch/rpc/agent/graceful_shutdown.h"
#include "stitch/rpc/calls/incoming_call.h"
#include "stitch/rpc/future/live_runtimes.h"
#include "stitch/rpc/future/thread_waits.h"
#include "stitch/rpc/membership/notice.h"

namespace stitch::rpc {

namespace {

using Calls = std::vector<std::shared_ptr<IncomingCall>>;

// The served calls by the stop flag of their execution context, which what runs under it shares.
std::unordered_map<const void*, const IncomingCall*> by_context(const Calls& calls) {
  std::unordered_map<const void*, const IncomingCall*> found;
  for (const auto& call : calls) found.emplace(call->context_key(), call.get());
  return found;
}

// The three cells that name the served call behind a context: caller, its id there, function.
void add_served(std::vector<Cell>& row,
                const std::unordered_map<const void*, const IncomingCall*>& served,
                const void* under) {
  const auto found = under == nullptr ? served.end() : served.find(under);
  if (found == served.end()) {
    row.resize(row.size() + 3);
    return;
  }
  row.emplace_back(found->second->caller().name);
  row.emplace_back(found->second->id());
  row.emplace_back(found->second->function_name());
}

const char* text_of(LifeState state) {
  switch (state) {
    case LifeState::alive:
      return "alive";
    case LifeState::left:
      return "left";
    case LifeState::dead:
      break;
  }
  return "dead";
}

// The last life of each worker: whether it is over by the word of the world, if this worker knows,
// and what its own connection to it says.
Table members(Agent& agent) {
  Table table{"members", {"name", "id", "epoch", "life", "state"}};
  std::map<WorkerId, std::pair<std::uint64_t, LifeState>> known;
  for (const KnownLife& life : agent.known_lives())
    known.insert_or_assign(life.card.info.id, std::pair(life.card.info.epoch, life.state));
  for (const WorkerInfo& info : agent.peers().infos()) {
    const bool self = info.id == agent.self().id && info.epoch == agent.self().epoch;
    const auto found = known.find(info.id);
    const bool is_known = found != known.end() && found->second.first == info.epoch;
    table.add({info.name, info.id.value(), info.epoch,
               is_known ? Cell(text_of(found->second.second)) : Cell(),
               self ? std::string("this worker") : agent.peers().condition(info)});
  }
  return table;
}

// The threads of this process that wait inside a future on behalf of this worker. Those that run
// under no worker belong to the process's only one.
Table threads(Agent& agent, const Calls& calls, Clock::time_point now) {
  Table table{
      "threads that wait",
      {"thread", "name", "depth", "call", "for", "under caller", "under call", "under function"}};
  const auto served = by_context(calls);
  const auto* const self = static_cast<const Runtime*>(&agent);
  const bool only = LiveRuntimes::of_this_process().sole().get() == self;
  for (const ThreadWait& wait : thread_waits()) {
    if (wait.worker != self && !(wait.worker == nullptr && only)) continue;
    std::vector<Cell> row{wait.thread, base::thread_name(wait.thread), wait.depth, wait.call,
                          now - wait.since};
    add_served(row, served, wait.under);
    table.add(std::move(row));
  }
  return table;
}

Table pool(Agent& agent) {
  Table table{"pool", {"threads", "limit", "queued"}};
  table.add({agent.pool().threads(), agent.options().num_threads, agent.pool().queued()});
  return table;
}

const char* state_of(Agent& agent, const OutstandingCall& call) {
  if (call.queued && !call.sent)
    return agent.peers().connected(*call.to) ? "waits to be sent" : "waits for a connection";
  return "waits for an answer";
}

Table calls_made(Agent& agent, const Calls& calls, Clock::time_point now) {
  Table table{"calls made",
              {"call", "function", "to", "to id", "to epoch", "age", "deadline in", "state",
               "under caller", "under call", "under function"}};
  auto made = agent.outgoing_calls().list();
  std::sort(made.begin(), made.end(),
            [](const OutstandingCall& a, const OutstandingCall& b) { return a.id < b.id; });
  const auto served = by_context(calls);
  for (const OutstandingCall& call : made) {
    std::vector<Cell> row{
        call.id,
        call.function,
        call.to->name,
        call.to->id.value(),
        call.to->epoch,
        now - call.made,
        call.deadline == Clock::time_point::max() ? Cell() : Cell(call.deadline - now),
        state_of(agent, call)};
    add_served(row, served, call.under);
    table.add(std::move(row));
  }
  return table;
}

// A function that waits on its thread is there: the table of threads says for what.
const char* stage_text(const IncomingCall::Progress& progress) {
  if (progress.stage == IncomingCall::Stage::answered) return "answered";
  if (progress.thread != 0) return "running";
  return progress.stage == IncomingCall::Stage::queued ? "queued" : "awaiting";
}

Table calls_served(const Calls& calls, Clock::time_point now) {
  Table table{"calls served",
              {"caller", "caller id", "caller epoch", "call", "function", "age", "stage",
               "running for", "thread", "thread state", "object", "stop requested"}};
  for (const auto& call : calls) {
    const auto progress = call->progress();
    table.add({call->caller().name, call->caller().id.value(), call->caller().epoch, call->id(),
               call->function_name(), now - call->arrived(), stage_text(progress),
               progress.begun ? Cell(now - progress.since) : Cell(), progress.thread,
               progress.thread == 0 ? std::string() : base::thread_state(progress.thread),
               call->awaited_object(), call->stop_requested() ? 1 : 0});
  }
  return table;
}

Table gatherings(Agent& agent, Clock::time_point now) {
  Table table{"gatherings", {"number", "participants", "waits for", "waited for by", "age"}};
  for (const auto& each : agent.gather_exchange().list())
    table.add({each.key.number, each.participants, each.awaited, each.readers, now - each.since});
  return table;
}

Table events(Agent& agent, Clock::time_point now) {
  Table table{"events", {"age", "event", "worker", "epoch", "id", "function"}};
  std::map<std::uint32_t, std::string> names;
  for (const WorkerInfo& info : agent.peers().infos()) names[info.id.value()] = info.name;
  for (const base::Event& event : agent.events().list()) {
    Cell peer;
    if (event.peer) {
      const auto found = names.find(*event.peer);
      peer = found == names.end() ? Cell(std::to_string(*event.peer)) : Cell(found->second);
    }
    table.rows.push_back({now - event.when, event.what, std::move(peer),
                          event.peer ? Cell(event.epoch) : Cell(),
                          event.id != 0 ? Cell(event.id) : Cell(), event.name});
  }
  return table;
}

// The oldest first: that is what a table keeps when it is full.
Calls oldest_first(Calls calls) {
  std::sort(calls.begin(), calls.end(),
            [](const auto& a, const auto& b) { return a->arrived() < b->arrived(); });
  return calls;
}

}  // namespace

Table shutdown_table(Agent& agent, const std::optional<ShutdownProtocol::AwaitedWorkers>& waiting) {
  Table table{"shutdown", {"waits for", "worker", "age"}};
  if (!waiting) return table;
  const auto now = Clock::now();
  for (const WorkerId id : waiting->missing)
    table.add({waiting->what, agent.peers().find(id).name, now - waiting->since});
  return table;
}

void report(Agent& agent, Page page, Report& report) {
  const Clock::time_point now = Clock::now();
  switch (page) {
    case Page::status: {
      const Calls calls = agent.served_calls().list();
      report.push_back(members(agent));
      report.push_back(threads(agent, calls, now));
      report.push_back(pool(agent));
      report.push_back(shutdown_table(agent, agent.graceful_shutdown().waiting()));
      break;
    }
    case Page::calls: {
      const Calls calls = oldest_first(agent.served_calls().list());
      report.push_back(calls_made(agent, calls, now));
      report.push_back(calls_served(calls, now));
      break;
    }
    case Page::groups:
      report.push_back(gatherings(agent, now));
      break;
    case Page::events:
      report.push_back(events(agent, now));
      break;
    case Page::rrefs:
    case Page::contexts:
      break;
  }
  agent.for_each_extension([&](Extension& extension) { extension.report(page, report); });
}

}  // namespace stitch::rpc
