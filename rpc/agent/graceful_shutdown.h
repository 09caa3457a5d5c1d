#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/shutdown_protocol.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

class Agent;

// Runs the protocol of graceful shutdown for its Agent: gives it the time, the messages that come
// and what the Agent knows, and sends what it asks for.
//
// Part of its Agent. Thread contract: run() on the thread that shuts down, all others on any
// thread. Sends, and calls the extensions, without its lock.
class GracefulShutdown {
 public:
  explicit GracefulShutdown(Agent& agent);

  // Takes part until GO: at most until `wait` for the others to call shutdown, and for `limit` from
  // a stop signal on or once all have. After `limit` it says once, on stderr, the names of the
  // workers that it waits for, as the error does. Calls Extension::on_all_leave() once all have
  // agreed.
  std::optional<Error> run(std::chrono::steady_clock::time_point wait,
                           std::chrono::nanoseconds limit) STITCH_EXCLUDES(mutex_);
  // As ShutdownProtocol::deadline().
  [[nodiscard]] std::chrono::steady_clock::time_point deadline() const STITCH_EXCLUDES(mutex_);
  // Throws Error(protocol) for a message that is malformed, or not allowed now.
  void on_message(InMessage message) STITCH_EXCLUDES(mutex_);
  // A later life of `peer` has said nothing yet.
  void on_peer_lost(const WorkerInfo& peer) STITCH_EXCLUDES(mutex_);
  // A new life is about to come into the table of peers: those before it are over, of which nothing
  // is said once this worker expects to close.
  void on_peer_joining(const WorkerInfo& peer) STITCH_EXCLUDES(mutex_);
  // It is there.
  void on_peer_joined() STITCH_EXCLUDES(mutex_);
  // For what run() waits now, for reports; nothing outside of it.
  [[nodiscard]] std::optional<ShutdownProtocol::AwaitedWorkers> waiting() const
      STITCH_EXCLUDES(mutex_);
  // For what it waited when it returned an error.
  [[nodiscard]] std::optional<ShutdownProtocol::AwaitedWorkers> waited() const
      STITCH_EXCLUDES(mutex_);

 private:
  using Lives = std::map<WorkerId, WorkerInfo>;
  [[nodiscard]] Lives live() const;
  [[nodiscard]] ShutdownProtocol::Status own_status() const;
  // `lives`: those to which the sends are.
  void carry_out(const ShutdownProtocol::Effects& effects, const Lives& lives)
      STITCH_EXCLUDES(mutex_);
  void send(const WorkerInfo& to, const ShutdownProtocol::Message& said);
  void tell_that_all_leave(std::chrono::steady_clock::time_point limit) noexcept;

  Agent& agent_;
  mutable base::Mutex mutex_;
  base::CondVar changed_;
  ShutdownProtocol protocol_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t events_ STITCH_GUARDED_BY(mutex_) = 0;  // messages, losses, joins
};

}  // namespace stitch::rpc
