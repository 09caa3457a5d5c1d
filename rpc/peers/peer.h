#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/rpc/peers/bind_frame.h"
#include "stitch/rpc/peers/members.h"
#include "stitch/rpc/peers/session.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

// One connection between this worker and another, from the attempt to open it to its end. Shared
// with the connection's event handlers. Except for `bound`, what changes is guarded by the mutex of
// the PeerTable.
struct PeerConnection {
  PeerLife* target = nullptr;  // whom this worker connects to; null: a peer connected here
  std::size_t address = 0;     // index of the target's address
  std::atomic<bool> bound{false};
  std::shared_ptr<Session> session{};                   // constant once bound
  std::shared_ptr<transport::Connection> connection{};  // until it ends
  PeerLife* peer = nullptr;                             // who is at the other end, once open
  std::uint64_t generation = 0;                         // offered or accepted
  bool accepted = false;                                // this worker's attempt: it has sent ACCEPT
  bool ended = false;
  bool in_process = false;  // over loopback; once open
};
using PeerConnectionPtr = std::shared_ptr<PeerConnection>;

// The connections between this worker and one life of another: the bound connection, the attempts
// under way, the time of the next attempt, and the loss of the peer. Messages belong to the
// Session, which outlives connections. The rules are in rpc/PROTOCOL.md, section 6 (BIND):
//
//   open --the accepting side: OFFER--> offered --the other: ACCEPT--> accepted
//        --the accepting side, once its former connection has ended: CONFIRM--> bound
//
// An attempt that no call needs yet (try_to_connect()) is not repeated; its failure is the loss of
// the peer only where no process listens.
//
// Pure state, under the lock of its PeerTable: calls nothing but the clock, returns effects. Not
// thread-safe.
class Peer {
 public:
  using Clock = std::chrono::steady_clock;
  using ConnectionPtr = std::shared_ptr<transport::Connection>;
  // The clock of the timers in Effects.
  using Now = std::function<Clock::time_point()>;
  // Actions for after the lock, in this order.
  struct Effects {
    std::vector<std::pair<ConnectionPtr, Error>> close;
    // The session to detach, and its connection.
    std::shared_ptr<Session> detach;
    ConnectionPtr detach_from;
    // The BIND to send, and the session whose numbers it carries.
    ConnectionPtr send_bind;
    std::shared_ptr<Session> bind_session;
    Bind bind;
    bool close_after_bind = false;
    // The session to attach, and the connection over which it goes on.
    std::shared_ptr<Session> attach;
    ConnectionPtr attach_to;
    std::uint64_t generation = 0;
    Session::Received received_by_peer{};
    std::optional<Error> fail_waiting;  // for the messages that wait for the first connection
    // The reason with which the sessions end; messages sent later fail with the peer's lost().
    std::optional<Error> end;
    std::optional<Error> lost;  // to be reported to the owner of the table
    std::vector<Clock::time_point> timers;
    // An address that has failed and is better than the one in use, with the error.
    std::optional<std::pair<std::string, Error>> passed_over;
    PeerConnectionPtr connect;
  };

  // `reachable`, by address: whether this worker has a transport for it. `token` names a session
  // that begins here; it is random and not 0. `now` outlives this.
  Peer(PeerLife& life, WorkerId self, std::vector<bool> reachable, Clock::duration grace,
       std::uint64_t token, const Now& now);

  // ---- events of its connections
  void on_open(const PeerConnectionPtr& opened, Effects& effects);
  // BIND has arrived over a connection, bound or not.
  void on_bind(const PeerConnectionPtr& connection, const Bind& bind, Effects& effects);
  // `no_process_listens`: the attempt has shown that no process listens at the address.
  void on_closed(const PeerConnectionPtr& closed, const Error& reason, bool no_process_listens,
                 Effects& effects);
  void on_timer(Effects& effects);
  // Whether a connection that connect() has returned is still wanted.
  [[nodiscard]] bool wants(const PeerConnectionPtr& connection) const noexcept {
    return own_ == connection || bound_ == connection;
  }
  // Begins to connect unless there is a connection or an attempt.
  void connect(Effects& effects);
  // Tries once to open the first connection, which no call needs: a failure does not lose the peer.
  // connect() turns this attempt into one like any other.
  void try_to_connect(Effects& effects);

  // ---- ending
  // The peer is lost as soon as its bound connection has ended.
  void give_up(const Error& reason, Effects& effects);
  // Ends all connections and attempts: the peer is lost.
  void lose(const Error& reason, Effects& effects);
  // As lose(), and tells the peer, which then does not try to replace the connection.
  void part(const Error& reason, Effects& effects);
  // Failures are expected from now on: no retries, and on_lost is not reported.
  void expect_closing() noexcept { closing_ = true; }
  // Drops all connections, which have been closed.
  void close(const Error& reason, Effects& effects);

  // ---- state
  [[nodiscard]] const PeerConnectionPtr& bound() const noexcept { return bound_; }
  [[nodiscard]] const std::optional<Error>& lost() const noexcept { return lost_; }
  // Why the last attempt failed.
  [[nodiscard]] const std::optional<Error>& failure() const noexcept { return failure_; }
  // The end of a connection that is being replaced: its reason and its time.
  struct Broken {
    Error reason;
    Clock::time_point since;
  };
  [[nodiscard]] const std::optional<Broken>& broken() const noexcept { return broken_; }
  [[nodiscard]] std::uint64_t failed_attempts() const noexcept { return failed_attempts_; }
  // Calls each(address, failed attempts) for the first kMaxAddressesTold addresses with failures,
  // in the order of the attempts.
  static constexpr std::size_t kMaxAddressesTold = 16;
  template <class Each>
  void for_each_failed_address(Each&& each) const {
    std::size_t told = 0;
    for (const Address& address : addresses_) {
      if (address.failures != 0 && told++ < kMaxAddressesTold) each(address.text, address.failures);
    }
  }

 private:
  struct Address {
    std::string text;
    bool reachable;
    bool abandoned = false;          // no process listened there, in this round of attempts
    std::optional<Error> failure{};  // the last one
    std::uint64_t failures = 0;      // attempts that failed, in all
  };
  [[nodiscard]] const WorkerInfo& info() const noexcept { return life_.info(); }
  [[nodiscard]] bool is_self() const noexcept { return info().id == self_; }
  // The limit of one step of an attempt to replace a broken connection.
  [[nodiscard]] Clock::duration attempt_time() const noexcept;
  // The deadlines of this worker's attempt and of its offer.
  [[nodiscard]] Clock::time_point own_until() const noexcept;
  [[nodiscard]] Clock::time_point offered_until() const noexcept;
  void offer_spare(Effects& effects);
  void send(const PeerConnectionPtr& to, Bind::Step step, Effects& effects);
  void offer(const PeerConnectionPtr& connection, Effects& effects);
  void on_offer(const PeerConnectionPtr& connection, const Bind& bind, Effects& effects);
  void on_accept(const PeerConnectionPtr& connection, const Bind& bind, Effects& effects);
  void on_confirm(const PeerConnectionPtr& connection, const Bind& bind, Effects& effects);
  void use(const PeerConnectionPtr& connection, const Session::Received& received,
           Effects& effects);
  static void attach(const PeerConnection& connection, std::uint64_t generation,
                     const Session::Received& received, Effects& effects);
  static void drop(PeerConnectionPtr& connection, const std::string& why, Effects& effects);
  static void drop(PeerConnectionPtr& connection, const Error& why, Effects& effects);
  // The bound connection has ended.
  void on_broken(const Error& reason, Effects& effects);
  // Begins an attempt at the first usable address from `first` on; behind the last address,
  // schedules a retry or gives up.
  void try_next(std::size_t first, Effects& effects);
  void on_attempt_failed(const PeerConnection& attempt, const Error& reason,
                         bool no_process_listens, Effects& effects);
  void retry_or_lose(Effects& effects);
  void retry_later(Clock::duration delay, Effects& effects);
  [[nodiscard]] bool is_trying() const noexcept {
    return bound_ || own_ || offered_ || successor_ || retry_scheduled_;
  }
  // Forgets the failures of earlier attempts.
  void begin_anew();
  // Loses a peer whose connection could not be replaced.
  void lose_broken(const std::string& why, Effects& effects);

  PeerLife& life_;
  const WorkerId self_;
  const Clock::duration grace_;
  std::uint64_t token_;
  const Now& now_;
  bool has_session_ = false;  // token_ is known to both sides
  std::uint64_t generation_ = 0;
  std::vector<Address> addresses_;
  PeerConnectionPtr bound_;
  PeerConnectionPtr own_;        // this worker's attempt
  PeerConnectionPtr offered_;    // the peer's: this worker has sent OFFER
  PeerConnectionPtr spare_;      // the peer's, unanswered during this worker's attempt or offer
  PeerConnectionPtr successor_;  // accepted by the peer; the former connection has not ended yet
  Session::Received successor_received_{};
  Clock::time_point offered_since_{};
  std::optional<Broken> broken_;
  std::optional<Error> given_up_;
  int fruitless_ = 0;           // connections in a row that ended soon and brought nothing
  std::uint64_t progress_ = 0;  // of the session, when a connection was last bound
  std::uint64_t uses_ = 0;      // connections bound so far
  int breaks_ = 0;              // within a second of the first of them
  Clock::time_point first_break_{};
  Clock::time_point bound_since_{};
  bool tentative_ = false;  // the attempts since the last success, which no call needs
  bool retry_scheduled_ = false;
  Clock::time_point retry_at_{};
  std::optional<Error> failure_;
  Clock::time_point own_since_{};      // its last step
  Clock::time_point first_failure_{};  // since a connection was last open
  std::chrono::milliseconds retry_delay_{0};
  std::optional<Error> lost_;
  bool closing_ = false;
  std::uint64_t failed_attempts_ = 0;
};

}  // namespace stitch::rpc
