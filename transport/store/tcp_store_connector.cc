#include "stitch/transport/store/tcp_store_connector.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/transport/store/callback_guard.h"
#include "stitch/transport/store/listen_addresses.h"
#include "stitch/transport/store/tcp_store_protocol.h"

namespace stitch::transport {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kConnectLimit{3000};
constexpr milliseconds kAnswerLimitOfMany{1000};  // when there are other ports to try
constexpr milliseconds kAnswerLimitOfOne{10'000};
// For each step at the remaining ports when one has refused the secret: that error is reported
// soon.
constexpr milliseconds kLimitOnceRefused{500};
constexpr milliseconds kFirstPause{25};
constexpr milliseconds kLongestPause{1000};

}  // namespace

struct TcpStoreConnector::Resolving {
  uv_getaddrinfo_t request{};
  std::shared_ptr<TcpStoreConnector> connector;
};

struct TcpStoreConnector::Connecting {
  uv_connect_t request{};
  std::shared_ptr<TcpStoreConnector> connector;
  std::shared_ptr<FramedStream> stream;
};

TcpStoreConnector::TcpStoreConnector(base::EventLoop& loop, const TcpStoreOptions& options,
                                     base::UniqueFunction<void(Result)> done)
    : loop_(loop),
      options_(options),
      name_("tcp store at " + store_address(options.host, options.port, ports_of(options))),
      done_(std::move(done)),
      random_(std::random_device{}()),
      pause_(kFirstPause) {}

TcpStoreConnector::~TcpStoreConnector() = default;

template <class Work>
void TcpStoreConnector::guard(Work work) noexcept {
  guard_callback(work, [this](const Error& error) {
    finish(Error(error.code(), name_ + " cannot be reached: " + error.what()));
  });
}

void TcpStoreConnector::start() {
  guard([this] {
    const auto until = std::min(base::deadline_after(options_.connect_timeout), options_.deadline);
    overall_timer_ = loop_.call_at(until, [self = shared_from_this()] {
      self->guard([&] {
        const Error& last = self->refusal_ ? *self->refusal_ : self->cause_;
        self->finish(Error(last.code(), self->name_ + " cannot be reached within " +
                                            std::to_string(self->options_.connect_timeout.count()) +
                                            " ms: " + last.what()));
      });
    });
    resolve();
  });
}

template <class Then>
void TcpStoreConnector::call_in(base::EventLoop::Clock::duration delay, Then then) {
  loop_.cancel(timer_);
  timer_ = loop_.call_at(base::EventLoop::Clock::now() + delay, [weak = weak_from_this(), then] {
    if (const auto self = weak.lock(); self && !self->finished_) self->guard([&] { then(*self); });
  });
}

void TcpStoreConnector::resolve() {
  // libuv resolves names on four threads that it then keeps; an address needs none.
  addrinfo numeric{};
  numeric.ai_socktype = SOCK_STREAM;
  numeric.ai_flags = AI_NUMERICHOST;
  addrinfo* address = nullptr;
  if (::getaddrinfo(options_.host.c_str(), nullptr, &numeric, &address) == 0) {
    on_resolved(0, address);
    ::freeaddrinfo(address);
    return;
  }
  auto resolving = std::make_unique<Resolving>();
  resolving->connector = shared_from_this();
  resolving->request.data = resolving.get();
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  const int status = uv_getaddrinfo(
      loop_.raw(), &resolving->request,
      [](uv_getaddrinfo_t* request, int resolved, addrinfo* found) {
        const std::unique_ptr<Resolving> mine(static_cast<Resolving*>(request->data));
        mine->connector->guard([&] { mine->connector->on_resolved(resolved, found); });
        uv_freeaddrinfo(found);
      },
      options_.host.c_str(), nullptr, &hints);
  if (status < 0) {
    on_resolved(status, nullptr);
  } else {
    (void)resolving.release();  // the callback owns it
  }
}

void TcpStoreConnector::on_resolved(int status, const addrinfo* found) {
  if (finished_) return;
  targets_.clear();
  next_ = 0;
  refusing_ports_.clear();
  refusal_.reset();
  if (status < 0) {
    cause_ = Error(ErrorCode::disconnected,
                   "host \"" + options_.host + "\" cannot be resolved: " + uv_strerror(status));
  }
  for (int offset = 0; offset < ports_of(options_); ++offset) {
    const auto port = static_cast<std::uint16_t>(options_.port + offset);
    for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
      Target target{{}, port};
      std::memcpy(&target.address, each->ai_addr, each->ai_addrlen);
      set_port(target.address, port);
      targets_.push_back(target);
    }
  }
  try_next();
}

void TcpStoreConnector::try_next() {
  if (next_ == targets_.size()) {
    end_round();
    return;
  }
  const Target& target = targets_[next_++];
  auto connecting = std::make_unique<Connecting>();
  connecting->connector = shared_from_this();
  connecting->stream = FramedStream::create(loop_.raw());
  connecting->request.data = connecting.get();
  stream_ = connecting->stream;
  proving_ = false;
  handshake_.reset();
  const int status = uv_tcp_connect(
      &connecting->request, stream_->tcp(), reinterpret_cast<const sockaddr*>(&target.address),
      [](uv_connect_t* request, int connected) {
        const std::unique_ptr<Connecting> mine(static_cast<Connecting*>(request->data));
        mine->connector->guard([&] { mine->connector->on_connected(*mine->stream, connected); });
      });
  if (status < 0) {
    // Not directly: the recursion could be deep.
    call_in({}, [status](TcpStoreConnector& self) {
      self.attempt_failed(Error(ErrorCode::disconnected, uv_strerror(status)));
    });
    return;
  }
  (void)connecting.release();  // the callback owns it
  call_in(wrong_secret() ? kLimitOnceRefused : kConnectLimit, [](TcpStoreConnector& self) {
    self.attempt_failed(Error(ErrorCode::disconnected, "connection timed out"));
  });
}

void TcpStoreConnector::on_connected(FramedStream& stream, int status) {
  if (finished_ || stream_.get() != &stream) return;
  if (status < 0) {
    attempt_failed(Error(ErrorCode::disconnected, uv_strerror(status)));
    return;
  }
  call_in(wrong_secret()           ? kLimitOnceRefused
          : ports_of(options_) > 1 ? kAnswerLimitOfMany
                                   : kAnswerLimitOfOne,
          [](TcpStoreConnector& self) {
            self.attempt_failed(Error(ErrorCode::disconnected, "the server there does not answer"));
          });
  handshake_.emplace(StoreHandshake::Role::client, options_.job, options_.key);
  stream.start(shared_from_this(), StoreHandshake::kAnswerBytes);
  stream.send(handshake_->hello());
}

void TcpStoreConnector::on_frame(FramedStream& stream, std::span<const std::byte> frame) {
  if (finished_ || stream_.get() != &stream) return;
  try {
    if (!proving_) {
      handshake_->take_hello(decode_answer(frame, StoreHandshake::kHelloBytes));
      proving_ = true;
      if (handshake_->authenticated()) {
        stream.send(handshake_->proof());
        return;
      }
    } else {
      handshake_->take_proof(decode_answer(frame, StoreHandshake::kProofBytes));
      stream.seal(handshake_->make_sealer(), handshake_->make_opener());
    }
  } catch (const Error& error) {
    on_refused(error);
    return;
  }
  finish(Connected{std::exchange(stream_, nullptr), targets_[next_ - 1].port});
}

void TcpStoreConnector::on_refused(const Error& refusal) {
  const std::uint16_t port = targets_[next_ - 1].port;
  const std::string job = options_.job.empty() ? "" : " of job \"" + options_.job + '"';
  const Error error(refusal.code(), "tcp store at " + store_address(options_.host, port) +
                                        " refuses this client" + job + ": " + refusal.what());
  // It may be our server or another program on its port: the other ports have to be tried first.
  refusing_ports_.insert(port);
  if (!wrong_secret()) refusal_ = error;
  attempt_failed(error);
}

void TcpStoreConnector::on_closed(FramedStream& stream, const Error& why) {
  if (finished_ || stream_.get() != &stream) return;
  guard([&] {
    // A store that has sent its magic bytes sends the reason before it closes.
    attempt_failed(stream.greeted() && why.code() == ErrorCode::disconnected
                       ? Error(ErrorCode::protocol,
                               why.what() + std::string(" in the middle of the handshake"))
                       : why);
  });
}

void TcpStoreConnector::attempt_failed(const Error& why) {
  cause_ = why;
  loop_.cancel(timer_);
  if (const auto stream = std::exchange(stream_, nullptr)) stream->close(why);
  try_next();
}

void TcpStoreConnector::end_round() {
  if (wrong_secret() || refusing_ports_.size() == static_cast<std::size_t>(ports_of(options_))) {
    finish(*refusal_);
    return;
  }
  if (options_.one_round) {
    finish(Error(cause_.code(), name_ + " cannot be reached: " + cause_.what()));
    return;
  }
  // Jitter, so that clients that were started together do not retry together.
  const auto jitter = std::uniform_int_distribution<milliseconds::rep>(
      pause_.count() / 2, pause_.count() * 3 / 2)(random_);
  pause_ = std::min(2 * pause_, kLongestPause);
  call_in(milliseconds(jitter), [](TcpStoreConnector& self) { self.resolve(); });
}

void TcpStoreConnector::finish(Result result) {
  if (std::exchange(finished_, true)) return;
  loop_.cancel(timer_);
  loop_.cancel(overall_timer_);
  if (const auto stream = std::exchange(stream_, nullptr))
    stream->close(Error(ErrorCode::cancelled, "no longer wanted"));
  std::exchange(done_, nullptr)(std::move(result));
}

}  // namespace stitch::transport
