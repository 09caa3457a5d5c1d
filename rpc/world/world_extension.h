#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/calls/extension.h"
#include "stitch/rpc/membership/watcher.h"
#include "stitch/rpc/world/world_keeper.h"

namespace stitch::rpc {

// Tells those concerned that members of the world have come or gone: the callbacks of the user and
// the keeper of the world's record. Part of every Agent. Thread contract: any thread.
class WorldExtension final : public Extension {
 public:
  explicit WorldExtension(Agent& agent) : agent_(agent) {}
  [[nodiscard]] static WorldExtension& of(Agent& agent);

  // To be called once, when the agent has started and its keeper shall begin.
  void keep(const std::shared_ptr<WorldKeeper>& keeper) STITCH_EXCLUDES(mutex_);
  // This worker leaves, and has until then for it. True for the first caller; the others change
  // nothing.
  bool leave_by(std::chrono::steady_clock::time_point deadline) STITCH_EXCLUDES(mutex_);
  // As WorldKeeper::end_world(), within that time.
  void end_world() STITCH_EXCLUDES(mutex_);
  [[nodiscard]] Watchers& watchers() noexcept { return watchers_; }

  void on_member_joined(const WorkerInfo& joined) override STITCH_EXCLUDES(mutex_);
  void on_member_left(const WorkerInfo& left) override STITCH_EXCLUDES(mutex_);
  void on_member_dead(const WorkerInfo& dead, const Error& reason) override STITCH_EXCLUDES(mutex_);
  // That it had joined was never said, either.
  void on_past_member(const WorkerInfo&, const Error&) override {}
  // The world ends with that.
  void on_all_leave(std::chrono::steady_clock::time_point deadline) override
      STITCH_EXCLUDES(mutex_);
  void stop() override STITCH_EXCLUDES(mutex_);

 private:
  [[nodiscard]] std::chrono::steady_clock::time_point leaves_by() const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::shared_ptr<WorldKeeper> keeper() const STITCH_EXCLUDES(mutex_);
  void notify(Watchers::Kind kind, const WorkerInfo& info, LeaveReason reason)
      STITCH_EXCLUDES(mutex_);

  Agent& agent_;
  Watchers watchers_;
  mutable base::Mutex mutex_;
  std::optional<std::chrono::steady_clock::time_point> leave_by_ STITCH_GUARDED_BY(mutex_);
  std::weak_ptr<WorldKeeper> keeper_ STITCH_GUARDED_BY(mutex_);  // the agent's end ends it
};

}  // namespace stitch::rpc
