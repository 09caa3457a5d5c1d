#include "stitch/rpc/world/world_extension.h"

#include <algorithm>

namespace stitch::rpc {

namespace {

std::unique_ptr<Extension> make_world_extension(Agent& agent) {
  return std::make_unique<WorldExtension>(agent);
}
const int kIndex = register_extension(make_world_extension);

}  // namespace

WorldExtension& WorldExtension::of(Agent& agent) {
  return static_cast<WorldExtension&>(agent.extension(kIndex));
}

void WorldExtension::keep(const std::shared_ptr<WorldKeeper>& keeper) {
  {
    const base::MutexLock lock(mutex_);
    keeper_ = keeper;
  }
  keeper->start(agent_.shared_from_this());
}

std::shared_ptr<WorldKeeper> WorldExtension::keeper() const {
  const base::MutexLock lock(mutex_);
  return keeper_.lock();
}

bool WorldExtension::leave_by(std::chrono::steady_clock::time_point deadline) {
  const base::MutexLock lock(mutex_);
  if (leave_by_) return false;
  leave_by_ = deadline;
  return true;
}

std::chrono::steady_clock::time_point WorldExtension::leaves_by() const {
  const base::MutexLock lock(mutex_);
  return leave_by_.value_or(std::chrono::steady_clock::time_point::max());
}

void WorldExtension::end_world() {
  if (const auto kept = keeper()) kept->end_world(leaves_by());
}

void WorldExtension::notify(Watchers::Kind kind, const WorkerInfo& info, LeaveReason reason) {
  if (const auto kept = keeper()) kept->on_change();
  watchers_.notify(agent_.shared_from_this(), kind, info, reason);
}

void WorldExtension::on_member_joined(const WorkerInfo& joined) {
  notify(Watchers::Kind::joins, joined, LeaveReason::left);
}

void WorldExtension::on_member_left(const WorkerInfo& left) {
  notify(Watchers::Kind::leaves, left, LeaveReason::left);
}

void WorldExtension::on_member_dead(const WorkerInfo& dead, const Error&) {
  notify(Watchers::Kind::leaves, dead, LeaveReason::dead);
}

void WorldExtension::on_all_leave(std::chrono::steady_clock::time_point deadline) {
  if (const auto kept = keeper()) kept->end_world(deadline);
}

void WorldExtension::stop() {
  watchers_.close();
  const auto kept = keeper();
  if (!kept) return;
  // Of the second that the agent's end has beyond its limit.
  constexpr std::chrono::milliseconds kClosingShare{500};
  // The others may have left while this worker was leaving, too.
  if (agent_.live_members().size() == 1)
    kept->end_world(std::max(leaves_by(), std::chrono::steady_clock::now() + kClosingShare));
  kept->stop();
}

}  // namespace stitch::rpc
