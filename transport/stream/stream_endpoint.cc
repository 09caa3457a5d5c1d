// One file, though long: what an endpoint does to listen, to accept and to connect.
#include "stitch/transport/stream/stream_endpoint.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "stitch/base/exiting.h"
#include "stitch/base/name_list.h"
#include "stitch/transport/connection_set.h"
#include "stitch/transport/endpoint_shell.h"
#include "stitch/transport/ip_address.h"
#include "stitch/transport/polling/poller.h"
#include "stitch/transport/stream/descriptor_reserve.h"
#include "stitch/transport/stream/half_open.h"
#include "stitch/transport/stream/shm_link.h"
#include "stitch/transport/stream/shm_memory.h"
#include "stitch/transport/stream/socket_address.h"
#include "stitch/transport/stream/socket_step.h"
#include "stitch/transport/stream/stream_connection.h"
#include "stitch/transport/stream/tcp_link.h"

namespace stitch::transport {

namespace {

// Accepting pauses this long when there is no descriptor left; until some have come free the kernel
// keeps the connections in its backlog.
constexpr std::chrono::milliseconds kExhaustedPause{50};
constexpr int kDroppedWhenExhausted = 8;  // half-open connections, oldest first
// Until an accepted connection has sent its first record: a worker does as soon as it has
// connected.
constexpr std::chrono::milliseconds kFirstRecordTimeout{2500};
constexpr std::chrono::milliseconds kConnectRetryPause{5};  // of a Unix socket with a full backlog

[[nodiscard]] base::Descriptor open_socket(DescriptorReserve& reserve, int family) {
  base::Descriptor socket = reserve.take([family] {
    return base::Descriptor(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  });
  if (!socket) throw socket_error(errno);
  // Now that it is registered: else the end of the process has missed it.
  if (base::process_is_exiting()) throw Error(ErrorCode::disconnected, "this process is exiting");
  return socket;
}

// What an endpoint's connections share. Kept alive by the endpoint and by scheduled tasks. Thread
// contract: any thread unless said otherwise.
class StreamEndpointState : public std::enable_shared_from_this<StreamEndpointState> {
 public:
  StreamEndpointState(EndpointOptions options, StreamOptions stream,
                      std::vector<ListeningSocket> bound)
      : options_(std::move(options)), stream_(std::move(stream)), bound_(std::move(bound)) {}

  [[nodiscard]] std::vector<std::string> listen(Endpoint::Accept accept);
  [[nodiscard]] std::vector<std::string> bind();
  void become(const Hello& self, const std::vector<std::string>& addresses);
  [[nodiscard]] std::shared_ptr<Connection> connect(const std::string& address, Wanted whom,
                                                    ConnectionEvents events);
  [[nodiscard]] bool help(base::AwaitedFlag& done, std::chrono::steady_clock::time_point deadline) {
    return poller_->help(done, deadline);
  }
  [[nodiscard]] std::map<std::string, std::int64_t> counters() const {
    return {{"transport.handshakes_dropped", half_open_.dropped()},
            {"transport.accepts_paused", accepts_paused_.load()}};
  }
  void close();
  void join();

 private:
  [[nodiscard]] static Error closed_error() {
    return Error(ErrorCode::shutting_down, "stream endpoint is closed");
  }
  [[nodiscard]] std::shared_ptr<StreamConnection> make(std::string name, std::optional<Wanted> whom,
                                                       ConnectionEvents events);
  void open_listener(ListeningSocket listening);
  // On the thread that polls.
  void accepted(const std::string& transport, const std::string& address, base::Descriptor socket);
  // On the thread that polls: nothing is left for the next connection.
  void exhausted(Poller::SourceId listener);
  // Calls `expire` when an accepted connection has not sent a record in time.
  void expect_first_record(const std::shared_ptr<StreamConnection>& connection,
                           HalfOpen::Drop expire);
  static void begin_tcp(const std::shared_ptr<StreamConnection>& connection,
                        base::Descriptor socket);
  // Attempts to connect.
  void start(const std::string& address, const std::shared_ptr<StreamConnection>& connection,
             int attempt);
  // Throws Error when no attempt to connect can be made.
  void start_shm(const std::string& name, const std::shared_ptr<StreamConnection>& connection,
                 int attempt);
  void start_tcp(const std::string& address, const std::shared_ptr<StreamConnection>& connection);
  // Ends `step` and fails `connection` unless it is connected within the handshake's timeout.
  void expire_later(const std::shared_ptr<SocketStep>& step,
                    const std::shared_ptr<StreamConnection>& connection);

  EndpointOptions options_;  // constant once it listens or connects
  const StreamOptions stream_;
  const std::shared_ptr<base::TaskThread> thread_ = std::make_shared<base::TaskThread>();
  const std::shared_ptr<Poller> poller_ = Poller::start("stitch-poll");
  const std::shared_ptr<ReceiveBudget> budget_ =
      std::make_shared<ReceiveBudget>(options_.max_receiving_bytes);
  DescriptorReserve reserve_;
  HalfOpen half_open_;  // the thread that polls only

  ConnectionSet<StreamConnection> connections_;
  base::Mutex mutex_;
  std::shared_ptr<const Endpoint::Accept> accept_ STITCH_GUARDED_BY(mutex_);
  std::vector<ListeningSocket> bound_ STITCH_GUARDED_BY(mutex_);  // until it listens
  std::vector<Poller::SourceId> listeners_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t accepted_count_ STITCH_GUARDED_BY(mutex_) = 0;
  std::atomic<std::int64_t> accepts_paused_{0};  // no descriptor
};

std::shared_ptr<StreamConnection> StreamEndpointState::make(std::string name,
                                                            std::optional<Wanted> whom,
                                                            ConnectionEvents events) {
  // Not make_shared: timers that refer to it weakly would keep its memory.
  return std::shared_ptr<StreamConnection>(new StreamConnection(
      options_, std::move(name), whom, std::move(events), thread_, poller_, budget_,
      [self = shared_from_this()](const std::shared_ptr<StreamConnection>& connection) {
        self->connections_.remove(connection);
      }));
}

std::vector<std::string> StreamEndpointState::listen(Endpoint::Accept accept) {
  {
    base::MutexLock lock(mutex_);
    if (connections_.closed()) throw closed_error();
    if (accept_ != nullptr) throw Error(ErrorCode::invalid_argument, "endpoint listens already");
    accept_ = std::make_shared<const Endpoint::Accept>(std::move(accept));
  }
  std::vector<ListeningSocket> bound;
  {
    base::MutexLock lock(mutex_);
    bound.swap(bound_);
  }
  if (bound.empty()) {
    static_cast<void>(bind());
    base::MutexLock lock(mutex_);
    bound.swap(bound_);
  }
  std::vector<std::string> addresses;
  for (ListeningSocket& each : bound) {
    addresses.push_back(each.address);
    open_listener(std::move(each));
  }
  return addresses;
}

std::vector<std::string> StreamEndpointState::bind() {
  std::vector<ListeningSocket> bound;
  for (const auto& transport : stream_.transports) {
    bound.push_back(listen_on_new_address(transport, stream_.bind_address));
    if (transport != "tcp") continue;
    for (const auto& address : stream_.more_addresses)
      bound.push_back(listen_on_new_address(transport, address));
  }
  std::vector<std::string> addresses;
  for (const auto& each : bound) addresses.push_back(each.address);
  base::MutexLock lock(mutex_);
  bound_ = std::move(bound);
  return addresses;
}

void StreamEndpointState::become(const Hello& self, const std::vector<std::string>& addresses) {
  static_cast<void>(Introduction::encode(self));  // throws for a name that is too long
  options_.self = self;
  base::MutexLock lock(mutex_);
  std::erase_if(bound_, [&](const ListeningSocket& each) {
    return std::ranges::find(addresses, each.address) == addresses.end();
  });
}

void StreamEndpointState::open_listener(ListeningSocket listening) {
  const std::string transport = listening.address.substr(0, listening.address.find(':'));
  reserve_.fill();
  const Poller::SourceId id = poller_->new_id();
  const auto listener = std::make_shared<SocketListener>(
      std::move(listening.socket), reserve_,
      [weak = weak_from_this(), transport,
       text = listening.address](base::Descriptor accepted_socket) {
        const auto self = weak.lock();
        if (!self) return;
        self->accepted(transport, text, std::move(accepted_socket));
      },
      [weak = weak_from_this(), id] {
        if (const auto self = weak.lock()) self->exhausted(id);
      });
  {
    base::MutexLock lock(mutex_);
    if (connections_.closed()) throw closed_error();
    listeners_.push_back(id);
  }
  poller_->add(id, listener->descriptor(), listener);
  if (connections_.closed()) {
    poller_->remove(id);  // close() may have run before it was added
    throw closed_error();
  }
}

void StreamEndpointState::exhausted(Poller::SourceId listener) {
  accepts_paused_.fetch_add(1);
  for (int i = 0; i < kDroppedWhenExhausted; ++i) half_open_.drop_oldest();
  poller_->pause(listener, true);
  thread_->post_at(std::chrono::steady_clock::now() + kExhaustedPause,
                   [weak = weak_from_this(), listener] {
                     if (const auto self = weak.lock()) self->poller_->pause(listener, false);
                   });
}

void StreamEndpointState::accepted(const std::string& transport, const std::string& address,
                                   base::Descriptor socket) {
  std::shared_ptr<const Endpoint::Accept> accept;
  std::string name;
  {
    base::MutexLock lock(mutex_);
    if (connections_.closed()) return;
    accept = accept_;
    name = address + "#" + std::to_string(++accepted_count_);
  }
  const auto connection = make(std::move(name), std::nullopt, (*accept)());
  if (!connections_.add(connection)) return connection->fail(closed_error());
  const std::weak_ptr<StreamConnection> weak_connection = connection;
  try {
    if (transport == "tcp") {
      half_open_.add(connection, [weak_connection](const Error& why) {
        if (const auto open = weak_connection.lock()) open->drop(why);
      });
      expect_first_record(connection, [weak_connection](const Error& why) {
        if (const auto silent = weak_connection.lock()) silent->close(why);
      });
      return connection->begin(make_tcp_link(std::move(socket)));
    }
    check_peer_user(socket.get(), options_.secret != nullptr);
    const auto step = SocketStep::start(
        *poller_, std::move(socket), false,
        [weak = weak_from_this(), connection](base::Descriptor& ready) {
          if (const auto self = weak.lock()) self->reserve_.make_room();
          auto link = accept_shm_link(ready);
          if (link == nullptr) return false;
          connection->begin(std::move(link));
          return true;
        },
        [connection](const Error& error) { connection->fail(error); });
    const std::weak_ptr<SocketStep> weak_step = step;
    half_open_.add(connection, [weak_connection, weak_step](const Error& why) {
      if (const auto pending = weak_step.lock()) pending->expire();
      if (const auto open = weak_connection.lock()) open->drop(why);
    });
    expect_first_record(connection, [weak_connection, weak_step](const Error& why) {
      if (const auto pending = weak_step.lock()) pending->expire();
      if (const auto silent = weak_connection.lock()) silent->close(why);
    });
  } catch (...) {
    connection->fail(to_error(std::current_exception()));
  }
}

void StreamEndpointState::expect_first_record(const std::shared_ptr<StreamConnection>& connection,
                                              HalfOpen::Drop expire) {
  const auto timeout = std::min(options_.handshake_timeout, kFirstRecordTimeout);
  thread_->post_at(
      std::chrono::steady_clock::now() + timeout,
      [weak = std::weak_ptr(connection), timeout, expire = std::move(expire)] {
        const auto silent = weak.lock();
        if (!silent || silent->has_received_record() || !silent->half_open()) return;
        expire(Error(ErrorCode::disconnected, "connection " + silent->describe() +
                                                  " did not finish its handshake within " +
                                                  std::to_string(timeout.count()) + " ms"));
      });
}

void StreamEndpointState::expire_later(const std::shared_ptr<SocketStep>& step,
                                       const std::shared_ptr<StreamConnection>& connection) {
  thread_->post_at(
      std::chrono::steady_clock::now() + options_.handshake_timeout,
      [weak = weak_from_this(), weak_connection = std::weak_ptr(connection),
       weak_step = std::weak_ptr(step)] {
        const auto self = weak.lock();
        const auto late = weak_connection.lock();
        const auto pending = weak_step.lock();
        if (!self || !late || !pending) return;
        pending->expire();
        late->fail(Error(ErrorCode::disconnected,
                         "connection " + late->describe() +
                             " did not finish its handshake within " +
                             std::to_string(self->options_.handshake_timeout.count()) + " ms"));
      });
}

std::shared_ptr<Connection> StreamEndpointState::connect(const std::string& address, Wanted whom,
                                                         ConnectionEvents events) {
  const auto connection = make(address, whom, std::move(events));
  if (!connections_.add(connection)) {
    connection->fail(closed_error());
    return connection;
  }
  start(address, connection, 0);
  return connection;
}

void StreamEndpointState::start(const std::string& address,
                                const std::shared_ptr<StreamConnection>& connection, int attempt) {
  try {
    const auto at = address.find("://");
    if (at == std::string::npos)
      throw Error(ErrorCode::disconnected,
                  "it does not look like \"shm://name\" or \"tcp://127.0.0.1:4711\"");
    const std::string transport = address.substr(0, at);
    if (std::find(stream_.transports.begin(), stream_.transports.end(), transport) ==
        stream_.transports.end()) {
      throw Error(ErrorCode::disconnected,
                  "transport \"" + transport +
                      "\" is not in use here; in use: " + base::join_names(stream_.transports));
    }
    if (transport == "shm") {
      start_shm(address.substr(at + 3), connection, attempt);
    } else {
      start_tcp(address.substr(at + 3), connection);
    }
  } catch (...) {
    connection->fail(connection->connect_error(to_error(std::current_exception())));
  }
}

void StreamEndpointState::start_shm(const std::string& name,
                                    const std::shared_ptr<StreamConnection>& connection,
                                    int attempt) {
  if (name.empty() || name.size() > kMaxAbstractName) {
    throw Error(ErrorCode::disconnected, "its name is empty or longer than " +
                                             std::to_string(kMaxAbstractName) + " characters");
  }
  const SocketAddress address = abstract_address(name);
  base::Descriptor socket = open_socket(reserve_, AF_UNIX);
  if (::connect(socket.get(), address.get(), address.bytes) == 0) {
    check_peer_user(socket.get(), options_.secret != nullptr);
    const base::Descriptor memory = reserve_.take(&open_shm_memory);
    if (!memory) throw socket_error(errno).with_prefix("shared memory: memfd_create failed");
    connection->begin(offer_shm_link(std::move(socket), memory));
    return;
  }
  // connect() on a Unix socket with a full backlog fails with EAGAIN instead of completing later:
  // retry from a timer.
  if (errno != EAGAIN || attempt * kConnectRetryPause >= options_.handshake_timeout)
    return connection->fail_to_connect(errno);
  thread_->post_at(std::chrono::steady_clock::now() + kConnectRetryPause,
                   [weak = weak_from_this(), name, connection, attempt] {
                     if (const auto self = weak.lock())
                       self->start("shm://" + name, connection, attempt + 1);
                   });
}

void StreamEndpointState::start_tcp(const std::string& address,
                                    const std::shared_ptr<StreamConnection>& connection) {
  const auto ip = IpAddress::parse_with_port(address);
  if (!ip) throw Error(ErrorCode::disconnected, "it is not a numeric address with a port");
  base::Descriptor socket = open_socket(reserve_, ip->address.ss_family);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&ip->address), ip->bytes) == 0)
    return begin_tcp(connection, std::move(socket));
  if (const int error = errno; error != EINPROGRESS) return connection->fail_to_connect(error);
  const auto step = SocketStep::start(
      *poller_, std::move(socket), true,
      [connection](base::Descriptor& ready) {
        int error = 0;
        socklen_t bytes = sizeof(error);
        if (::getsockopt(ready.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) error = errno;
        if (error != 0) {
          connection->fail_to_connect(error);
        } else {
          begin_tcp(connection, std::move(ready));
        }
        return true;
      },
      [connection](const Error& error) { connection->fail(connection->connect_error(error)); });
  expire_later(step, connection);
}

void StreamEndpointState::begin_tcp(const std::shared_ptr<StreamConnection>& connection,
                                    base::Descriptor socket) {
  if (connects_itself(socket.get())) {
    connection->fail(connection->connect_error(Error(
        ErrorCode::disconnected, "no process listens there: the socket connected to itself")));
  } else {
    connection->begin(make_tcp_link(std::move(socket)));
  }
}

void StreamEndpointState::close() {
  const Error closed = closed_error();
  const auto open = connections_.close();
  if (!open) return;
  std::vector<Poller::SourceId> listeners;
  {
    // open_listener() adds to listeners_ under this lock unless the endpoint is closed.
    base::MutexLock lock(mutex_);
    listeners.swap(listeners_);
  }
  for (const auto id : listeners) poller_->remove(id);
  for (const auto& connection : *open) connection->close(closed);
}

void StreamEndpointState::join() {
  close();
  connections_.wait_until_empty();
  poller_->join();
  thread_->join();
  std::shared_ptr<const Endpoint::Accept> accept;
  base::MutexLock lock(mutex_);
  accept.swap(accept_);
}

}  // namespace

std::unique_ptr<Endpoint> make_stream_endpoint(EndpointOptions options, StreamOptions stream,
                                               std::vector<ListeningSocket> bound) {
  // Throws for a name that is too long: an error of the caller's, so reported here.
  static_cast<void>(Introduction::encode(options.self));
  base::check_names("transport", stream.transports, {"shm", "tcp"});
  check_bind_address(stream.bind_address);
  return std::make_unique<EndpointShell<StreamEndpointState>>(std::make_shared<StreamEndpointState>(
      std::move(options), std::move(stream), std::move(bound)));
}

}  // namespace stitch::transport
