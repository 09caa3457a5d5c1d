#include <algorithm>
#include <unordered_map>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/deadline.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/store/callback_guard.h"
#include "stitch/transport/store/framed_stream.h"
#include "stitch/transport/store/store_map.h"
#include "stitch/transport/store/tcp_store.h"
#include "stitch/transport/store/tcp_store_connector.h"
#include "stitch/transport/store/tcp_store_protocol.h"

namespace stitch::transport {

namespace {

using Deadline = std::chrono::steady_clock::time_point;

// The server ends a get or wait at its timeout and names the missing keys; the client waits this
// much longer for that.
constexpr std::chrono::milliseconds kGrace{500};

Deadline later(Deadline deadline, std::chrono::milliseconds by) {
  return deadline < Deadline::max() - by ? deadline + by : Deadline::max();
}

// The connection and the calls that wait for replies. Shared by the store and its stream.
// Thread contract: connect() and call() block, any thread but the loop's; the rest is called on the
// loop's thread.
class Calls final : public FrameReceiver, public std::enable_shared_from_this<Calls> {
 public:
  Calls(base::EventLoop& loop, const TcpStoreOptions& options) : loop_(loop), options_(options) {}

  void connect() STITCH_EXCLUDES(mutex_) {
    if (loop_.on_loop_thread())
      throw Error(ErrorCode::invalid_argument,
                  name() + " cannot be connected to on the thread of its event loop");
    if (options_.port == 0)
      throw Error(ErrorCode::invalid_argument,
                  name() + " cannot be connected to: 0 is not the number of a port");
    const bool posted = loop_.post([self = shared_from_this()] {
      const auto done = [self](TcpStoreConnector::Result result) {
        self->on_connected(std::move(result));
      };
      guard_callback(
          [&] { std::make_shared<TcpStoreConnector>(self->loop_, self->options_, done)->start(); },
          [&](const Error& error) { self->fail(error); });
    });
    if (!posted)
      throw Error(ErrorCode::disconnected, name() + " cannot be reached: its event loop is closed");
    // The connector has its own timeout; this one is for a loop that is closed meanwhile.
    const Deadline deadline = later(base::deadline_after(options_.connect_timeout), 2 * kGrace);
    const base::MutexLock lock(mutex_);
    while (!connected_ && !failure_) {
      if (changed_.wait_until(mutex_, deadline) || connected_ || failure_) continue;
      failure_ = Error(ErrorCode::disconnected,
                       name() + " cannot be reached: its event loop does not run");
    }
    if (failure_) throw Error(*failure_);
  }

  // Sends a request and waits for its result, at most until `limit` and the deadline of the client.
  // `write` writes the request after its id.
  template <class WriteRequest>
  base::Bytes call(Deadline limit, WriteRequest write) STITCH_EXCLUDES(mutex_) {
    const Deadline deadline = std::min(limit, options_.deadline);
    if (loop_.on_loop_thread())
      throw Error(ErrorCode::invalid_argument,
                  name() + " cannot be used on the thread of its event loop");
    const auto began = std::chrono::steady_clock::now();
    std::uint64_t id = 0;
    {
      const base::MutexLock lock(mutex_);
      if (failure_) throw Error(*failure_);
      id = next_id_++;
    }
    base::Bytes request;
    base::ByteWriter writer(request);
    writer.write(id);
    write(writer);
    Pending pending;
    const Registered registered(*this, id, pending);
    const bool posted =
        loop_.post([self = shared_from_this(), request = std::move(request)]() mutable {
          if (!self->stream_) return;
          guard_callback([&] { self->stream_->send(std::move(request)); },
                         [&](const Error& error) { self->stream_->close(error); });
        });
    const base::MutexLock lock(mutex_);
    while (posted && !pending.done) {
      if (pending.changed.wait_until(mutex_, deadline) || pending.done) continue;
      break;
    }
    if (!posted)
      throw Error(ErrorCode::disconnected, name() + " is gone: its event loop is closed");
    if (!pending.done) {
      const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(
          std::chrono::steady_clock::now() - began);
      throw Error(ErrorCode::timeout,
                  name() + " did not answer within " + std::to_string(waited.count()) + " ms");
    }
    if (pending.error) throw Error(*pending.error);
    return std::move(pending.result);
  }

  // Any thread.
  void close() {
    loop_.post([self = shared_from_this()] {
      self->closed_ = true;
      if (self->stream_) self->stream_->close(this_side_closed());
    });
  }

  // Any thread, once connected.
  [[nodiscard]] std::string name() const {
    return port_ != 0
               ? "tcp store at " + store_address(options_.host, port_)
               : "tcp store at " + store_address(options_.host, options_.port, ports_of(options_));
  }
  [[nodiscard]] const TcpStoreOptions& options() const { return options_; }

  void on_frame(FramedStream& stream, std::span<const std::byte> frame) override
      STITCH_EXCLUDES(mutex_) {
    std::optional<Error> error;
    base::Bytes result;
    base::ByteReader reader(frame, "reply of a tcp store");
    const auto id = reader.read<std::uint64_t>();
    const std::span<const std::byte> status = reader.take(reader.remaining());
    if (status.empty()) throw Error(ErrorCode::protocol, "reply of a tcp store has no status");
    try {
      const std::span<const std::byte> rest = decode_status(status);
      result.append(rest.data(), rest.size());
    } catch (const Error& refused) {
      if (id == kFarewell || refused.code() == ErrorCode::protocol) throw;  // ends the connection
      error = in_store(refused, name());
    }
    const base::MutexLock lock(mutex_);
    const auto found = pending_.find(id);
    if (found == pending_.end()) return;  // its caller no longer waits
    found->second->finish(std::move(result), std::move(error));
  }

  void on_closed(FramedStream&, const Error& why) override STITCH_EXCLUDES(mutex_) {
    stream_ = nullptr;
    fail(Error(why.code(), name() + " is gone: " + why.what()));
  }

 private:
  static Error this_side_closed() {
    return Error(ErrorCode::disconnected, "this side closed the connection");
  }
  // On the stack of its caller. Guarded by mutex_.
  struct Pending {
    bool done = false;
    base::Bytes result;
    std::optional<Error> error;
    base::CondVar changed;

    void finish(base::Bytes with_result, std::optional<Error> with_error) {
      done = true;
      result = std::move(with_result);
      error = std::move(with_error);
      changed.notify_all();
    }
  };

  // Registers a call that waits for its reply, until the end of its scope.
  class Registered {
   public:
    Registered(Calls& calls, std::uint64_t id, Pending& pending) : calls_(calls), id_(id) {
      const base::MutexLock lock(calls_.mutex_);
      if (calls_.failure_) throw Error(*calls_.failure_);
      calls_.pending_.emplace(id, &pending);
    }
    ~Registered() {
      const base::MutexLock lock(calls_.mutex_);
      calls_.pending_.erase(id_);
    }
    Registered(const Registered&) = delete;
    Registered& operator=(const Registered&) = delete;

   private:
    Calls& calls_;
    const std::uint64_t id_;
  };

  void on_connected(TcpStoreConnector::Result result) STITCH_EXCLUDES(mutex_) {
    if (const auto* error = std::get_if<Error>(&result)) {
      fail(*error);
      return;
    }
    auto& [stream, port] = std::get<TcpStoreConnector::Connected>(result);
    stream->set_receiver(shared_from_this());
    stream->expect_frames_up_to(kMaxReplyBytes);
    stream_ = std::move(stream);
    if (closed_) stream_->close(this_side_closed());
    const base::MutexLock lock(mutex_);
    port_ = port;
    connected_ = true;
    changed_.notify_all();
  }

  void fail(const Error& error) STITCH_EXCLUDES(mutex_) {
    const base::MutexLock lock(mutex_);
    if (!failure_) failure_ = error;
    for (const auto& [id, pending] : pending_) pending->finish({}, failure_);
    pending_.clear();
    changed_.notify_all();
  }

  // Constant after construction; port_ after connect().
  base::EventLoop& loop_;
  const TcpStoreOptions options_;
  std::uint16_t port_ = 0;

  // Loop thread only.
  std::shared_ptr<FramedStream> stream_;
  bool closed_ = false;

  base::Mutex mutex_;
  base::CondVar changed_;
  bool connected_ STITCH_GUARDED_BY(mutex_) = false;
  std::optional<Error> failure_ STITCH_GUARDED_BY(mutex_);  // of all later calls
  std::uint64_t next_id_ STITCH_GUARDED_BY(mutex_) = 1;
  std::unordered_map<std::uint64_t, Pending*> pending_ STITCH_GUARDED_BY(mutex_);
};

class TcpStore final : public Store {
 public:
  explicit TcpStore(std::shared_ptr<Calls> calls)
      : calls_(std::move(calls)), name_(calls_->name()) {}
  ~TcpStore() override { calls_->close(); }

  void set(const std::string& key, const std::string& value) override {
    in_store(name_, [&] {
      check_key(key);
      check_value(key, value);
    });
    call(StoreOperation::set, [&](base::ByteWriter& writer) {
      writer.write_string(key);
      writer.write_string(value);
    });
  }

  std::string get(const std::string& key, Timeout timeout) override {
    in_store(name_, [&] { check_key(key); });
    const base::Bytes result = call_waiting(
        StoreOperation::get, timeout, [&](base::ByteWriter& writer) { writer.write_string(key); });
    return base::ByteReader(result.span(), kReply).read_string();
  }

  std::optional<std::string> try_get(const std::string& key) override {
    in_store(name_, [&] { check_key(key); });
    const base::Bytes result =
        call(StoreOperation::try_get, [&](base::ByteWriter& writer) { writer.write_string(key); });
    base::ByteReader reader(result.span(), kReply);
    if (reader.read<std::uint8_t>() == 0) return std::nullopt;
    return reader.read_string();
  }

  void wait(const std::vector<std::string>& keys, Timeout timeout) override {
    std::size_t bytes = 0;
    for (const std::string& key : keys) bytes += sizeof(std::uint32_t) + key.size();
    in_store(name_, [&] {
      check_keys(keys);
      if (bytes > 2 * kMaxValueBytes) {
        throw Error(ErrorCode::out_of_range,
                    "a wait for " + std::to_string(keys.size()) + " keys of " +
                        std::to_string(bytes) + " bytes, more than the " +
                        std::to_string(2 * kMaxValueBytes) + " allowed, cannot be asked for");
      }
    });
    call_waiting(StoreOperation::wait, timeout, [&](base::ByteWriter& writer) {
      writer.write(static_cast<std::uint32_t>(keys.size()));
      for (const std::string& key : keys) writer.write_string(key);
    });
  }

  std::int64_t add(const std::string& key, std::int64_t delta) override {
    in_store(name_, [&] { check_key(key); });
    const base::Bytes result = call(StoreOperation::add, [&](base::ByteWriter& writer) {
      writer.write_string(key);
      writer.write(delta);
    });
    return base::ByteReader(result.span(), kReply).read<std::int64_t>();
  }

  std::string compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                              const std::string& desired) override {
    in_store(name_, [&] { check_compare(key, expected, desired); });
    const base::Bytes result = call(StoreOperation::compare_and_set, [&](base::ByteWriter& writer) {
      writer.write_string(key);
      writer.write(static_cast<std::uint8_t>(expected.has_value()));
      writer.write_string(expected.has_value() ? *expected : std::string_view());
      writer.write_string(desired);
    });
    return base::ByteReader(result.span(), kReply).read_string();
  }

  bool erase(const std::string& key) override {
    in_store(name_, [&] { check_key(key); });
    const base::Bytes result =
        call(StoreOperation::erase, [&](base::ByteWriter& writer) { writer.write_string(key); });
    return base::ByteReader(result.span(), kReply).read<std::uint8_t>() != 0;
  }

  std::string describe() const override { return name_; }

 private:
  static constexpr std::string_view kReply = "reply of a tcp store";

  template <class WriteArguments>
  base::Bytes call(StoreOperation operation, WriteArguments write) {
    return calls_->call(base::deadline_after(calls_->options().connect_timeout),
                        [&](base::ByteWriter& writer) {
                          writer.write(operation);
                          write(writer);
                        });
  }

  template <class WriteArguments>
  base::Bytes call_waiting(StoreOperation operation, Timeout timeout, WriteArguments write) {
    return calls_->call(later(base::deadline_after(timeout), kGrace),
                        [&](base::ByteWriter& writer) {
                          writer.write(operation);
                          write(writer);
                          writer.write(static_cast<std::int64_t>(timeout.count()));
                        });
  }

  const std::shared_ptr<Calls> calls_;
  const std::string name_;
};

}  // namespace

std::shared_ptr<Store> make_tcp_store(base::EventLoop& loop, const TcpStoreOptions& options) {
  auto calls = std::make_shared<Calls>(loop, options);
  try {
    calls->connect();
  } catch (const Error&) {
    calls->close();
    throw;
  }
  return std::make_shared<TcpStore>(std::move(calls));
}

}  // namespace stitch::transport
