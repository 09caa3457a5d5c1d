#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/transport/store/store_address.h"
#include "stitch/transport/store/store_service.h"
#include "stitch/transport/store/tcp_store.h"
#include "stitch/transport/store/tcp_store_protocol.h"
#include "stitch/transport/stream/stream_endpoint.h"

namespace stitch::transport {

namespace {

// Of all requests that are being received.
constexpr std::size_t kMaxReceivingBytes = std::size_t{256} << 20;
// Of replies that a client has not read: from here on no more of its requests are read, and it is
// dropped.
constexpr std::size_t kPauseAtUnsent = std::size_t{16} << 20;
constexpr std::size_t kDropAtUnsent = std::size_t{256} << 20;

}  // namespace

// Thread contract: any thread. No lock is held while it sends.
class TcpStoreServer::Impl {
 public:
  explicit Impl(const TcpStoreOptions& options) : options_(options), service_(options.max_bytes) {
    const std::string name = store_name(options.host, options.port);
    EndpointOptions self;
    self.self.id = Hello::kStoreId;
    self.self.epoch = 1;
    self.self.name = "store";
    self.secret = options.key;
    self.encryption = options.encryption;
    self.max_frame_bytes = self.max_message_bytes = kMaxRequestBytes;
    self.max_receiving_bytes = kMaxReceivingBytes;
    try {
      std::vector<ListeningSocket> sockets = listen_for_store(options.host, options.port);
      port_ = bound_address(sockets.at(0).socket.get()).port();
      endpoint_ = make_stream_endpoint(std::move(self), {{"tcp"}}, std::move(sockets));
      addresses_ = endpoint_->listen([this] { return events(); });
    } catch (const Error& error) {
      throw Error(error.code(), name + " cannot listen: " + error.what());
    }
  }

  [[nodiscard]] std::uint16_t port() const { return port_; }
  [[nodiscard]] const std::vector<std::string>& addresses() const { return addresses_; }

 private:
  struct Client {
    StoreService::Client number;
    std::shared_ptr<Connection> connection;
    std::shared_ptr<std::atomic<std::size_t>> unsent = std::make_shared<std::atomic<std::size_t>>();
  };

  [[nodiscard]] ConnectionEvents events() {
    ConnectionEvents events;
    events.check_peer = [this](const Hello& peer) { check(peer); };
    events.on_open = [this](const std::shared_ptr<Connection>& connection) {
      const base::MutexLock lock(mutex_);
      const auto number = ++last_client_;
      clients_.emplace(number, Client{number, connection});
      numbers_.emplace(connection.get(), number);
    };
    events.on_message = [this](const std::shared_ptr<Connection>& connection, Message message) {
      on_message(connection, message);
    };
    events.on_closed = [this](const std::shared_ptr<Connection>& connection, const Error&) {
      const base::MutexLock lock(mutex_);
      const auto number = numbers_.extract(connection.get());
      if (number.empty()) return;
      service_.forget(number.mapped());
      clients_.erase(number.mapped());
    };
    return events;
  }

  void check(const Hello& peer) {
    if (peer.id != Hello::kStoreClientId) {
      throw Error(ErrorCode::protocol, "a store listens here, and no worker");
    }
    const base::MutexLock lock(mutex_);
    if (clients_.size() < options_.max_clients) return;
    throw Error(ErrorCode::overloaded, "the store has " + std::to_string(options_.max_clients) +
                                           " clients already, the most it takes");
  }

  void on_message(const std::shared_ptr<Connection>& connection, const Message& message) {
    const StoreRequest request = decode_store_request(message);
    std::vector<std::pair<Client, StoreReply>> due;
    {
      const base::MutexLock lock(mutex_);
      const auto number = numbers_.find(connection.get());
      if (number == numbers_.end()) return;
      for (auto& [client, reply] : service_.serve(number->second, request)) {
        const auto found = clients_.find(client);
        if (found != clients_.end()) due.emplace_back(found->second, std::move(reply));
      }
    }
    for (const auto& [client, reply] : due) send(client, reply);
  }

  static void send(const Client& client, const StoreReply& reply) {
    Message message = encode(reply);
    const std::size_t bytes = message.frame.size() + (reply.value ? reply.value->size() : 0);
    const std::size_t unsent = client.unsent->fetch_add(bytes) + bytes;
    if (unsent > kDropAtUnsent) {
      client.connection->close(
          Error(ErrorCode::overloaded, "the client does not read the replies of the store"));
    } else if (unsent > kPauseAtUnsent) {
      client.connection->pause_reading(true);
    }
    client.connection->send(std::move(message),
                            [count = client.unsent, bytes,
                             weak = std::weak_ptr(client.connection)](const std::optional<Error>&) {
                              const std::size_t before = count->fetch_sub(bytes);
                              if (before <= kPauseAtUnsent || before - bytes > kPauseAtUnsent)
                                return;
                              if (const auto connection = weak.lock())
                                connection->pause_reading(false);
                            });
  }

  const TcpStoreOptions options_;
  std::uint16_t port_ = 0;
  std::vector<std::string> addresses_;

  base::Mutex mutex_;
  StoreService service_ STITCH_GUARDED_BY(mutex_);
  StoreService::Client last_client_ STITCH_GUARDED_BY(mutex_) = 0;
  std::unordered_map<StoreService::Client, Client> clients_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<Connection*, StoreService::Client> numbers_ STITCH_GUARDED_BY(mutex_);
  std::unique_ptr<Endpoint> endpoint_;  // its callbacks use this object: ends first
};

TcpStoreServer::TcpStoreServer(const TcpStoreOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}
TcpStoreServer::~TcpStoreServer() = default;
std::uint16_t TcpStoreServer::port() const { return impl_->port(); }
const std::vector<std::string>& TcpStoreServer::addresses() const { return impl_->addresses(); }

}  // namespace stitch::transport
