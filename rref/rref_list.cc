#include "stitch/rref/rref.h"

#include <algorithm>

#include "stitch/base/error.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/calls.h"
#include "stitch/rpc/message/sendable.h"
#include "stitch/rpc/worker.h"
#include "stitch/rref/agent/object_access.h"
#include "stitch/rref/agent/object_server.h"
#include "stitch/rref/agent/rref_agent.h"

namespace stitch {
namespace {

RRefState state_of(const rref::ListedRef& ref) {
  using Value = rref::OwnerTable::Value;
  using State = rref::HolderTable::State;
  if (ref.owned) {
    switch (ref.owned->value) {
      case Value::pending:
        return RRefState::pending;
      case Value::ready:
        return RRefState::ready;
      case Value::failed:
        return RRefState::failed;
    }
  }
  switch (ref.held->state) {
    case State::creating:
      return RRefState::creating;
    case State::borrowed:
      return RRefState::borrowed;
    case State::registering:
      return RRefState::registering;
    case State::registered:
      return RRefState::registered;
    case State::lost:
      break;
  }
  return RRefState::lost;
}

std::vector<RRefInfo> list(rpc::Agent& agent) {
  agent.throw_if_stopped();
  const auto rrefs = rref::rrefs_of(agent);
  const auto now = std::chrono::steady_clock::now();
  std::vector<RRefInfo> infos;
  for (const rref::ListedRef& ref : rrefs->lifetime().list()) {
    RRefInfo info;
    info.id = rref::to_string(ref.id);
    info.owner = rrefs->info_of(ref.id.owner);
    info.creator = rrefs->info_of(ref.id.creator);
    info.state = state_of(ref);
    const auto fill = [&](const auto& status) {
      if (status.made_by != nullptr) info.made_by = *status.made_by;
      info.age = now - status.since;
      info.local = status.local;
      info.in_messages = status.pins;
    };
    if (ref.held) {
      fill(*ref.held);
    } else {
      fill(*ref.owned);
      for (const rref::WorkerLife& holder : ref.owned->holders)
        info.holders.push_back(rrefs->info_of(holder));
      if (ref.owned->object != nullptr) {
        const auto& box = static_cast<const rref::OwnedBox&>(
            *static_cast<const rpc::OwnedObject*>(ref.owned->object.get()));
        info.type = base::demangle(box.type->name());
        if (box.bytes > 0) info.bytes = box.bytes;
      }
    }
    infos.push_back(std::move(info));
  }
  std::sort(infos.begin(), infos.end(), [](const RRefInfo& a, const RRefInfo& b) {
    return a.age != b.age ? a.age > b.age : a.id < b.id;
  });
  return infos;
}

}  // namespace

std::string_view to_string(RRefState state) noexcept {
  switch (state) {
    case RRefState::pending:
      return "pending";
    case RRefState::ready:
      return "ready";
    case RRefState::failed:
      return "failed";
    case RRefState::creating:
      return "creating";
    case RRefState::borrowed:
      return "borrowed";
    case RRefState::registering:
      return "registering";
    case RRefState::registered:
      return "registered";
    case RRefState::lost:
      return "lost";
  }
  return "unknown";
}

std::ostream& operator<<(std::ostream& out, const RRefInfo& info) {
  out << info.id << " " << to_string(info.state) << " at " << info.owner;
  if (!info.made_by.empty()) out << ", made by " << info.made_by;
  if (!info.type.empty()) out << ", " << info.type;
  if (info.bytes) out << ", " << *info.bytes << " bytes";
  out << ", " << std::chrono::duration_cast<std::chrono::milliseconds>(info.age).count()
      << " ms old, " << info.local << " here, " << info.in_messages << " in messages";
  if (!info.holders.empty()) {
    out << ", held by";
    for (const WorkerInfo& holder : info.holders) out << " " << holder;
  }
  return out;
}

std::vector<RRefInfo> rrefs(const Worker& worker) { return list(*worker.agent()); }

std::vector<RRefInfo> rrefs() { return list(*rpc::current_agent()); }

}  // namespace stitch
