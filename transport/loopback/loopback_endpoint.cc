// One file, though long: the network, its endpoints and both halves of a connection share their
// state.
#include "stitch/transport/loopback/loopback_endpoint.h"

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/task_thread.h"
#include "stitch/transport/connection_set.h"
#include "stitch/transport/endpoint_shell.h"
#include "stitch/transport/handshaking_connection.h"
#include "stitch/transport/message_limits.h"

namespace stitch::transport {

namespace {

class LoopbackConnection;

constexpr const char* kScheme = "loopback:";

// What a loopback endpoint and its connections share. Kept alive by these and by the connections of
// its peers. Thread contract: any thread.
class LoopbackEndpointState : public std::enable_shared_from_this<LoopbackEndpointState> {
 public:
  LoopbackEndpointState(EndpointOptions options, std::shared_ptr<LoopbackNetwork> network)
      : options(std::move(options)), network(std::move(network)) {}

  EndpointOptions options;  // constant once it listens or connects
  const std::shared_ptr<LoopbackNetwork> network;
  const std::shared_ptr<base::TaskThread> thread = std::make_shared<base::TaskThread>();

  [[nodiscard]] std::vector<std::string> listen(Endpoint::Accept accept);
  [[nodiscard]] std::vector<std::string> bind();
  void become(const Hello& self, const std::vector<std::string>& /*addresses*/) {
    options.self = self;
  }
  [[nodiscard]] std::shared_ptr<Connection> connect(const std::string& address, Wanted whom,
                                                    ConnectionEvents events);
  void close();
  void join();

  void remove(const std::shared_ptr<LoopbackConnection>& connection) {
    connections_.remove(connection);
  }

 private:
  // On this endpoint's thread: makes the accepting half for `from` and joins the two.
  void accept(const std::shared_ptr<LoopbackConnection>& from);

  ConnectionSet<LoopbackConnection> connections_;
  base::Mutex mutex_;
  std::string address_ STITCH_GUARDED_BY(mutex_);
  std::shared_ptr<const Endpoint::Accept> accept_ STITCH_GUARDED_BY(mutex_);
  // Connections that have come before it listens.
  std::vector<std::shared_ptr<LoopbackConnection>> early_ STITCH_GUARDED_BY(mutex_);
};

[[nodiscard]] Error closed_endpoint_error() {
  return Error(ErrorCode::shutting_down, "loopback endpoint is closed");
}

}  // namespace

// The listening endpoints by address. Thread contract: any thread.
class LoopbackNetwork::Impl {
 public:
  [[nodiscard]] std::string add(const std::shared_ptr<LoopbackEndpointState>& endpoint) {
    base::MutexLock lock(mutex_);
    const std::string address = kScheme + std::to_string(++last_port_);
    listeners_[address] = endpoint;
    return address;
  }
  void remove(const std::string& address) {
    base::MutexLock lock(mutex_);
    listeners_.erase(address);
  }
  [[nodiscard]] std::shared_ptr<LoopbackEndpointState> find(const std::string& address) {
    base::MutexLock lock(mutex_);
    const auto found = listeners_.find(address);
    return found == listeners_.end() ? nullptr : found->second.lock();
  }

 private:
  base::Mutex mutex_;
  std::uint64_t last_port_ STITCH_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::weak_ptr<LoopbackEndpointState>> listeners_ STITCH_GUARDED_BY(mutex_);
};

namespace {

// One half of a loopback connection. Everything that arrives is a task on its endpoint's thread, in
// order.
class LoopbackConnection final : public HandshakingConnection {
 public:
  LoopbackConnection(std::shared_ptr<LoopbackEndpointState> endpoint,
                     std::shared_ptr<LoopbackEndpointState> peer_endpoint,
                     std::optional<Wanted> whom, std::string name, ConnectionEvents events)
      : HandshakingConnection(endpoint->options, whom, std::move(events), endpoint->thread),
        endpoint_(std::move(endpoint)),
        peer_endpoint_(std::move(peer_endpoint)),
        name_(std::move(name)) {}

  void send(Message message, SendDone done) override;
  [[nodiscard]] std::string describe() const override { return name_; }
  [[nodiscard]] bool no_process_listens() const override { return no_process_listens_.load(); }
  [[nodiscard]] bool within_host() const override { return true; }
  // At the end of an attempt, before finish_reading(): no endpoint is there.
  void set_no_process_listens() noexcept { no_process_listens_.store(true); }
  [[nodiscard]] LoopbackEndpointState& endpoint() noexcept { return *endpoint_; }

  // Connects two halves; false when one has been shut.
  static bool link(const std::shared_ptr<LoopbackConnection>& connecting,
                   const std::shared_ptr<LoopbackConnection>& accepting);

  // On this half's thread.
  void begin() {
    if (reading_) start();
  }
  void handshake_arrived(std::span<const std::byte> message) {
    if (reading_) static_cast<void>(received_handshake(message));
  }
  void deliver(Message message) {
    note_heard();
    if (reading_ && !in_handshake()) received(std::move(message));
  }
  void finish_reading(const Error& error) {
    if (std::exchange(reading_, false)) ended(error);
  }

 protected:
  void transmit_handshake(base::Bytes message) override;
  void shut() override;
  void finished() override {
    endpoint_->remove(std::static_pointer_cast<LoopbackConnection>(shared_from_this()));
  }

 private:
  // A message in flight, in memory of the receiver.
  struct Parcel {
    Message copy;
    std::optional<Error> violation;  // the reason for which the receiver refuses it
    SendDone done;
  };
  using ParcelPtr = std::unique_ptr<Parcel>;
  void pack(const Message& message, Parcel& parcel) const;
  void transmit(ParcelPtr parcel);
  [[nodiscard]] std::shared_ptr<LoopbackConnection> self() {
    return std::static_pointer_cast<LoopbackConnection>(shared_from_this());
  }
  [[nodiscard]] std::shared_ptr<LoopbackConnection> other() {
    base::MutexLock lock(link_mutex_);
    return other_.lock();
  }

  const std::shared_ptr<LoopbackEndpointState> endpoint_;
  const std::shared_ptr<LoopbackEndpointState>
      peer_endpoint_;  // null when no endpoint listens at the address
  const std::string name_;
  bool reading_ = true;  // on this half's thread only
  std::atomic<bool> no_process_listens_{false};

  base::Mutex link_mutex_;
  std::weak_ptr<LoopbackConnection> other_ STITCH_GUARDED_BY(link_mutex_);
  bool shut_ STITCH_GUARDED_BY(link_mutex_) = false;
};

bool LoopbackConnection::link(const std::shared_ptr<LoopbackConnection>& connecting,
                              const std::shared_ptr<LoopbackConnection>& accepting) {
  {
    // No other thread has the accepting half until the connecting one refers to it.
    base::MutexLock lock(accepting->link_mutex_);
    accepting->other_ = connecting;
  }
  base::MutexLock lock(connecting->link_mutex_);
  if (connecting->shut_) return false;
  connecting->other_ = accepting;
  return true;
}

void LoopbackConnection::send(Message message, SendDone done) {
  auto parcel = std::make_unique<Parcel>();
  if (peer_endpoint_ != nullptr && !closed()) pack(message, *parcel);
  parcel->done = std::move(done);
  when_open([self = self(), parcel = std::move(parcel)](const std::optional<Error>& error) mutable {
    if (!error) return self->transmit(std::move(parcel));
    if (parcel->done) parcel->done(error);
  });
}

// Leaves the buffers out where there is no memory for them.
void copy_buffers(const std::vector<Buffer>& from, const Allocator& allocate, Message& to) {
  try {
    for (const Buffer& buffer : from) {
      to.buffers.push_back(allocate(buffer.device, buffer.bytes));
      if (buffer.bytes > 0) std::memcpy(to.buffers.back().data, buffer.data, buffer.bytes);
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::overloaded) throw;
    std::vector<std::size_t> sizes;
    for (const Buffer& buffer : from) sizes.push_back(buffer.bytes);
    leave_out_buffers(to, sizes);
  }
}

void LoopbackConnection::pack(const Message& message, Parcel& parcel) const {
  const EndpointOptions& to = peer_endpoint_->options;
  try {
    check_size("frame", message.frame.size(), to.max_frame_bytes, name_);
    for (const Buffer& buffer : message.buffers)
      check_size("buffer", buffer.bytes, to.max_buffer_bytes, name_);
    parcel.copy.frame.append(message.frame.data(), message.frame.size());
    copy_buffers(message.buffers, to.allocator, parcel.copy);
  } catch (...) {
    parcel.violation = to_error(std::current_exception());
  }
}

void LoopbackConnection::transmit(ParcelPtr parcel) {
  const std::shared_ptr<LoopbackConnection> to = other();
  std::optional<Error> failure = reason();
  if (!failure && !to)
    failure = Error(ErrorCode::disconnected, "connection " + name_ + " has lost its peer");
  if (!failure && parcel->violation) {
    peer_endpoint_->thread->post([to, why = std::move(*parcel->violation)] { to->close(why); });
  } else if (!failure) {
    peer_endpoint_->thread->post(
        [to, message = std::move(parcel->copy)]() mutable { to->deliver(std::move(message)); });
  }
  if (!parcel->done) return;
  thread().post(
      [done = std::move(parcel->done), failure = std::move(failure)]() mutable { done(failure); });
}

void LoopbackConnection::transmit_handshake(base::Bytes message) {
  if (const auto to = other()) {
    peer_endpoint_->thread->post(
        [to, message = std::move(message)] { to->handshake_arrived(message.span()); });
  }
}

void LoopbackConnection::shut() {
  std::shared_ptr<LoopbackConnection> to;
  {
    base::MutexLock lock(link_mutex_);
    shut_ = true;
    to = other_.lock();
  }
  const std::string connection = "connection " + name_;
  thread().post([self = self(), connection] {
    self->finish_reading(Error(ErrorCode::disconnected, connection + " is closed"));
  });
  if (!to) return;
  peer_endpoint_->thread->post([to] {
    to->finish_reading(
        Error(ErrorCode::disconnected, "connection " + to->describe() + " was closed by the peer"));
  });
}

std::vector<std::string> LoopbackEndpointState::listen(Endpoint::Accept accept) {
  std::vector<std::shared_ptr<LoopbackConnection>> early;
  std::string address;
  {
    base::MutexLock lock(mutex_);
    if (connections_.closed()) throw closed_endpoint_error();
    if (accept_ != nullptr)
      throw Error(ErrorCode::invalid_argument, "endpoint listens already, on " + address_);
    accept_ = std::make_shared<const Endpoint::Accept>(std::move(accept));
    if (address_.empty()) address_ = network->impl().add(shared_from_this());
    address = address_;
    early.swap(early_);
  }
  for (auto& each : early) thread->post([self = shared_from_this(), each] { self->accept(each); });
  return {address};
}

std::vector<std::string> LoopbackEndpointState::bind() {
  base::MutexLock lock(mutex_);
  if (connections_.closed()) throw closed_endpoint_error();
  if (address_.empty()) address_ = network->impl().add(shared_from_this());
  return {address_};
}

std::shared_ptr<Connection> LoopbackEndpointState::connect(const std::string& address, Wanted whom,
                                                           ConnectionEvents events) {
  std::shared_ptr<LoopbackEndpointState> to = network->impl().find(address);
  auto connection = std::make_shared<LoopbackConnection>(shared_from_this(), to, whom, address,
                                                         std::move(events));
  if (!connections_.add(connection)) {
    thread->post([connection] { connection->finish_reading(closed_endpoint_error()); });
  } else if (to == nullptr) {
    connection->set_no_process_listens();
    thread->post([connection] {
      connection->finish_reading(Error(ErrorCode::disconnected,
                                       "connect to \"" + connection->describe() +
                                           "\" failed: no endpoint of this network listens there"));
    });
  } else {
    to->thread->post([to, connection] { to->accept(connection); });
  }
  return connection;
}

void LoopbackEndpointState::accept(const std::shared_ptr<LoopbackConnection>& from) {
  std::shared_ptr<const Endpoint::Accept> accept;
  {
    base::MutexLock lock(mutex_);
    accept = accept_;
    if (accept == nullptr && !connections_.closed()) {
      early_.push_back(from);
      return;
    }
  }
  LoopbackEndpointState& other = from->endpoint();
  if (accept == nullptr) {
    from->set_no_process_listens();
    other.thread->post([from] {
      from->finish_reading(
          Error(ErrorCode::disconnected,
                "connect to \"" + from->describe() + "\" failed: the endpoint there is closed"));
    });
    return;
  }
  const auto half = std::make_shared<LoopbackConnection>(
      shared_from_this(), other.shared_from_this(), std::nullopt,
      from->describe() + " from worker id " + std::to_string(other.options.self.id), (*accept)());
  const bool added = connections_.add(half);
  if (!added || !LoopbackConnection::link(from, half)) {
    half->finish_reading(Error(ErrorCode::disconnected, "connection " + half->describe() +
                                                            " was closed before it was accepted"));
    if (!added) from->set_no_process_listens();
    if (!added)
      from->close(Error(ErrorCode::disconnected, "connect to \"" + from->describe() +
                                                     "\" failed: the endpoint there is closed"));
    return;
  }
  // Each half must have sent its hello before it receives one, as it answers immediately. Messages
  // of `from` arrive on this thread, and so after begin().
  other.thread->post([from] { from->begin(); });
  half->begin();
}

void LoopbackEndpointState::close() {
  const Error closed = closed_endpoint_error();
  const auto open = connections_.close();
  if (!open) return;
  std::string address;
  std::shared_ptr<const Endpoint::Accept> accept;
  std::vector<std::shared_ptr<LoopbackConnection>> early;
  {
    // listen() stores the address under this lock, unless the endpoint is closed.
    base::MutexLock lock(mutex_);
    address.swap(address_);
    accept = std::move(accept_);
    early.swap(early_);
  }
  for (auto& each : early) thread->post([self = shared_from_this(), each] { self->accept(each); });
  if (!address.empty()) network->impl().remove(address);
  for (const auto& connection : *open) connection->close(closed);
}

void LoopbackEndpointState::join() {
  close();
  connections_.wait_until_empty();
  thread->join();
}

}  // namespace

LoopbackNetwork::LoopbackNetwork() : impl_(std::make_shared<Impl>()) {}
LoopbackNetwork::~LoopbackNetwork() = default;

std::shared_ptr<LoopbackNetwork> LoopbackNetwork::process_wide() {
  static const auto network = std::make_shared<LoopbackNetwork>();
  return network;
}

std::unique_ptr<Endpoint> make_loopback_endpoint(EndpointOptions options,
                                                 std::shared_ptr<LoopbackNetwork> network) {
  // Reports a name that is too long now, to the caller.
  static_cast<void>(Introduction::encode(options.self));
  if (network == nullptr) network = LoopbackNetwork::process_wide();
  return std::make_unique<EndpointShell<LoopbackEndpointState>>(
      std::make_shared<LoopbackEndpointState>(std::move(options), std::move(network)));
}

}  // namespace stitch::transport
