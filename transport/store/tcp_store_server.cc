#include <netdb.h>
#include <uv.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/store/byte_budget.h"
#include "stitch/transport/store/callback_guard.h"
#include "stitch/transport/store/framed_stream.h"
#include "stitch/transport/store/store_handshake.h"
#include "stitch/transport/store/store_map.h"
#include "stitch/transport/store/tcp_store.h"
#include "stitch/transport/store/tcp_store_protocol.h"

namespace stitch::transport {

namespace {

constexpr std::chrono::seconds kHandshakeTimeout{10};
constexpr std::size_t kMaxUnsentBytes = std::size_t{32} << 20;
constexpr std::size_t kBytesAroundKey = 128;  // what a key costs beside its bytes
constexpr std::chrono::milliseconds kPauseOfAccepting{100};
constexpr std::size_t kMaxWaits = 4096;  // of one client
constexpr int kBacklog = 1024;

// The result of a call that another thread waits for.
template <class T>
class Answer {
 public:
  void set(T value) {
    const base::MutexLock lock(mutex_);
    value_ = std::move(value);
    set_.notify_all();
  }
  T wait() {
    const base::MutexLock lock(mutex_);
    while (!value_.has_value()) set_.wait(mutex_);
    return std::move(*value_);
  }

 private:
  base::Mutex mutex_;
  base::CondVar set_;
  std::optional<T> value_ STITCH_GUARDED_BY(mutex_);
};

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24) == 127;
  const auto& six = reinterpret_cast<const sockaddr_in6&>(address);
  return IN6_IS_ADDR_LOOPBACK(&six.sin6_addr);
}

sockaddr_storage any_address(int family) {
  sockaddr_storage any{};
  any.ss_family = static_cast<sa_family_t>(family);
  return any;
}

// Where to listen for `host`, in the order to try. A literal address is taken as it is. A name may
// stand for an address that only other hosts see, or for 127.0.1.1 in /etc/hosts, so then all
// addresses of this host will do.
std::vector<sockaddr_storage> addresses_to_bind(const std::string& host, const std::string& store) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  const bool literal = ::getaddrinfo(host.c_str(), nullptr, &hints, &found) == 0;
  if (!literal) {
    hints.ai_flags = 0;
    if (const int status = ::getaddrinfo(host.c_str(), nullptr, &hints, &found); status != 0) {
      throw Error(ErrorCode::disconnected, store + " cannot listen: host \"" + host +
                                               "\" cannot be resolved: " + ::gai_strerror(status));
    }
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, &::freeaddrinfo);
  std::vector<sockaddr_storage> addresses;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    sockaddr_storage address{};
    std::memcpy(&address, each->ai_addr, each->ai_addrlen);
    if (literal || host == "localhost" || !is_loopback(address)) addresses.push_back(address);
  }
  if (!literal && host != "localhost") {
    addresses.push_back(any_address(AF_INET6));
    addresses.push_back(any_address(AF_INET));
  }
  return addresses;
}

// What a key costs the store with a value of that size.
std::size_t cost_of(const std::string& key, std::size_t value_bytes) {
  return key.size() + value_bytes + kBytesAroundKey;
}

void set_port(sockaddr_storage& address, std::uint16_t port) {
  // The port has the same place in both families.
  static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  reinterpret_cast<sockaddr_in&>(address).sin_port = htons(port);
}

}  // namespace

// Everything below runs on the loop's thread, except the constructor and what says otherwise.
class TcpStoreServer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(base::EventLoop& loop, const TcpStoreOptions& options)
      : loop_(loop),
        options_(options),
        budget_(std::make_shared<ByteBudget>(options.max_bytes)),
        frame_budget_(std::make_shared<ByteBudget>(options.max_bytes)) {}

  // Not on the loop's thread.
  void start() {
    const std::string name =
        "tcp store at " + store_address(options_.host, options_.port, ports_of(options_));
    std::vector<sockaddr_storage> addresses = addresses_to_bind(options_.host, name);
    Answer<int> answer;
    const bool posted = loop_.post([&, self = shared_from_this()] {
      int status = UV_ENOMEM;
      guard_callback([&] { status = self->listen(addresses); }, [](const Error&) {});
      answer.set(status);
    });
    if (!posted) {
      throw Error(ErrorCode::disconnected, name + " cannot listen: its event loop is closed");
    }
    if (const int status = answer.wait(); status < 0)
      throw Error(ErrorCode::disconnected, name + " cannot listen: " + uv_strerror(status));
  }

  // Any thread; returns when the port is free again, unless on the loop's thread.
  void stop() {
    if (loop_.on_loop_thread()) {
      close();
      return;
    }
    if (loop_.post([self = shared_from_this()] { self->close(); })) stopped_.wait();
  }

  std::uint16_t port() const { return port_; }

 private:
  // One client.
  class Session;
  struct Listener {
    uv_tcp_t tcp{};
    std::shared_ptr<Impl> server;  // until the handle is closed
    bool open = false;             // it is the one in use
  };
  // A reply that must wait for keys.
  struct Waiting {
    std::weak_ptr<Session> session;
    std::uint64_t request = 0;
    bool wants_value = false;
    std::vector<std::string> keys;
    BudgetShare share;
    base::EventLoop::TimerId timer = 0;
  };

  // 0, or the last reason why it was impossible.
  int listen(const std::vector<sockaddr_storage>& addresses) {
    int status = UV_EADDRNOTAVAIL;
    for (int offset = 0; offset < ports_of(options_); ++offset) {
      for (sockaddr_storage address : addresses) {
        set_port(address, static_cast<std::uint16_t>(options_.port + offset));
        status = listen_on(address);
        if (status == 0) return 0;
        if (status == UV_EADDRINUSE)
          break;  // not on another address of that port: clients would find the other server
      }
    }
    return status;
  }

  int listen_on(const sockaddr_storage& address) {
    auto* listener = new Listener{.server = shared_from_this()};
    uv_tcp_init(loop_.raw(), &listener->tcp);
    listener->tcp.data = listener;
    int status = uv_tcp_bind(&listener->tcp, reinterpret_cast<const sockaddr*>(&address), 0);
    if (status == 0) {
      status = uv_listen(reinterpret_cast<uv_stream_t*>(&listener->tcp), kBacklog,
                         [](uv_stream_t* handle, int ready) {
                           if (ready == 0)
                             static_cast<Listener*>(handle->data)->server->on_connection(handle);
                         });
    }
    if (status == 0) {
      sockaddr_storage bound{};
      int length = sizeof(bound);
      status = uv_tcp_getsockname(&listener->tcp, reinterpret_cast<sockaddr*>(&bound), &length);
      port_ = ntohs(reinterpret_cast<const sockaddr_in&>(bound).sin_port);
    }
    if (status == 0) {
      listener->open = true;
      listener_ = listener;
    } else {
      close(listener);
    }
    return status;
  }

  static void close(Listener* listener) {
    uv_close(reinterpret_cast<uv_handle_t*>(&listener->tcp), [](uv_handle_t* handle) {
      const std::unique_ptr<Listener> mine(static_cast<Listener*>(handle->data));
      if (mine->open) mine->server->stopped_.set(true);
    });
  }

  void close();
  // A connection waits to be accepted.
  void on_connection(uv_stream_t* listener) noexcept;
  void accept(uv_stream_t* listener);
  void perform(const std::shared_ptr<Session>& session, std::span<const std::byte> frame);
  base::Bytes reply_now(StoreOperation operation, const std::string& key,
                        base::ByteReader& arguments);
  // Makes room for a value of that size under `key`. Throws Error(overloaded).
  void make_room(const std::string& key, std::size_t value_bytes);
  void give_room_of(const std::string& key) noexcept;
  void wait_for(const std::shared_ptr<Session>& session, std::uint64_t request, bool wants_value,
                std::vector<std::string> keys, Store::Timeout timeout);
  void on_timeout(StoreMap::WaitId wait, Store::Timeout timeout);
  void wake_waiting();
  void reply_to(const Waiting& waiting);
  void forget(Session& session);

  base::EventLoop& loop_;
  const TcpStoreOptions options_;
  std::uint16_t port_ = 0;  // constant once start() has returned
  Answer<bool> stopped_;

  // Loop thread only.
  Listener* listener_ = nullptr;
  const std::shared_ptr<ByteBudget> budget_;        // of values and waits
  const std::shared_ptr<ByteBudget> frame_budget_;  // a store that is full still answers
  StoreMap map_;
  std::unordered_map<StoreMap::WaitId, Waiting> waiting_;
  std::unordered_map<Session*, std::shared_ptr<Session>> sessions_;
  std::map<std::uint64_t, Session*> strangers_;  // that shake hands, the oldest first
  std::uint64_t next_stranger_ = 1;
};

class TcpStoreServer::Impl::Session final : public FrameReceiver,
                                            public std::enable_shared_from_this<Session> {
 public:
  Session(std::shared_ptr<Impl> server, std::shared_ptr<FramedStream> stream, std::uint64_t number)
      : number_(number), server_(std::move(server)), stream_(std::move(stream)) {}

  void start() {
    stream_->set_max_unsent_bytes(kMaxUnsentBytes);
    timer_ = server_->loop_.call_at(
        base::EventLoop::Clock::now() + kHandshakeTimeout, [weak = weak_from_this()] {
          if (const auto self = weak.lock(); self && self->state_ != State::open)
            self->stream_->close(Error());
        });
    stream_->start(shared_from_this(), StoreHandshake::kHelloBytes);
  }

  void on_frame(FramedStream& stream, std::span<const std::byte> frame) override {
    switch (state_) {
      case State::hello:
        on_hello(frame);
        break;
      case State::proof:
        handshake_->take_proof(frame);
        stream.send(encode_answer(handshake_->proof().span()));
        stream.seal(handshake_->make_sealer(), handshake_->make_opener());
        open();
        break;
      case State::open:
        server_->perform(shared_from_this(), frame);
        break;
    }
  }

  // Says why before the connection is closed.
  void on_error(FramedStream& stream, const Error& error) override {
    if (state_ != State::open) {
      stream.send_last(encode_refusal(error.code(), error.what()));
    } else if (stream.unsent_bytes() == 0) {
      base::Bytes farewell;
      base::ByteWriter writer(farewell);
      writer.write(kFarewell);
      writer.write_bytes(encode_refused(error.code(), error.what()).span());
      stream.send_last(std::move(farewell));
    }
  }

  void on_closed(FramedStream&, const Error&) override {
    server_->loop_.cancel(timer_);
    server_->forget(*this);
  }

  void reply(std::uint64_t request, const base::Bytes& status_and_result) {
    base::Bytes bytes;
    base::ByteWriter writer(bytes);
    writer.write(request);
    writer.write_bytes(status_and_result.span());
    stream_->send(std::move(bytes));
  }

  FramedStream& stream() { return *stream_; }
  [[nodiscard]] std::uint64_t number() const { return number_; }

  std::size_t waits = 0;

 private:
  enum class State { hello, proof, open };

  void on_hello(std::span<const std::byte> frame) {
    const TcpStoreOptions& options = server_->options_;
    handshake_.emplace(StoreHandshake::Role::server, options.job, options.key);
    handshake_->take_hello(frame);
    if (server_->sessions_.size() - server_->strangers_.size() >= options.max_clients) {
      throw Error(ErrorCode::overloaded, "it has " + std::to_string(options.max_clients) +
                                             " clients already, the most it takes");
    }
    stream_->send(encode_answer(handshake_->hello().span()));
    if (handshake_->authenticated()) {
      state_ = State::proof;
      stream_->expect_frames_of(StoreHandshake::kProofBytes);
    } else {
      open();
    }
  }

  void open() {
    state_ = State::open;
    handshake_.reset();
    stream_->expect_frames_up_to(kMaxRequestBytes);
    stream_->set_budget(server_->frame_budget_);
    server_->loop_.cancel(timer_);
    server_->strangers_.erase(number_);
  }

  const std::uint64_t number_;
  const std::shared_ptr<Impl> server_;
  const std::shared_ptr<FramedStream> stream_;
  State state_ = State::hello;
  std::optional<StoreHandshake> handshake_;  // until it is open
  base::EventLoop::TimerId timer_ = 0;
};

void TcpStoreServer::Impl::close() {
  if (listener_ == nullptr) return;
  for (const auto& [address, session] : sessions_) session->stream().close(Error());
  close(std::exchange(listener_, nullptr));
}

void TcpStoreServer::Impl::on_connection(uv_stream_t* listener) noexcept {
  // libuv asks for no further connection before this one is accepted.
  guard_callback([&] { accept(listener); },
                 [&](const Error&) {
                   loop_.call_at(base::EventLoop::Clock::now() + kPauseOfAccepting,
                                 [self = shared_from_this(), listener] {
                                   if (self->listener_ != nullptr) self->on_connection(listener);
                                 });
                 });
}

void TcpStoreServer::Impl::accept(uv_stream_t* listener) {
  const auto stream = FramedStream::create(loop_.raw());
  if (const int status = uv_accept(listener, reinterpret_cast<uv_stream_t*>(stream->tcp()));
      status < 0 || listener_ == nullptr) {
    stream->close(Error());
    return;
  }
  guard_callback(
      [&] {
        if (strangers_.size() >= std::max<std::size_t>(1, options_.max_handshakes)) {
          const auto oldest = strangers_.begin();
          oldest->second->stream().close(Error());
          strangers_.erase(oldest);
        }
        const std::uint64_t number = next_stranger_++;
        const auto session = std::make_shared<Session>(shared_from_this(), stream, number);
        sessions_.emplace(session.get(), session);
        strangers_.emplace(number, session.get());
        session->start();
      },
      [&](const Error& error) { stream->close(error); });
}

void TcpStoreServer::Impl::forget(Session& session) {
  if (session.waits > 0) {
    std::erase_if(waiting_, [&](const auto& entry) {
      if (entry.second.session.lock().get() != &session) return false;
      loop_.cancel(entry.second.timer);
      map_.cancel(entry.first);
      return true;
    });
  }
  strangers_.erase(session.number());
  sessions_.erase(&session);
}

void TcpStoreServer::Impl::perform(const std::shared_ptr<Session>& session,
                                   std::span<const std::byte> frame) {
  base::ByteReader reader(frame, "request to a tcp store");
  const auto request = reader.read<std::uint64_t>();
  const auto operation = reader.read<StoreOperation>();
  const auto read_timeout = [&] {
    const Store::Timeout timeout(reader.read<std::int64_t>());
    reader.expect_end();
    return timeout;
  };
  base::Bytes answer;
  try {
    if (operation == StoreOperation::wait) {
      const std::uint32_t count = reader.read_count(sizeof(std::uint32_t));
      if (count > kMaxKeysOfAWait) {
        throw Error(ErrorCode::out_of_range,
                    "a wait for " + std::to_string(count) + " keys, more than the " +
                        std::to_string(kMaxKeysOfAWait) + " allowed, cannot be asked for");
      }
      std::vector<std::string> keys(count);
      for (std::string& key : keys) key = reader.read_string();
      const Store::Timeout timeout = read_timeout();
      check_keys(keys);
      wait_for(session, request, false, std::move(keys), timeout);
      return;
    }
    std::string key = reader.read_string();
    if (operation == StoreOperation::get) {
      const Store::Timeout timeout = read_timeout();
      check_key(key);
      wait_for(session, request, true, {std::move(key)}, timeout);
      return;
    }
    answer = encode_accepted(reply_now(operation, key, reader));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::protocol) throw;  // malformed
    session->reply(request, encode_refused(error.code(), error.what()));
    return;
  }
  wake_waiting();
  // What has been changed must not be called refused: if this cannot be sent, the stream ends.
  guard_callback([&] { session->reply(request, answer); },
                 [&](const Error& error) { session->stream().close(error); });
}

base::Bytes TcpStoreServer::Impl::reply_now(StoreOperation operation, const std::string& key,
                                            base::ByteReader& arguments) {
  base::Bytes result;
  base::ByteWriter writer(result);
  switch (operation) {
    case StoreOperation::set: {
      std::string value = arguments.read_string();
      arguments.expect_end();
      check_key(key);
      check_value(key, value);
      make_room(key, value.size());
      map_.set(key, std::move(value));
      return result;
    }
    case StoreOperation::try_get: {
      arguments.expect_end();
      check_key(key);
      const std::string* value = map_.find(key);
      writer.write(static_cast<std::uint8_t>(value != nullptr));
      writer.write_string(value == nullptr ? std::string_view() : *value);
      return result;
    }
    case StoreOperation::add: {
      const auto delta = arguments.read<std::int64_t>();
      arguments.expect_end();
      check_key(key);
      const std::int64_t sum = map_.sum(key, delta);
      make_room(key, std::to_string(sum).size());
      map_.set(key, std::to_string(sum));
      writer.write(sum);
      return result;
    }
    case StoreOperation::compare_and_set: {
      const bool is_expected = arguments.read<std::uint8_t>() != 0;
      std::optional<std::string> expected = arguments.read_string();
      if (!is_expected) expected.reset();
      const std::string desired = arguments.read_string();
      arguments.expect_end();
      check_compare(key, expected, desired);
      if (map_.matches(key, expected)) make_room(key, desired.size());
      writer.write_string(map_.compare_and_set(key, expected, desired));
      return result;
    }
    case StoreOperation::erase:
      arguments.expect_end();
      check_key(key);
      give_room_of(key);
      writer.write(static_cast<std::uint8_t>(map_.erase(key)));
      return result;
    case StoreOperation::get:
    case StoreOperation::wait:
      break;
  }
  throw Error(ErrorCode::protocol, "request to a tcp store has an unknown operation " +
                                       std::to_string(static_cast<int>(operation)));
}

void TcpStoreServer::Impl::wait_for(const std::shared_ptr<Session>& session, std::uint64_t request,
                                    bool wants_value, std::vector<std::string> keys,
                                    Store::Timeout timeout) {
  if (session->waits >= kMaxWaits) {
    throw Error(ErrorCode::overloaded,
                "a client already waits " + std::to_string(kMaxWaits) + " times");
  }
  BudgetShare share(budget_);
  std::size_t bytes = 0;  // they lie here and in the map
  for (const std::string& key : keys) bytes += 2 * cost_of(key, 0);
  share.resize(bytes);
  const StoreMap::WaitId wait = map_.wait(keys);
  if (wait != 0 && timeout <= Store::Timeout::zero()) {
    map_.cancel(wait);
    throw not_set_error(map_.missing(keys), timeout);
  }
  if (wait == 0) {
    base::Bytes result;
    if (wants_value) base::ByteWriter(result).write_string(*map_.find(keys[0]));
    session->reply(request, encode_accepted(result));
    return;
  }
  const base::EventLoop::TimerId timer =
      loop_.call_at(deadline_after(timeout), [weak = weak_from_this(), wait, timeout] {
        if (const auto self = weak.lock()) self->on_timeout(wait, timeout);
      });
  waiting_.emplace(
      wait, Waiting{session, request, wants_value, std::move(keys), std::move(share), timer});
  ++session->waits;
}

void TcpStoreServer::Impl::on_timeout(StoreMap::WaitId wait, Store::Timeout timeout) {
  auto node = waiting_.extract(wait);
  if (node.empty()) return;
  map_.cancel(wait);
  const auto session = node.mapped().session.lock();
  if (!session) return;
  --session->waits;
  guard_callback(
      [&] {
        const Error error = not_set_error(map_.missing(node.mapped().keys), timeout);
        session->reply(node.mapped().request, encode_refused(error.code(), error.what()));
      },
      [&](const Error& error) { session->stream().close(error); });
}

void TcpStoreServer::Impl::wake_waiting() {
  for (const StoreMap::WaitId wait : map_.take_ready()) {
    auto node = waiting_.extract(wait);
    if (node.empty()) continue;
    loop_.cancel(node.mapped().timer);
    const auto session = node.mapped().session.lock();
    if (!session) continue;
    --session->waits;
    // Not the fault of the one whose request woke it.
    guard_callback([&] { reply_to(node.mapped()); },
                   [&](const Error& error) { session->stream().close(error); });
  }
}

void TcpStoreServer::Impl::reply_to(const Waiting& waiting) {
  base::Bytes result;
  if (waiting.wants_value) {
    const std::string* value = map_.find(waiting.keys[0]);
    if (value == nullptr) throw not_set_error(waiting.keys, {});  // memory ran out in between
    base::ByteWriter(result).write_string(*value);
  }
  waiting.session.lock()->reply(waiting.request, encode_accepted(result));
}

void TcpStoreServer::Impl::make_room(const std::string& key, std::size_t value_bytes) {
  const std::string* value = map_.find(key);
  const std::size_t before = value == nullptr ? 0 : cost_of(key, value->size());
  const std::size_t after = cost_of(key, value_bytes);
  if (after > before) budget_->take(after - before);
  if (after < before) budget_->give(before - after);
}

void TcpStoreServer::Impl::give_room_of(const std::string& key) noexcept {
  const std::string* value = map_.find(key);
  if (value != nullptr) budget_->give(cost_of(key, value->size()));
}

TcpStoreServer::TcpStoreServer(base::EventLoop& loop, const TcpStoreOptions& options)
    : impl_(std::make_shared<Impl>(loop, options)) {
  impl_->start();
}
TcpStoreServer::~TcpStoreServer() { impl_->stop(); }
std::uint16_t TcpStoreServer::port() const { return impl_->port(); }

}  // namespace stitch::transport
