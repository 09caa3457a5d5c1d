#include <algorithm>
#include <random>
#include <thread>
#include <unordered_map>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/store/store_address.h"
#include "stitch/transport/store/store_map.h"
#include "stitch/transport/store/tcp_store.h"
#include "stitch/transport/store/tcp_store_protocol.h"
#include "stitch/transport/stream/stream_endpoint.h"

namespace stitch::transport {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// For one address, with the handshake.
constexpr milliseconds kAttemptLimit{10'000};
constexpr milliseconds kFirstPause{25};
constexpr milliseconds kLongestPause{1000};
// A request that waits is asked to end at its timeout; its reply is awaited this much longer.
constexpr milliseconds kGrace{500};

Clock::time_point later(Clock::time_point deadline, milliseconds by) {
  return deadline < Clock::time_point::max() - by ? deadline + by : Clock::time_point::max();
}

class TcpStore final : public Store, public std::enable_shared_from_this<TcpStore> {
 public:
  explicit TcpStore(const TcpStoreOptions& options)
      : options_(options), name_(store_name(options.host, options.port)) {
    if (options.port == 0) {
      throw Error(ErrorCode::invalid_argument,
                  name_ + " cannot be connected to: 0 is not the number of a port");
    }
    EndpointOptions self;
    self.self.id = Hello::kStoreClientId;
    self.self.epoch = 1;
    self.self.name = "client of a store";
    self.secret = options.key;
    self.encryption = options.encryption;
    self.max_frame_bytes = self.max_buffer_bytes = self.max_message_bytes = options.max_bytes;
    self.handshake_timeout = kAttemptLimit;
    endpoint_ = make_stream_endpoint(std::move(self), {{"tcp"}});
    connect();
  }

  void set(const std::string& key, const std::string& value) override {
    in_store(name_, [&] { check_entry(key, value); });
    call({.operation = StoreOperation::set, .key = key, .value = value});
  }

  std::string get(const std::string& key, Timeout timeout) override {
    in_store(name_, [&] { check_key(key); });
    const StoreReply reply = call({.operation = StoreOperation::get, .key = key}, timeout);
    if (!reply.value) throw in_store(not_set_error(key, timeout), name_);
    return *reply.value;
  }

  std::optional<std::string> try_get(const std::string& key) override {
    in_store(name_, [&] { check_key(key); });
    const StoreReply reply = call({.operation = StoreOperation::try_get, .key = key});
    return reply.value ? std::optional(*reply.value) : std::nullopt;
  }

  bool erase(const std::string& key) override {
    in_store(name_, [&] { check_key(key); });
    return call({.operation = StoreOperation::erase, .key = key}).count != 0;
  }

  Claimed claim(const std::string& key, const std::string& value) override {
    in_store(name_, [&] { check_entry(key, value); });
    const StoreReply reply = call({.operation = StoreOperation::claim, .key = key, .value = value});
    if (reply.count == 0) return {nullptr, value_of(reply)};
    return {std::make_unique<TcpClaim>(shared_from_this(), key), value};
  }

  std::map<std::string, std::string> claims(const std::string& prefix, std::size_t count,
                                            Timeout timeout) override {
    return texts_of(call({.operation = StoreOperation::claims,
                          .key = prefix,
                          .count = static_cast<std::int64_t>(count)},
                         timeout)
                        .entries);
  }

  std::string describe() const override { return name_; }

 private:
  struct TcpClaim final : Claim {
    TcpClaim(std::shared_ptr<TcpStore> of, std::string claimed)
        : store(std::move(of)), key(std::move(claimed)) {}
    ~TcpClaim() override { store->send({.operation = StoreOperation::release, .key = key}); }
    const std::shared_ptr<TcpStore> store;
    const std::string key;
  };

  // An attempt to connect. Guarded by mutex_.
  struct Attempt {
    bool open = false;
    std::optional<Error> error;
  };

  void connect();
  // Nothing on success.
  [[nodiscard]] std::optional<Error> try_address(const IpAddress& address,
                                                 Clock::time_point deadline);
  [[nodiscard]] ConnectionEvents events(const std::shared_ptr<Attempt>& attempt);

  [[nodiscard]] const std::string& value_of(const StoreReply& reply) const {
    if (reply.value) return *reply.value;
    throw Error(ErrorCode::protocol, name_ + " sent a reply without a value");
  }

  // Any failure to send ends the connection, which is reported to all calls.
  void send(const StoreRequest& request) {
    connection_->send(encode(request), [](const std::optional<Error>&) {});
  }
  // Sends a request and waits for its reply. With a timeout, the request waits at the store.
  StoreReply call(StoreRequest request, std::optional<Timeout> timeout = {});
  void fail(const Error& error) STITCH_REQUIRES(mutex_) {
    if (!failure_) failure_ = error;
    changed_.notify_all();
  }

  const TcpStoreOptions options_;
  const std::string name_;
  std::shared_ptr<Connection> connection_;  // constant once connected

  base::Mutex mutex_;
  base::CondVar changed_;
  std::optional<Error> failure_ STITCH_GUARDED_BY(mutex_);  // of all later calls
  std::uint64_t last_number_ STITCH_GUARDED_BY(mutex_) = 0;
  // Requests whose callers wait, and their replies.
  std::unordered_map<std::uint64_t, std::optional<StoreReply>> calls_ STITCH_GUARDED_BY(mutex_);
  std::unique_ptr<Endpoint> endpoint_;  // its callbacks use this object: ends first
};

void TcpStore::connect() {
  const auto deadline = std::min(base::deadline_after(options_.connect_timeout), options_.deadline);
  std::minstd_rand random(std::random_device{}());
  std::optional<Error> causes;  // of the last round that was not cut by the deadline
  for (milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    std::optional<Error> round;
    try {
      for (const IpAddress& address : store_addresses(options_.host, options_.port)) {
        const auto error = try_address(address, deadline);
        if (!error) return;
        if (error->code() == ErrorCode::unauthenticated)
          throw Error(error->code(), name_ + " refuses this client: " + error->what());
        if (error->code() == ErrorCode::protocol)
          throw Error(error->code(), name_ + " cannot be used: " + error->what());
        round = round ? Error(error->code(), round->what() + ("; " + std::string(error->what())))
                      : *error;
      }
    } catch (const Error& error) {
      if (error.code() != ErrorCode::disconnected) throw;
      round = error;
    }
    if (!causes || Clock::now() < deadline) causes = round;
    const auto next =
        Clock::now() + pause / 2 + milliseconds(random() % static_cast<unsigned>(pause.count()));
    if (options_.one_round || next >= deadline) {
      throw causes->with_prefix(name_ + " cannot be reached within " +
                                std::to_string(options_.connect_timeout.count()) + " ms");
    }
    std::this_thread::sleep_until(next);
  }
}

std::optional<Error> TcpStore::try_address(const IpAddress& address, Clock::time_point deadline) {
  const auto attempt = std::make_shared<Attempt>();
  connection_ =
      endpoint_->connect("tcp://" + address.text(), {Hello::kStoreId, 1}, events(attempt));
  {
    const base::MutexLock lock(mutex_);
    while (!attempt->open && !attempt->error) {
      if (!changed_.wait_until(mutex_, deadline)) break;
    }
    if (attempt->open) return std::nullopt;
    if (attempt->error) return attempt->error;
  }
  const Error silent(ErrorCode::disconnected, "connect to \"tcp://" + address.text() +
                                                  "\" failed: the server there does not answer");
  connection_->close(silent);
  return silent;
}

ConnectionEvents TcpStore::events(const std::shared_ptr<Attempt>& attempt) {
  ConnectionEvents events;
  events.on_open = [this, attempt](const std::shared_ptr<Connection>&) {
    const base::MutexLock lock(mutex_);
    attempt->open = true;
    changed_.notify_all();
  };
  events.on_message = [this](const std::shared_ptr<Connection>&, const Message& message) {
    StoreReply reply = decode_store_reply(message);
    const base::MutexLock lock(mutex_);
    const auto call = calls_.find(reply.number);
    if (call == calls_.end()) return;  // its caller no longer waits
    call->second = std::move(reply);
    changed_.notify_all();
  };
  events.on_closed = [this, attempt](const std::shared_ptr<Connection>&, const Error& why) {
    const base::MutexLock lock(mutex_);
    attempt->error = why;
    if (attempt->open) fail(Error(why.code(), name_ + " is gone: " + why.what()));
    changed_.notify_all();
  };
  return events;
}

StoreReply TcpStore::call(StoreRequest request, std::optional<Timeout> timeout) {
  const auto began = Clock::now();
  const auto limit = base::deadline_after(timeout.value_or(options_.connect_timeout));
  auto deadline = std::min(limit, options_.deadline);
  bool stopped = !timeout;
  {
    const base::MutexLock lock(mutex_);
    if (failure_) throw Error(*failure_);
    request.number = ++last_number_;
    calls_.emplace(request.number, std::nullopt);
  }
  send(request);
  base::MutexLock lock(mutex_);
  while (!failure_ && !calls_[request.number]) {
    if (changed_.wait_until(mutex_, deadline) || failure_ || calls_[request.number]) continue;
    if (std::exchange(stopped, true)) break;
    deadline = later(deadline, kGrace);
    lock.unlock();
    send({.operation = StoreOperation::stop_waiting,
          .count = static_cast<std::int64_t>(request.number)});
    lock.lock();
  }
  const std::optional<StoreReply> reply = std::move(calls_.extract(request.number).mapped());
  if (reply && reply->error) {
    throw in_store(Error(*reply->error, reply->value ? *reply->value : "no reason was given"),
                   name_);
  }
  if (reply) return *reply;
  if (failure_) throw Error(*failure_);
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - began);
  throw Error(ErrorCode::timeout,
              name_ + " did not answer within " + std::to_string(waited.count()) + " ms");
}

}  // namespace

std::shared_ptr<Store> make_tcp_store(const TcpStoreOptions& options) {
  return std::make_shared<TcpStore>(options);
}

}  // namespace stitch::transport
