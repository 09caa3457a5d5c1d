#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "stitch/base/event_ring.h"
#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/membership/digests.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/rpc/peers/heartbeats.h"
#include "stitch/rpc/peers/inquiry.h"
#include "stitch/rpc/peers/members.h"
#include "stitch/rpc/peers/peer.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

// The scheme of an address, which names its transport: "tcp" of "tcp://127.0.0.1:1".
[[nodiscard]] std::string scheme_of(const std::string& address);

// The workers of the world and the connections to them. A connection is opened on first use, or
// earlier where membership watches the peer (see Peer). Part of its Agent. Thread contract: any
// thread; events run on threads of the endpoints and of the timer, no lock held. infos() and find()
// need start(); results of find() live as long as the table.
class PeerTable {
 public:
  using Clock = std::chrono::steady_clock;
  struct Events {
    std::function<void(const std::shared_ptr<transport::Connection>&, const WorkerInfo& from,
                       transport::Message)>
        on_message;  // the connection is the peer's session, which outlives connections
    // As ConnectionEvents::place; only once start() has been called.
    std::function<transport::Buffer(const WorkerInfo& from, const base::Bytes& frame,
                                    std::size_t bytes)>
        place;
    std::function<void(const WorkerInfo& peer, const Error& reason)>
        on_lost;  // at most once a life of a peer; never after expect_closing()
    // Runs a task at that time, on a timer thread, unless the owner of the table has ended.
    std::function<void(std::chrono::steady_clock::time_point, base::UniqueFunction<void()>)>
        call_at;
    // A notice of membership over a connection that is not bound. `opened_here`: this worker has
    // opened it; otherwise the peer's name is only a claim.
    std::function<void(const WorkerInfo& from, const transport::Message&, bool opened_here)>
        on_notice{};
    // The digests of a HEARTBEAT.
    std::function<void(const WorkerInfo& from, const Digests& digests)> on_heartbeat{};
    // The message for a life that is over and has connected; nothing for none.
    std::function<std::optional<transport::Message>(const WorkerInfo&)> obituary{};
    // As Session::Events::deadline, of a call that this worker has made.
    std::function<std::optional<Clock::time_point>(std::uint64_t call_id)> deadline;
    // The clock of call_at.
    Peer::Now now = &Clock::now;
    // Prints a line for the person who runs this worker. Null: on stderr.
    std::function<void(const std::string& line)> say{};
  };
  using EndpointPtr = std::shared_ptr<transport::Endpoint>;
  // The ring that records the events of connections. Before start().
  void record_events(std::shared_ptr<base::EventRing> ring) { ring_ = std::move(ring); }
  // The limits that this worker sets. Before start().
  void set_limits(const PeerLimits& limits) { limits_ = limits; }

  // `reconnect_timeout`: the time for replacing a broken connection, or for opening the first one,
  // before the peer is lost.
  explicit PeerTable(std::chrono::nanoseconds reconnect_timeout = std::chrono::seconds(10))
      : reconnect_timeout_(reconnect_timeout) {}
  ~PeerTable();
  // Adds an endpoint and listens on it. Returns the addresses to advertise; later connections to
  // addresses of the same schemes go through it. Before start().
  std::vector<std::string> listen(EndpointPtr endpoint);
  // Makes the members known and answers those that have connected already. `self` is this worker,
  // which connects to itself over loopback only.
  void start(const std::vector<Member>& members, WorkerId self, Events events)
      STITCH_EXCLUDES(mutex_);

  // As Members.
  [[nodiscard]] std::size_t size() const noexcept { return members_.size(); }
  [[nodiscard]] std::vector<WorkerInfo> infos() const { return members_.infos(); }
  [[nodiscard]] PeerLife* life(WorkerId id) const noexcept { return members_.life(id); }
  [[nodiscard]] PeerLife* life(const WorkerInfo& info) const noexcept {
    return members_.life(info.id, info.epoch);
  }
  [[nodiscard]] const WorkerInfo& find(std::string_view name) const { return members_.find(name); }
  [[nodiscard]] const WorkerInfo& find(WorkerId id) const { return members_.find(id); }
  [[nodiscard]] const WorkerInfo& find(const WorkerInfo& info) const { return members_.find(info); }

  // Exactly this life, also when it is over. Throws Error(not_found) for an unknown life.
  [[nodiscard]] PeerLife& known_life(const WorkerInfo& info) const;
  // Calls f(PeerLife&) with the present life of each worker.
  template <class F>
  void for_each(F&& f) const {
    members_.for_each(f);
  }
  // Adds a worker, or a new life of one, which ends the former life. Throws as Members::add().
  // Connections of the new life wait until admit().
  PeerLife& add_life(const Member& member) STITCH_EXCLUDES(mutex_);
  void admit(PeerLife& life) STITCH_EXCLUDES(mutex_);
  // Ends the connection to a life, which is lost before this returns. `over`: messages of that life
  // are dropped from now on. `tell`: the peer is told, and does not try to replace the connection.
  void end(const WorkerInfo& peer, const Error& reason, bool over, bool tell = false)
      STITCH_EXCLUDES(mutex_);
  // The bound connections to other processes, with the time of the last bytes that arrived.
  struct Link {
    const PeerLife* life;
    Clock::time_point heard;
  };
  [[nodiscard]] std::vector<Link> links() STITCH_EXCLUDES(mutex_);
  // Sends a HEARTBEAT with the last digests over each link every `interval` until close(), from a
  // thread that runs nothing else.
  void begin_heartbeats(std::chrono::nanoseconds interval);
  void tell_digests(const Digests& digests) noexcept {
    for (std::size_t i = 0; i < kDigests; ++i) digests_[i].store(digests[i]);
  }
  // Calls Connection::trim() of each bound connection.
  void trim() STITCH_EXCLUDES(mutex_);
  // The lives in other processes that this worker can reach and has had no connection with. Empty
  // after expect_closing().
  [[nodiscard]] std::vector<const PeerLife*> unconnected() const STITCH_EXCLUDES(mutex_);
  // Asks a worker over a connection of its own.
  void inquire(Inquiry inquiry);

  // Sends over `connection`, which on_message has named; null means the peer's session. A waiting
  // request is dropped with `cancelled` when its call `call_id` (not 0) is over. Every other
  // message arrives once, or the peer is lost. `done` as for Connection::send.
  void send(const WorkerInfo& to, const std::shared_ptr<transport::Connection>& connection,
            transport::Message message, transport::SendDone done, std::uint64_t call_id = 0)
      STITCH_EXCLUDES(mutex_);
  // The deadline of a call of this worker; max() for none, nothing for a call that is over.
  [[nodiscard]] std::optional<Clock::time_point> deadline(std::uint64_t call_id) const {
    return events_.deadline(call_id);
  }
  // Opens a connection to a worker unless there is one. The loss of a worker that is gone is
  // reported by on_lost. Does not wait.
  void reach(WorkerId id) STITCH_EXCLUDES(mutex_);
  // Tries once to open a connection that no message needs: a failure is no loss.
  void try_to_reach(const WorkerInfo& peer) STITCH_EXCLUDES(mutex_);
  // Closes the connection to a life, which is lost with `reason` at once.
  void give_up(const WorkerInfo& peer, const Error& reason) STITCH_EXCLUDES(mutex_);
  // The error with which the present life of a worker is lost; nothing while it is not.
  [[nodiscard]] std::optional<Error> lost(WorkerId id) const STITCH_EXCLUDES(mutex_);
  // The same for exactly this life.
  [[nodiscard]] std::optional<Error> lost(const WorkerInfo& peer) const STITCH_EXCLUDES(mutex_);
  // The state of a peer as an error text says it: "worker was last heard 120 ms ago", "worker is
  // not connected: ...", "worker is gone".
  [[nodiscard]] std::string condition(const WorkerInfo& peer) const STITCH_EXCLUDES(mutex_);
  // The number of lives, of all workers, whose connection is over.
  [[nodiscard]] std::size_t lost_lives() const STITCH_EXCLUDES(mutex_);
  // Whether there is a bound connection to it.
  [[nodiscard]] bool connected(const WorkerInfo& peer) const STITCH_EXCLUDES(mutex_);
  // The number of workers with a bound connection.
  [[nodiscard]] std::size_t connections() const STITCH_EXCLUDES(mutex_);
  // The number of attempts to connect that have failed.
  [[nodiscard]] std::uint64_t failed_tries() const STITCH_EXCLUDES(mutex_);
  // Whether a peer with a bound connection has not acknowledged a message of this kind yet.
  [[nodiscard]] bool awaits_acknowledgment(Unacknowledged what) const STITCH_EXCLUDES(mutex_);
  // Adds these numbers and the endpoints' counters.
  void debug_info(std::map<std::string, std::int64_t>& numbers) const STITCH_EXCLUDES(mutex_);
  // As Endpoint::help, at each endpoint.
  bool help(base::AwaitedFlag& done, std::chrono::steady_clock::time_point deadline);
  // Peers close their connections from now on: on_lost is not called any more.
  void expect_closing() STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool closing() const STITCH_EXCLUDES(mutex_);
  // Tells the peers, closes all connections and waits for their threads. Not on a thread of an
  // endpoint.
  void close() noexcept;

 private:
  using ConnectionPtr = std::shared_ptr<transport::Connection>;
  using Effects = Peer::Effects;
  [[nodiscard]] transport::ConnectionEvents events_for(const PeerConnectionPtr& peer_connection);
  void on_open(const PeerConnectionPtr& opened, const ConnectionPtr& connection)
      STITCH_EXCLUDES(mutex_);
  // Keeps a connection of a worker that is no member (yet), in place of the oldest if need be.
  void add_stranger(const PeerConnectionPtr& opened, Effects& effects) STITCH_REQUIRES(mutex_);
  // Tells the worker the end of its life where that is the reason, and closes the connection. With
  // `hears_first` a worker that has been told closes it by itself.
  void refuse_connection(const ConnectionPtr& connection, const WorkerInfo& claimed,
                         const Error& reason, bool hears_first) const STITCH_EXCLUDES(mutex_);
  void on_closed(const PeerConnectionPtr& closed, const Error& reason, bool no_process_listens)
      STITCH_EXCLUDES(mutex_);
  // The first message over an unbound connection: BIND, or the connection is closed.
  void on_first_message(const PeerConnectionPtr& sender, const ConnectionPtr& connection,
                        transport::Message message) STITCH_EXCLUDES(mutex_);
  void receive(const PeerConnectionPtr& sender, transport::Message&& message)
      STITCH_EXCLUDES(mutex_);
  // A message without a number over a bound connection: the session's own, or a mistake.
  void on_unnumbered(const PeerConnectionPtr& sender, const transport::Message& message)
      STITCH_EXCLUDES(mutex_);
  // The error of a connection that cannot belong to the worker that its hello names.
  [[nodiscard]] std::optional<Error> objection(const transport::Hello& hello,
                                               const std::string& address) const;
  void carry_out(PeerLife& life, Effects effects) noexcept STITCH_EXCLUDES(mutex_);
  static void send_bind(Effects& effects);
  void say_passed_over(const PeerLife& life, const std::pair<std::string, Error>& address)
      STITCH_EXCLUDES(mutex_);
  void attach(PeerLife& life, const Effects& effects) STITCH_EXCLUDES(mutex_);
  void beat() noexcept STITCH_EXCLUDES(mutex_);
  [[nodiscard]] Clock::time_point heard(const PeerLife& life) const STITCH_REQUIRES(mutex_);
  void connect(const PeerConnectionPtr& attempt) STITCH_EXCLUDES(mutex_);
  void on_timer(PeerLife& life) STITCH_EXCLUDES(mutex_);
  void reach(PeerLife& life) STITCH_EXCLUDES(mutex_);
  void give_up(PeerLife& life, const Error& reason) STITCH_EXCLUDES(mutex_);
  void say_goodbye() STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::shared_ptr<Session> make_session(PeerLife& life);
  [[nodiscard]] Peer& peer(const PeerLife& life) const STITCH_REQUIRES(mutex_) {
    return *life.peer;
  }
  void complete(PeerLife& life) STITCH_REQUIRES(mutex_);
  void record(const char* what, const PeerLife& life) const noexcept {
    if (ring_) ring_->record(what, life.info().id.value(), life.info().epoch);
  }

  Members members_;  // changed under mutex_
  const std::chrono::nanoseconds reconnect_timeout_;
  // Constant after start():
  std::vector<EndpointPtr> endpoints_;
  std::unordered_map<std::string, EndpointPtr> by_scheme_;
  Events events_;
  std::shared_ptr<base::EventRing> ring_;
  PeerLimits limits_{.bytes = std::size_t{4} << 30};
  WorkerId self_;

  mutable base::Mutex mutex_;
  bool started_ STITCH_GUARDED_BY(mutex_) = false;
  bool closing_ STITCH_GUARDED_BY(mutex_) = false;
  std::set<std::string> passed_over_ STITCH_GUARDED_BY(mutex_);     // transports, once said
  std::vector<PeerConnectionPtr> early_ STITCH_GUARDED_BY(mutex_);  // opened before start()
  // Connections of workers that are not known yet, or that hear the end of their life.
  std::vector<PeerConnectionPtr> strangers_ STITCH_GUARDED_BY(mutex_);
  std::array<std::atomic<std::uint64_t>, kDigests> digests_{};
  Heartbeats heartbeats_;  // last: it uses everything above
};

}  // namespace stitch::rpc
