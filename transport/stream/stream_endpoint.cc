#include "stitch/transport/stream/stream_endpoint.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sodium.h>
#include <sys/epoll.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <utility>

#include "stitch/base/name_list.h"
#include "stitch/transport/connection_set.h"
#include "stitch/transport/ip_address.h"
#include "stitch/transport/stream/descriptor_reserve.h"
#include "stitch/transport/stream/half_open.h"
#include "stitch/transport/stream/poller.h"
#include "stitch/transport/stream/shm_link.h"
#include "stitch/transport/stream/shm_memory.h"
#include "stitch/transport/stream/stream_connection.h"
#include "stitch/transport/stream/tcp_link.h"

namespace stitch::transport {

namespace {

constexpr std::string_view kShmScheme = "shm://";
constexpr std::string_view kTcpScheme = "tcp://";
constexpr std::size_t kMaxShmName =
    100;  // of the 107 characters an abstract socket's name can have
constexpr int kBacklog = 1024;

[[nodiscard]] std::string text_of_errno(int error) { return std::strerror(error); }

// A socket's address as the system calls want it.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
  [[nodiscard]] const sockaddr* get() const noexcept {
    return reinterpret_cast<const sockaddr*>(&storage);
  }
};

// The address of an abstract unix socket: it has no file and goes with its process.
[[nodiscard]] SocketAddress abstract_address(const std::string& name) {
  SocketAddress address;
  auto* unix_address = reinterpret_cast<sockaddr_un*>(&address.storage);
  unix_address->sun_family = AF_UNIX;
  std::memcpy(unix_address->sun_path + 1, name.data(), name.size());
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

[[nodiscard]] std::string tcp_address_text(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
    return std::string(kTcpScheme) + '[' + text + "]:" + std::to_string(ntohs(v6.sin6_port));
  }
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
  inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
  return std::string(kTcpScheme) + text + ':' + std::to_string(ntohs(v4.sin_port));
}

// Watches a socket until something can be done with it, which ends the watch: a step of setting up
// a connection.
class Step final : public PollSource, public std::enable_shared_from_this<Step> {
 public:
  // May take the socket. False when it has to be called again later.
  using Action = std::function<bool(base::Descriptor& socket)>;
  // It cannot be called, or has thrown.
  using Failed = std::function<void(const Error&)>;

  Step(Poller& poller, base::Descriptor socket, Action action, Failed failed)
      : poller_(poller),
        id_(poller.new_id()),
        socket_(std::move(socket)),
        action_(std::move(action)),
        failed_(std::move(failed)) {}
  static std::shared_ptr<Step> start(Poller& poller, base::Descriptor socket, bool until_writable,
                                     Action action, Failed failed) {
    auto step =
        std::make_shared<Step>(poller, std::move(socket), std::move(action), std::move(failed));
    poller.add(step->id_, step->socket_.get(), step);
    if (until_writable) poller.watch_room(step->id_, true);
    return step;
  }
  // Ends the watch. Any thread.
  void expire() {
    expired_.store(true);
    poller_.remove(id_);
  }
  bool poll() override { return false; }
  bool passive() const noexcept override { return true; }
  bool ready(std::uint32_t) override {
    const auto self = shared_from_this();
    poller_.remove(id_);
    try {
      if (action_(socket_)) return true;
      poller_.add(id_, socket_.get(), self);
    } catch (...) {
      failed_(to_error(std::current_exception()));
    }
    if (expired_.load()) poller_.remove(id_);
    return true;
  }

 private:
  Poller& poller_;
  const Poller::SourceId id_;
  base::Descriptor socket_;
  const Action action_;
  const Failed failed_;
  std::atomic<bool> expired_{false};
};

// Accepts connections. Removed from the poller by the hub.
class SocketListener final : public PollSource {
 public:
  using Accepted = std::function<void(base::Descriptor socket)>;
  // `exhausted` is told when the process has no descriptor left for others. `reserve` outlives it.
  SocketListener(base::Descriptor socket, DescriptorReserve& reserve, Accepted accepted,
                 std::function<void()> exhausted)
      : socket_(std::move(socket)),
        reserve_(reserve),
        accepted_(std::move(accepted)),
        exhausted_(std::move(exhausted)) {}
  [[nodiscard]] int descriptor() const noexcept { return socket_.get(); }

  bool poll() override { return false; }
  bool passive() const noexcept override { return true; }
  bool ready(std::uint32_t) override {
    constexpr int kAtOnce = 16;
    try {
      for (int i = 0; i < kAtOnce; ++i) {
        base::Descriptor socket = reserve_.take_for_others([this] {
          return base::Descriptor(
              ::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        });
        if (!socket) {
          if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
            exhausted_();
          break;
        }
        accepted_(std::move(socket));
      }
    } catch (...) {
      // Without memory it goes on later: the poller would let go of a listener that throws.
    }
    return false;
  }

 private:
  const base::Descriptor socket_;
  DescriptorReserve& reserve_;
  const Accepted accepted_;
  const std::function<void()> exhausted_;
};

// What an endpoint's connections share. Kept alive by the endpoint and by what is scheduled. Thread
// contract: any thread.
class StreamHub : public std::enable_shared_from_this<StreamHub> {
 public:
  StreamHub(EndpointOptions options, StreamOptions stream)
      : options_(std::move(options)), stream_(std::move(stream)) {}

  [[nodiscard]] std::vector<std::string> listen(Endpoint::Accept accept);
  [[nodiscard]] std::shared_ptr<Connection> connect(const std::string& address,
                                                    ConnectionEvents events);
  [[nodiscard]] bool help(const std::atomic<bool>& done,
                          std::chrono::steady_clock::time_point deadline) {
    return poller_->help(done, deadline);
  }
  [[nodiscard]] std::map<std::string, std::int64_t> counters() const {
    return {{"transport.handshakes_dropped", half_open_.dropped()},
            {"transport.accepts_failed", accepts_failed_.load()}};
  }
  void close();
  void join();

 private:
  [[nodiscard]] static Error closed_error() {
    return Error(ErrorCode::shutting_down, "stream endpoint is closed");
  }
  [[nodiscard]] std::shared_ptr<StreamConnection> make(std::string name, bool accepted,
                                                       ConnectionEvents events);
  [[nodiscard]] std::string open_listener(const std::string& transport);
  // On the thread that polls; throws when there is no memory for one more.
  void accepted(const std::string& transport, const std::string& address, base::Descriptor socket);
  // On the thread that polls: there is no descriptor for the next one.
  void exhausted(Poller::SourceId listener);
  // Ends an accepted connection that does not say a word.
  void expect_words(const std::shared_ptr<StreamConnection>& connection, HalfOpen::Drop expire);
  static void begin_tcp(const std::shared_ptr<StreamConnection>& connection,
                        base::Descriptor socket);
  // Throws what stands in the way.
  void start_shm(const std::string& name, const std::shared_ptr<StreamConnection>& connection,
                 int attempt);
  void start_tcp(const std::string& address, const std::shared_ptr<StreamConnection>& connection);
  // Ends what `step` was to bring about, unless that has been done by then.
  void limit(const std::shared_ptr<Step>& step,
             const std::shared_ptr<StreamConnection>& connection);

  const EndpointOptions options_;
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
  std::vector<Poller::SourceId> listeners_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t accepted_count_ STITCH_GUARDED_BY(mutex_) = 0;
  std::atomic<std::int64_t> accepts_failed_{0};  // for want of memory
};

std::shared_ptr<StreamConnection> StreamHub::make(std::string name, bool accepted,
                                                  ConnectionEvents events) {
  // Not in one piece with its count: timers that refer to it weakly would keep its memory.
  return std::shared_ptr<StreamConnection>(new StreamConnection(
      options_, std::move(name), accepted, std::move(events), thread_, poller_, budget_,
      [self = shared_from_this()](const std::shared_ptr<StreamConnection>& connection) {
        self->connections_.remove(connection);
      }));
}

std::vector<std::string> StreamHub::listen(Endpoint::Accept accept) {
  {
    base::MutexLock lock(mutex_);
    if (connections_.closed()) throw closed_error();
    if (accept_ != nullptr) throw Error(ErrorCode::invalid_argument, "endpoint listens already");
    accept_ = std::make_shared<const Endpoint::Accept>(std::move(accept));
  }
  std::vector<std::string> addresses;
  for (const auto& transport : stream_.transports) addresses.push_back(open_listener(transport));
  return addresses;
}

std::string StreamHub::open_listener(const std::string& transport) {
  SocketAddress address;
  std::string text;
  if (transport == "shm") {
    if (sodium_init() < 0) throw Error(ErrorCode::internal, "libsodium cannot be initialised");
    std::uint64_t number = 0;
    randombytes_buf(&number, sizeof(number));
    const std::string name = "stitch-" + std::to_string(::getpid()) + '-' + std::to_string(number);
    address = abstract_address(name);
    text = std::string(kShmScheme) + name;
  } else {
    const auto ip = IpAddress::parse(stream_.bind_address, 0);
    address = {ip->address, ip->bytes};
    text = std::string(kTcpScheme) + stream_.bind_address;
  }
  base::Descriptor socket(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket || ::bind(socket.get(), address.get(), address.bytes) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    throw Error(ErrorCode::disconnected,
                "address " + text + " could not be bound: " + text_of_errno(errno));
  }
  if (transport == "tcp") {
    SocketAddress bound;
    bound.bytes = sizeof(bound.storage);
    ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.bytes);
    text = tcp_address_text(bound.storage);
  }
  reserve_.fill();
  const Poller::SourceId id = poller_->new_id();
  const auto listener = std::make_shared<SocketListener>(
      std::move(socket), reserve_,
      [weak = weak_from_this(), transport, text](base::Descriptor accepted_socket) {
        const auto self = weak.lock();
        if (!self) return;
        try {
          self->accepted(transport, text, std::move(accepted_socket));
        } catch (...) {
          // No memory for one more: whoever knocked sees the end of the connection.
          self->accepts_failed_.fetch_add(1);
        }
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
    poller_->remove(id);  // whoever closed the endpoint may have come before it was added
    throw closed_error();
  }
  return text;
}

void StreamHub::exhausted(Poller::SourceId listener) {
  // Descriptors may come free, those of the oldest half-open connections soon; until then the
  // kernel keeps who knocks.
  constexpr std::chrono::milliseconds kPause{50};
  constexpr int kDropped = 8;
  for (int i = 0; i < kDropped; ++i) half_open_.drop_oldest();
  poller_->pause(listener, true);
  try {
    thread_->post_at(std::chrono::steady_clock::now() + kPause,
                     [weak = weak_from_this(), listener] {
                       if (const auto self = weak.lock()) self->poller_->pause(listener, false);
                     });
  } catch (...) {
    poller_->pause(listener, false);  // nobody else would
    throw;
  }
}

void StreamHub::accepted(const std::string& transport, const std::string& address,
                         base::Descriptor socket) {
  std::shared_ptr<const Endpoint::Accept> accept;
  std::string name;
  {
    base::MutexLock lock(mutex_);
    if (connections_.closed()) return;
    accept = accept_;
    name = address + "#" + std::to_string(++accepted_count_);
  }
  const auto connection = make(std::move(name), true, (*accept)());
  if (!connections_.add(connection)) return connection->fail(closed_error());
  const std::weak_ptr<StreamConnection> weak_connection = connection;
  try {
    if (transport == "tcp") {
      half_open_.add(connection, [weak_connection](const Error& why) {
        if (const auto open = weak_connection.lock()) open->drop(why);
      });
      expect_words(connection, [weak_connection](const Error& why) {
        if (const auto silent = weak_connection.lock()) silent->close(why);
      });
      return connection->begin(make_tcp_link(std::move(socket)));
    }
    check_peer_user(socket.get());
    const auto step = Step::start(
        *poller_, std::move(socket), false,
        [weak = weak_from_this(), connection](base::Descriptor& ready) {
          if (const auto self = weak.lock()) self->reserve_.make_room();
          auto link = accept_shm_link(ready);
          if (link == nullptr) return false;
          connection->begin(std::move(link));
          return true;
        },
        [connection](const Error& error) { connection->fail(error); });
    const std::weak_ptr<Step> weak_step = step;
    half_open_.add(connection, [weak_connection, weak_step](const Error& why) {
      if (const auto pending = weak_step.lock()) pending->expire();
      if (const auto open = weak_connection.lock()) open->drop(why);
    });
    expect_words(connection, [weak_connection, weak_step](const Error& why) {
      if (const auto pending = weak_step.lock()) pending->expire();
      if (const auto silent = weak_connection.lock()) silent->close(why);
    });
  } catch (...) {
    connection->fail(to_error(std::current_exception()));
  }
}

void StreamHub::expect_words(const std::shared_ptr<StreamConnection>& connection,
                             HalfOpen::Drop expire) {
  // Whoever connects speaks at once. Even a slow machine needs no more than this.
  constexpr std::chrono::milliseconds kPatience{2500};
  const auto patience = std::min(options_.handshake_timeout, kPatience);
  thread_->post_at(
      std::chrono::steady_clock::now() + patience,
      [weak = std::weak_ptr(connection), patience, expire = std::move(expire)] {
        const auto silent = weak.lock();
        if (!silent || silent->has_spoken() || !silent->half_open()) return;
        expire(Error(ErrorCode::disconnected, "connection " + silent->describe() +
                                                  " did not finish its handshake within " +
                                                  std::to_string(patience.count()) + " ms"));
      });
}

void StreamHub::limit(const std::shared_ptr<Step>& step,
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

std::shared_ptr<Connection> StreamHub::connect(const std::string& address,
                                               ConnectionEvents events) {
  const auto connection = make(address, false, std::move(events));
  if (!connections_.add(connection)) {
    connection->fail(closed_error());
    return connection;
  }
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
      start_shm(address.substr(at + 3), connection, 0);
    } else {
      start_tcp(address.substr(at + 3), connection);
    }
  } catch (...) {
    const Error error = to_error(std::current_exception());
    connection->fail(connection->connect_error(error.what()));
  }
  return connection;
}

void StreamHub::start_shm(const std::string& name,
                          const std::shared_ptr<StreamConnection>& connection, int attempt) {
  constexpr std::chrono::milliseconds kPause{5};
  if (name.empty() || name.size() > kMaxShmName) {
    throw Error(ErrorCode::disconnected,
                "its name is empty or longer than " + std::to_string(kMaxShmName) + " characters");
  }
  const SocketAddress address = abstract_address(name);
  base::Descriptor socket = reserve_.take([] {
    return base::Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  });
  if (!socket) throw Error(ErrorCode::disconnected, text_of_errno(errno));
  if (::connect(socket.get(), address.get(), address.bytes) == 0) {
    check_peer_user(socket.get());
    const base::Descriptor memory = reserve_.take(&open_shm_memory);
    if (!memory)
      throw Error(ErrorCode::disconnected,
                  "shared memory: memfd_create failed: " + text_of_errno(errno));
    connection->begin(offer_shm_link(std::move(socket), memory));
    return;
  }
  // A unix socket whose queue of knockers is full does not wait in the background.
  if (errno != EAGAIN || attempt * kPause >= options_.handshake_timeout)
    throw Error(ErrorCode::disconnected, text_of_errno(errno));
  thread_->post_at(std::chrono::steady_clock::now() + kPause,
                   [weak = weak_from_this(), name, connection, attempt] {
                     const auto self = weak.lock();
                     if (!self) return;
                     try {
                       self->start_shm(name, connection, attempt + 1);
                     } catch (...) {
                       const Error error = to_error(std::current_exception());
                       connection->fail(connection->connect_error(error.what()));
                     }
                   });
}

void StreamHub::start_tcp(const std::string& address,
                          const std::shared_ptr<StreamConnection>& connection) {
  const auto ip = IpAddress::parse_with_port(address);
  if (!ip) throw Error(ErrorCode::disconnected, "it is not a numeric address with a port");
  base::Descriptor socket = reserve_.take([&ip] {
    return base::Descriptor(
        ::socket(ip->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  });
  if (!socket) throw Error(ErrorCode::disconnected, text_of_errno(errno));
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&ip->address), ip->bytes) == 0)
    return begin_tcp(connection, std::move(socket));
  if (errno != EINPROGRESS) throw Error(ErrorCode::disconnected, text_of_errno(errno));
  const auto step = Step::start(
      *poller_, std::move(socket), true,
      [connection](base::Descriptor& ready) {
        int error = 0;
        socklen_t bytes = sizeof(error);
        if (::getsockopt(ready.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) error = errno;
        if (error != 0) {
          connection->fail(connection->connect_error(text_of_errno(error)));
        } else {
          begin_tcp(connection, std::move(ready));
        }
        return true;
      },
      [connection](const Error& error) {
        connection->fail(connection->connect_error(error.what()));
      });
  limit(step, connection);
}

void StreamHub::begin_tcp(const std::shared_ptr<StreamConnection>& connection,
                          base::Descriptor socket) {
  if (connects_itself(socket.get())) {
    connection->fail(connection->connect_error("nobody listens there: it met itself"));
  } else {
    connection->begin(make_tcp_link(std::move(socket)));
  }
}

void StreamHub::close() {
  const auto open = connections_.close();
  if (!open) return;
  std::vector<Poller::SourceId> listeners;
  {
    // Whoever opens a listener keeps it under this lock, unless it finds the endpoint closed.
    base::MutexLock lock(mutex_);
    listeners.swap(listeners_);
  }
  for (const auto id : listeners) poller_->remove(id);
  for (const auto& connection : *open) connection->close(closed_error());
}

void StreamHub::join() {
  close();
  connections_.wait_until_empty();
  poller_->join();
  thread_->join();
  std::shared_ptr<const Endpoint::Accept> accept;
  base::MutexLock lock(mutex_);
  accept.swap(accept_);
}

class StreamEndpoint final : public Endpoint {
 public:
  StreamEndpoint(EndpointOptions options, StreamOptions stream)
      : hub_(std::make_shared<StreamHub>(std::move(options), std::move(stream))) {}
  ~StreamEndpoint() override { hub_->join(); }

  std::vector<std::string> listen(Accept accept) override {
    return hub_->listen(std::move(accept));
  }
  std::shared_ptr<Connection> connect(const std::string& address,
                                      ConnectionEvents events) override {
    return hub_->connect(address, std::move(events));
  }
  bool help(const std::atomic<bool>& done,
            std::chrono::steady_clock::time_point deadline) override {
    return hub_->help(done, deadline);
  }
  std::map<std::string, std::int64_t> counters() const override { return hub_->counters(); }
  void close() override { hub_->close(); }
  void join() override { hub_->join(); }

 private:
  const std::shared_ptr<StreamHub> hub_;
};

}  // namespace

std::unique_ptr<Endpoint> make_stream_endpoint(EndpointOptions options, StreamOptions stream) {
  // A name that is too long is the caller's mistake: say so now.
  static_cast<void>(Introduction::encode(options.self));
  base::check_names("transport", stream.transports, {"shm", "tcp"});
  check_bind_address(stream.bind_address);
  return std::make_unique<StreamEndpoint>(std::move(options), std::move(stream));
}

}  // namespace stitch::transport
