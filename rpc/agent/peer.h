#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/agent/members.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

// One connection between this worker and another, from the attempt to open it to its end. Shared
// with the connection's event handlers. Except for `bound`, what changes is guarded by the mutex of
// the PeerTable.
struct PeerConnection {
  Life* target = nullptr;   // whom this worker connects to; null: a peer connected here
  std::size_t address = 0;  // index of the target's address
  std::atomic<bool> bound{false};
  std::shared_ptr<transport::Connection> connection{};  // until it ends
  Life* peer = nullptr;                                 // who is at the other end, once open
  bool ended = false;
};
using PeerConnectionPtr = std::shared_ptr<PeerConnection>;

// The connections between this worker and one other worker: which one is bound, which attempts are
// under way, what waits to be sent, when to retry, and whether the peer is lost. Both workers may
// connect at the same time; one connection gets bound, and nothing but BIND travels over any other,
// so that the others can be closed without loss:
//
//   open --the accepting side sends BIND--> offered --the other side sends BIND, too--> bound
//
// The worker with the lower id decides: while it tries to connect by itself, it leaves the peer's
// connection unanswered, and falls back to it if its own attempt fails. The other worker answers
// every BIND. A further connection from a peer with a bound one is closed.
//
// Until a connection is bound, nothing is lost yet: the peer's addresses are tried in turn,
// repeated for a second after the first failure, or for five while the peer answers, except those
// where the peer has refused this worker or another worker answers. Only the end of the bound
// connection, or of all attempts, makes the peer lost; within an epoch there is no second life.
//
// Pure state, under the lock of its PeerTable: calls nothing, returns effects. Not thread-safe.
class Peer {
 public:
  using Clock = std::chrono::steady_clock;
  using ConnectionPtr = std::shared_ptr<transport::Connection>;
  // A message that waits for a bound connection.
  struct WaitingMessage {
    transport::Message message;
    transport::SendDone done;
    std::uint64_t call_id = 0;
  };
  // What is to be done once the lock has been released.
  struct Effects {
    std::vector<std::pair<ConnectionPtr, Error>> close;
    PeerConnectionPtr connect;
    ConnectionPtr send_bind;
    std::optional<std::pair<Life*, Clock::time_point>> retry;
    std::optional<std::pair<Life*, Error>> lost;  // to be reported to the owner of the table
    std::vector<WaitingMessage> failed;
    std::optional<Error> failure;  // of `failed`
  };

  // `reachable`, by address: whether this worker has a transport for it.
  Peer(Life& life, WorkerId self, std::vector<bool> reachable);

  // ---- events of its connections
  void on_open(const PeerConnectionPtr& opened, Effects& effects);
  // BIND has arrived. True if the connection is bound now: the caller answers, sends what waits.
  [[nodiscard]] bool on_bind(const PeerConnectionPtr& connection, Effects& effects);
  void on_closed(const PeerConnectionPtr& closed, const Error& reason, Effects& effects);
  void on_retry_timer(Effects& effects);
  // Whether a connection that connect() has returned is still wanted.
  [[nodiscard]] bool wants(const PeerConnectionPtr& connection) const noexcept {
    return own_ == connection || bound_ == connection;
  }

  // ---- sending
  // The bound connection, once all that waited has been sent over it.
  [[nodiscard]] const ConnectionPtr& usable() const noexcept { return usable_; }
  // Keeps a message until a connection is bound, and begins to connect. When it throws, the message
  // is still the caller's: what hangs on it may call back, and must not be destroyed under a lock.
  void wait(WaitingMessage&& message, Effects& effects);
  // The waiting messages for a connection that has been bound. Empty when none is left, which makes
  // it usable, or when it is not bound any more.
  [[nodiscard]] std::vector<WaitingMessage> take_waiting(const PeerConnectionPtr& connection);
  // Begins to connect unless there is a connection or an attempt.
  void connect(Effects& effects);

  // ---- ending
  // Ends all connections and attempts: the peer is lost.
  void lose(const Error& reason, Effects& effects);
  // Failures are expected from now on: no retries, and on_lost is not reported.
  void expect_closing() noexcept { closing_ = true; }
  // Drops everything; the connections have been closed.
  void close(const Error& reason, Effects& effects);

  // ---- state
  [[nodiscard]] const PeerConnectionPtr& bound() const noexcept { return bound_; }
  [[nodiscard]] const std::optional<Error>& lost() const noexcept { return lost_; }
  // Why the last attempt failed.
  [[nodiscard]] const std::optional<Error>& failure() const noexcept { return failure_; }
  [[nodiscard]] std::uint64_t failed_attempts() const noexcept { return failed_attempts_; }

 private:
  struct Address {
    std::string text;
    bool reachable;
    std::string refusal{};  // why it is not tried again
    [[nodiscard]] bool worth_trying() const noexcept { return reachable && refusal.empty(); }
  };
  [[nodiscard]] const WorkerInfo& info() const noexcept { return life_.info(); }
  void offer(const PeerConnectionPtr& connection, Effects& effects);
  static void drop(PeerConnectionPtr& connection, const std::string& why, Effects& effects);
  // Begins an attempt at the first address from `first` on that is worth trying; after the last one
  // schedules a retry or gives up.
  void try_next(std::size_t first, Effects& effects);
  void on_attempt_failed(const PeerConnection& attempt, const Error& reason, Effects& effects);
  void retry_or_lose(Effects& effects);

  Life& life_;
  WorkerId self_;
  std::vector<Address> addresses_;
  ConnectionPtr usable_;
  PeerConnectionPtr bound_;
  PeerConnectionPtr own_;      // this worker's attempt
  PeerConnectionPtr offered_;  // the peer's: this worker has sent BIND
  PeerConnectionPtr spare_;    // the peer's, unanswered during this worker's attempt
  std::vector<WaitingMessage> waiting_;
  bool retry_scheduled_ = false;
  std::optional<Error> failure_;
  bool answered_ = false;              // the peer, in the last attempt
  Clock::time_point first_failure_{};  // since a connection was last open
  std::chrono::milliseconds retry_delay_{0};
  std::optional<Error> lost_;
  bool closing_ = false;
  std::uint64_t failed_attempts_ = 0;
};

}  // namespace stitch::rpc
