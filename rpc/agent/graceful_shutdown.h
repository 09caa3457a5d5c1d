#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <set>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/shutdown_protocol.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

class Agent;

// Runs the protocol of graceful shutdown for its Agent: gives it the time, the messages that come
// and what the Agent knows, and sends what it asks for.
//
// Part of its Agent. Thread contract: on_message and on_peer_lost on reader threads; run() on the
// thread that shuts down. Sends without its lock.
class GracefulShutdown {
 public:
  explicit GracefulShutdown(Agent& agent);

  // Takes part until GO or the deadline. The error names the workers that were waited for.
  std::optional<Error> run(std::chrono::steady_clock::time_point deadline) STITCH_EXCLUDES(mutex_);
  // Throws Error(protocol) for a message that is malformed, or not allowed now.
  void on_message(InMessage message) STITCH_EXCLUDES(mutex_);
  // A later life of `peer` has said nothing yet.
  void on_peer_lost(const WorkerInfo& peer) STITCH_EXCLUDES(mutex_);
  // For what run() waits now, for reports; nothing outside of it.
  [[nodiscard]] std::optional<ShutdownProtocol::Waiting> waiting() const STITCH_EXCLUDES(mutex_);

 private:
  [[nodiscard]] std::set<WorkerId> live() const;
  [[nodiscard]] ShutdownProtocol::Status own_status() const;
  void carry_out(const ShutdownProtocol::Effects& effects) STITCH_EXCLUDES(mutex_);
  void send(WorkerId to, const ShutdownProtocol::Message& said);

  Agent& agent_;
  mutable base::Mutex mutex_;
  base::CondVar changed_;
  ShutdownProtocol protocol_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t events_ STITCH_GUARDED_BY(mutex_) = 0;  // messages and losses
};

}  // namespace stitch::rpc
