#include <uv.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/deadline.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/store/callback_guard.h"
#include "stitch/transport/store/listen_addresses.h"
#include "stitch/transport/store/store_requests.h"
#include "stitch/transport/store/store_session.h"
#include "stitch/transport/store/tcp_store.h"
#include "stitch/transport/store/tcp_store_protocol.h"

namespace stitch::transport {

namespace {

constexpr std::chrono::milliseconds kAcceptBackoff{100};  // after one that failed
constexpr int kBacklog = 1024;

// A result that another thread waits for.
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

}  // namespace

// Everything below runs on the loop's thread, unless stated otherwise; the constructor on any.
class TcpStoreServer::Impl final : public StoreSessionOwner,
                                   public std::enable_shared_from_this<Impl> {
 public:
  Impl(base::EventLoop& loop, const TcpStoreOptions& options)
      : loop_(loop),
        options_(options),
        frame_budget_(std::make_shared<ByteBudget>(options.max_bytes)),
        requests_(std::make_shared<StoreRequests>(loop, options.max_bytes)) {}

  // Not on the loop's thread.
  void start() {
    const std::string name =
        "tcp store at " + store_address(options_.host, options_.port, ports_of(options_));
    std::vector<sockaddr_storage> addresses = listen_addresses(options_.host, name);
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

  void check_room() const override;
  void on_open(StoreSession& session) override { handshaking_.erase(session.number()); }
  void on_request(const std::shared_ptr<StoreSession>& session,
                  std::span<const std::byte> frame) override {
    requests_->perform(session, frame);
  }
  void on_closed(StoreSession& session) override;

 private:
  struct Listener {
    uv_tcp_t tcp{};
    std::shared_ptr<Impl> server;  // until the handle is closed
    bool open = false;             // it is listening
  };

  // 0, or the libuv status of the last attempt.
  int listen(const std::vector<sockaddr_storage>& addresses) {
    int status = UV_EADDRNOTAVAIL;
    for (int offset = 0; offset < ports_of(options_); ++offset) {
      for (sockaddr_storage address : addresses) {
        set_port(address, static_cast<std::uint16_t>(options_.port + offset));
        status = listen_on(address);
        if (status == 0) return 0;
        if (status == UV_EADDRINUSE)
          break;  // not on another address of this port: clients would reach the other server
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
      port_ = port_of(bound);
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
  // A connection can be accepted.
  void on_connection(uv_stream_t* listener) noexcept;
  void accept(uv_stream_t* listener);

  base::EventLoop& loop_;
  const TcpStoreOptions options_;
  std::uint16_t port_ = 0;  // constant once start() has returned
  Answer<bool> stopped_;

  // Loop thread only.
  Listener* listener_ = nullptr;
  const std::shared_ptr<ByteBudget>
      frame_budget_;  // separate from values: a full store still replies
  const std::shared_ptr<StoreRequests> requests_;
  std::unordered_map<StoreSession*, std::shared_ptr<StoreSession>> sessions_;
  std::map<std::uint64_t, StoreSession*> handshaking_;  // in their handshake, the oldest first
  std::uint64_t next_session_ = 1;
};

void TcpStoreServer::Impl::check_room() const {
  if (sessions_.size() - handshaking_.size() < options_.max_clients) return;
  throw Error(ErrorCode::overloaded, "it has " + std::to_string(options_.max_clients) +
                                         " clients already, the most it takes");
}

void TcpStoreServer::Impl::on_closed(StoreSession& session) {
  requests_->forget(session);
  handshaking_.erase(session.number());
  sessions_.erase(&session);
}

void TcpStoreServer::Impl::close() {
  if (listener_ == nullptr) return;
  for (const auto& [address, session] : sessions_) session->close(Error());
  close(std::exchange(listener_, nullptr));
}

void TcpStoreServer::Impl::on_connection(uv_stream_t* listener) noexcept {
  // libuv reports no further connection before this one is accepted.
  guard_callback([&] { accept(listener); },
                 [&](const Error&) {
                   loop_.call_at(base::deadline_after(kAcceptBackoff),
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
        if (handshaking_.size() >= std::max<std::size_t>(1, options_.max_handshakes)) {
          const auto oldest = handshaking_.begin();
          oldest->second->close(Error());
          handshaking_.erase(oldest);
        }
        const std::uint64_t number = next_session_++;
        const auto session = std::make_shared<StoreSession>(shared_from_this(), loop_, options_,
                                                            frame_budget_, stream, number);
        sessions_.emplace(session.get(), session);
        handshaking_.emplace(number, session.get());
        session->start();
      },
      [&](const Error& error) { stream->close(error); });
}

TcpStoreServer::TcpStoreServer(base::EventLoop& loop, const TcpStoreOptions& options)
    : impl_(std::make_shared<Impl>(loop, options)) {
  impl_->start();
}
TcpStoreServer::~TcpStoreServer() { impl_->stop(); }
std::uint16_t TcpStoreServer::port() const { return impl_->port(); }

}  // namespace stitch::transport
