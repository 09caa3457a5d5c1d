#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

// A worker as the rendezvous found it.
struct Member {
  WorkerInfo info;
  std::string process;                 // equal for workers of one process
  std::string host;                    // equal for workers of one host
  std::vector<std::string> addresses;  // where it listens, best first
};

// The workers of the world and the connection to each, opened on first use. Thread contract: any
// thread; events run on the endpoints' threads and the timer's, no lock held. infos() and find()
// need start() and never change after it.
//
// Either worker of a pair may open a connection, and both may at once; one of them gets bound, and
// nothing but BIND travels over any other, so that the others can be closed without loss:
//
//   open --the accepting side says BIND--> offered --the other side says BIND, too--> bound
//
// The worker with the lower id decides: while it tries to connect by itself, it keeps the peer's
// connection unanswered and falls back on it when its own try has failed. The other one answers
// every BIND. What is to be sent waits until a connection is bound. A second connection that claims
// to come from a worker with a bound one is closed.
//
// Until a connection is bound, nothing is lost yet: the peer's addresses are tried in turn, again
// for about a second after the first failure, or five while the peer answers, but for those where
// the peer has said why it does not want us, or where another worker answers, who is refused before
// it takes the connection for open. Only the end of the bound connection, or that of all tries,
// ends that life of the peer; there is no second one within an epoch.
class PeerTable {
 public:
  struct Events {
    std::function<void(const std::shared_ptr<transport::Connection>&, const WorkerInfo& from,
                       transport::Message)>
        on_message;
    // As ConnectionEvents::place; only once start() has been called.
    std::function<transport::Buffer(const WorkerInfo& from, const base::Bytes& frame,
                                    std::size_t bytes)>
        place;
    std::function<void(const WorkerInfo& peer, const Error& reason)>
        on_lost;  // at most once a peer; never after expect_closing()
    // Runs a task at a time, on a timer thread, unless the owner of the table is gone by then.
    std::function<void(std::chrono::steady_clock::time_point, base::UniqueFunction<void()>)>
        call_at;
    // Whether the call that a waiting message asks for is still wanted.
    std::function<bool(std::uint64_t call_id)> wanted;
  };
  using EndpointPtr = std::shared_ptr<transport::Endpoint>;

  PeerTable() = default;
  ~PeerTable();
  // Adds an endpoint and listens on it. Returns the addresses to advertise; later connections to
  // addresses of the same schemes go through it. Before start().
  std::vector<std::string> listen(EndpointPtr endpoint);
  // Makes the members known and answers those that have connected already. `members` by id, from 0
  // without gaps; `self` is this worker, which reaches itself over loopback only.
  void start(const std::vector<Member>& members, WorkerId self, Events events)
      STITCH_EXCLUDES(mutex_);

  [[nodiscard]] std::size_t size() const noexcept { return infos_.size(); }
  [[nodiscard]] const std::vector<WorkerInfo>& infos() const noexcept { return infos_; }
  // Throws Error(invalid_argument) naming what was looked for, and the nearest names or the range
  // of ids.
  [[nodiscard]] const WorkerInfo& find(std::string_view name) const;
  [[nodiscard]] const WorkerInfo& find(WorkerId id) const;
  [[nodiscard]] const WorkerInfo& find(const WorkerInfo& info) const;

  // Sends over `connection`, or when that is null over the peer's, opening it when needed. A
  // message that waits for that is dropped with `cancelled` when `call_id` (if not 0) is not wanted
  // any more.
  void send(const WorkerInfo& to, std::shared_ptr<transport::Connection> connection,
            transport::Message message, transport::SendDone done, std::uint64_t call_id = 0)
      STITCH_EXCLUDES(mutex_);
  // Opens a connection to a worker unless there is one: should it be gone, on_lost says so. Does
  // not wait.
  void reach(WorkerId id) STITCH_EXCLUDES(mutex_);
  // Ends the connection to a worker, which is lost then for `reason`.
  void give_up(WorkerId id, const Error& reason) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::optional<Error> lost(WorkerId id) const STITCH_EXCLUDES(mutex_);
  // What is known of a worker, for a text: "worker is alive", "worker is connected and has been
  // silent for 4.9 s", "worker is not connected: ...", "worker is gone".
  [[nodiscard]] std::string condition(WorkerId id) const STITCH_EXCLUDES(mutex_);
  // How many workers there is a bound connection to.
  [[nodiscard]] std::size_t connections() const STITCH_EXCLUDES(mutex_);
  // How many tries to connect have failed.
  [[nodiscard]] std::uint64_t failed_tries() const noexcept { return failed_tries_.load(); }
  // Adds what the endpoints have counted.
  void debug_info(std::map<std::string, std::int64_t>& numbers) const;
  // As Endpoint::help, at each endpoint.
  bool help(const std::atomic<bool>& done, std::chrono::steady_clock::time_point deadline);
  // From now on broken connections are expected and reported to nobody.
  void expect_closing() STITCH_EXCLUDES(mutex_);
  // Closes all connections and waits for their threads. Not on a thread of an endpoint.
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  using ConnectionPtr = std::shared_ptr<transport::Connection>;
  // One connection, from the try to open it to its end. But for the atomic one, what changes is
  // guarded by mutex_.
  struct Line {
    std::optional<WorkerId> wanted;  // whom this worker opened it to; none: a peer did
    std::size_t address = 0;         // of the wanted one's
    std::atomic<bool> bound{false};  // what comes are messages
    ConnectionPtr connection{};      // until it ends
    std::optional<WorkerId> peer{};  // who is there, once open
    bool ended = false;
  };
  using LinePtr = std::shared_ptr<Line>;
  struct Waiting {
    transport::Message message;
    transport::SendDone done;
    std::uint64_t call_id;
  };
  struct Peer {
    ConnectionPtr connection;  // the bound one, once what waited has been sent over it
    LinePtr bound;
    LinePtr own;      // this worker's try
    LinePtr offered;  // the peer's: this worker has said BIND
    LinePtr spare;    // the peer's, unanswered while this worker tries by itself
    std::vector<Waiting> waiting;
    bool retrying = false;               // a timer will try again
    std::vector<std::string> refusals;   // by address: why it is not tried again; empty: it is
    std::optional<Error> failure;        // of the last try
    bool answered = false;               // the peer, in that try
    Clock::time_point first_failure{};   // since the last connection opened
    std::chrono::milliseconds pause{0};  // before the next round of tries
    std::optional<Error> lost;
  };
  // What is to be done once the lock has been released.
  struct After {
    std::vector<std::pair<ConnectionPtr, Error>> close;
    LinePtr dial;
    ConnectionPtr say_bind;
    std::optional<std::pair<WorkerId, Clock::time_point>> retry;
    std::optional<std::pair<WorkerId, Error>> lost;  // for the owner to hear
    std::vector<Waiting> failed;
    std::optional<Error> failure;  // theirs
  };
  [[nodiscard]] transport::ConnectionEvents events_for(const LinePtr& line);
  void on_open(const LinePtr& line, const ConnectionPtr& connection) STITCH_EXCLUDES(mutex_);
  void on_closed(const LinePtr& line, const Error& reason) STITCH_EXCLUDES(mutex_);
  void on_first_message(const LinePtr& line, const ConnectionPtr& connection,
                        const transport::Message& message) STITCH_EXCLUDES(mutex_);
  void receive(const LinePtr& line, const ConnectionPtr& connection, transport::Message message);
  // Why a connection cannot be one with whom its hello names.
  [[nodiscard]] std::optional<Error> objection(const Line& line, const transport::Hello& hello,
                                               const std::string& address) const;
  void opened(const LinePtr& line, const ConnectionPtr& connection, After& after)
      STITCH_REQUIRES(mutex_);
  void bind(const LinePtr& line, const ConnectionPtr& connection) STITCH_EXCLUDES(mutex_);
  void drop(LinePtr& line, const std::string& why, After& after) STITCH_REQUIRES(mutex_);
  void offer(Peer& peer, const LinePtr& line, After& after) STITCH_REQUIRES(mutex_);
  void send_when_bound(WorkerId to, Waiting waiting) STITCH_EXCLUDES(mutex_);
  // Makes a try begin unless one is under way.
  void want(WorkerId id, After& after) STITCH_REQUIRES(mutex_);
  void try_next(WorkerId id, std::size_t first_address, After& after) STITCH_REQUIRES(mutex_);
  void own_try_failed(WorkerId id, const LinePtr& line, const Error& reason, After& after)
      STITCH_REQUIRES(mutex_);
  void lose(WorkerId id, const Error& reason, After& after) STITCH_REQUIRES(mutex_);
  void perform(After after) STITCH_EXCLUDES(mutex_);
  void dial(const LinePtr& line) STITCH_EXCLUDES(mutex_);
  void retry(WorkerId id) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool has_endpoint_for(const std::string& address) const;

  // Constant after start():
  std::vector<Member> members_;    // by id
  std::vector<WorkerInfo> infos_;  // by id
  std::unordered_map<std::string, WorkerId> by_name_;
  std::vector<EndpointPtr> endpoints_;
  std::unordered_map<std::string, EndpointPtr> by_scheme_;
  Events events_;
  WorkerId self_;

  std::vector<std::atomic<Clock::rep>> heard_;  // by id: when last; the vector: constant likewise
  std::atomic<std::uint64_t> failed_tries_{0};
  mutable base::Mutex mutex_;
  bool started_ STITCH_GUARDED_BY(mutex_) = false;
  std::vector<LinePtr> early_ STITCH_GUARDED_BY(mutex_);  // opened by peers before start()
  std::vector<Peer> peers_ STITCH_GUARDED_BY(mutex_);
  bool closing_ STITCH_GUARDED_BY(mutex_) = false;
};

}  // namespace stitch::rpc
