#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "stitch/rpc/worker_info.h"
#include "stitch/transport/endpoint.h"
#include "stitch/transport/mutex.h"
#include "stitch/transport/unique_function.h"

namespace stitch {

// A worker as the rendezvous found it.
struct Member {
  WorkerInfo info;
  std::string process;                 // equal for workers of one process
  std::string host;                    // equal for workers of one host
  std::vector<std::string> addresses;  // where it listens, best first
};

// The workers of the world and the connections to them, opened on first use. A connection that
// breaks ends that life of the peer: there is no second try within an epoch. Made before the
// members are known, because peers that know us may connect first: what arrives before start()
// waits for it. Thread contract: any thread; events run on the endpoints' threads, no lock held.
// infos() and find() need start() and never change after it.
class PeerTable {
 public:
  struct Events {
    std::function<void(const std::shared_ptr<transport::Connection>&, const WorkerInfo& from,
                       transport::Message)>
        on_message;
    // As ConnectionEvents::place; only once start() has been called.
    std::function<transport::Buffer(const WorkerInfo& from, const transport::Bytes& frame,
                                    std::size_t bytes)>
        place;
    std::function<void(const WorkerInfo& peer, const Error& reason)>
        on_lost;  // at most once a peer; never after expect_closing()
  };
  using EndpointPtr = std::shared_ptr<transport::Endpoint>;

  PeerTable() = default;
  ~PeerTable();
  // Adds an endpoint and listens on it. Returns the addresses to advertise; later connections to
  // addresses of the same schemes go through it. Before start().
  std::vector<std::string> listen(EndpointPtr endpoint);
  // Makes the members known and handles what has waited. `members` by id, from 0 without gaps.
  void start(const std::vector<Member>& members, Events events) STITCH_EXCLUDES(mutex_);

  [[nodiscard]] std::size_t size() const noexcept { return infos_.size(); }
  [[nodiscard]] const std::vector<WorkerInfo>& infos() const noexcept { return infos_; }
  // Throws Error(invalid_argument) naming what was looked for, and the nearest names or the range
  // of ids.
  [[nodiscard]] const WorkerInfo& find(std::string_view name) const;
  [[nodiscard]] const WorkerInfo& find(WorkerId id) const;
  [[nodiscard]] const WorkerInfo& find(const WorkerInfo& info) const;

  // Sends over `connection`, or when that is null over the peer's, opening it when needed.
  void send(const WorkerInfo& to, std::shared_ptr<transport::Connection> connection,
            transport::Message message, transport::SendDone done) STITCH_EXCLUDES(mutex_);
  // Opens a connection to a worker unless there is one: should it be gone, on_lost says so. Does
  // not wait.
  void reach(WorkerId id) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::optional<Error> lost(WorkerId id) const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t connections() const STITCH_EXCLUDES(mutex_);
  // Adds what the endpoints have counted.
  void debug_info(std::map<std::string, std::int64_t>& numbers) const;
  // As Endpoint::help, at each endpoint.
  bool help(const std::atomic<bool>& done, std::chrono::steady_clock::time_point deadline);
  // From now on broken connections are expected and reported to nobody.
  void expect_closing() STITCH_EXCLUDES(mutex_);
  // Closes all connections and waits for their threads. Not on a thread of an endpoint.
  void close();

 private:
  struct Peer {
    std::shared_ptr<transport::Connection> connection;
    std::optional<Error> lost;
  };
  [[nodiscard]] std::shared_ptr<transport::Connection> connect(const WorkerInfo& to)
      STITCH_EXCLUDES(mutex_);
  [[nodiscard]] transport::ConnectionEvents events_for(std::optional<WorkerId> peer);
  // Runs `event` now, or after start() in the order of arrival.
  void handle(UniqueFunction<void()> event) STITCH_EXCLUDES(mutex_);
  void receive(const std::shared_ptr<transport::Connection>& connection,
               transport::Message message);
  void on_open(const std::shared_ptr<transport::Connection>& connection) STITCH_EXCLUDES(mutex_);
  void on_closed(WorkerId id, const Error& reason) STITCH_EXCLUDES(mutex_);

  // Constant after start():
  std::vector<Member> members_;    // by id
  std::vector<WorkerInfo> infos_;  // by id
  std::unordered_map<std::string, WorkerId> by_name_;
  std::vector<EndpointPtr> endpoints_;
  std::unordered_map<std::string, EndpointPtr> by_scheme_;
  Events events_;

  std::atomic<bool> serving_{false};  // a copy of started_
  mutable Mutex mutex_;
  bool started_ STITCH_GUARDED_BY(mutex_) = false;
  std::deque<UniqueFunction<void()>> early_ STITCH_GUARDED_BY(mutex_);
  std::vector<Peer> peers_ STITCH_GUARDED_BY(mutex_);
  bool closing_ STITCH_GUARDED_BY(mutex_) = false;
};

}  // namespace stitch
