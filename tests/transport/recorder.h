#pragma once

#include "stitch/base/mutex.h"
#include "stitch/transport/endpoint.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/support/plain_test.h"

namespace stitch::transport {

inline constexpr std::chrono::seconds kTestTimeout{30};  // reached only when something is broken

// Of an endpoint for the worker of that id.
inline EndpointOptions options(std::uint32_t id) {
  EndpointOptions options;
  options.self.id = id;
  options.self.name = "worker" + std::to_string(id);
  return options;
}

// Stitch's own, on this host.
inline std::unique_ptr<Endpoint> stream_endpoint(std::uint32_t id,
                                                 std::vector<std::string> transports) {
  return make_stream_endpoint(options(id), {std::move(transports), "127.0.0.1"});
}

// A message whose frame is `text`. Endpoints carry any bytes; only the layers above look inside.
inline Message make_message(const std::string& text) {
  Message message;
  message.frame.append(text.data(), text.size());
  return message;
}

inline std::string text_of(const Message& message) {
  return std::string(reinterpret_cast<const char*>(message.frame.data()), message.frame.size());
}

inline Buffer make_filled_buffer(std::size_t bytes, unsigned char seed) {
  Buffer buffer = allocate_buffer(Device{}, bytes);
  auto* at = static_cast<unsigned char*>(buffer.data);
  for (std::size_t i = 0; i < bytes; ++i)
    at[i] = static_cast<unsigned char>(seed + i * 31 + (i >> 12));
  return buffer;
}

inline bool is_filled(const Buffer& buffer, std::size_t bytes, unsigned char seed) {
  const Buffer expected = make_filled_buffer(bytes, seed);
  return buffer.bytes == bytes &&
         (bytes == 0 || std::memcmp(buffer.data, expected.data, bytes) == 0);
}

// Records what a connection reports, and every violation of the contract.
// Shared between the test and the callbacks, which may outlive the test's interest. Thread
// contract: any thread.
class Recorder : public std::enable_shared_from_this<Recorder> {
 public:
  // When set, called for every message instead of keeping it. Set it before the connection is made.
  std::function<void(const std::shared_ptr<Connection>&, Message)> handle;

  [[nodiscard]] ConnectionEvents events() {
    ConnectionEvents events;
    events.on_open = [self = shared_from_this()](const std::shared_ptr<Connection>& connection) {
      base::MutexLock lock(self->mutex_);
      if (std::exchange(self->busy_, true))
        self->faults_.push_back("on_open while another callback runs");
      if (self->closed_) self->faults_.push_back("on_open after on_closed");
      if (std::exchange(self->open_, true)) self->faults_.push_back("second on_open");
      self->peer_ = connection->peer();
      self->connection_ = connection;
      self->busy_ = false;
      self->changed_.notify_all();
    };
    events.on_message = [self = shared_from_this()](const std::shared_ptr<Connection>& connection,
                                                    Message message) {
      {
        base::MutexLock lock(self->mutex_);
        if (std::exchange(self->busy_, true))
          self->faults_.push_back("on_message while another callback runs");
        if (!self->open_) self->faults_.push_back("on_message before on_open");
        if (self->closed_) self->faults_.push_back("on_message after on_closed");
      }
      if (self->handle) self->handle(connection, std::move(message));
      base::MutexLock lock(self->mutex_);
      self->busy_ = false;
      ++self->received_;
      if (!self->handle) self->messages_.push_back(std::move(message));
      self->changed_.notify_all();
    };
    events.on_closed = [self = shared_from_this()](const std::shared_ptr<Connection>&,
                                                   const Error& error) {
      base::MutexLock lock(self->mutex_);
      if (self->busy_) self->faults_.push_back("on_closed while another callback runs");
      if (self->closed_) self->faults_.push_back("second on_closed");
      self->closed_ = error;
      self->connection_.reset();
      self->changed_.notify_all();
    };
    return events;
  }

  // A `done` that is counted. Each one must be called exactly once.
  [[nodiscard]] SendDone done() {
    {
      base::MutexLock lock(mutex_);
      ++sends_;
    }
    return [self = shared_from_this(), fired = false](const std::optional<Error>& error) mutable {
      base::MutexLock lock(self->mutex_);
      if (std::exchange(fired, true)) self->faults_.push_back("done fired twice");
      ++self->done_;
      if (error) {
        ++self->failed_;
        self->send_error_ = error;
      }
      self->changed_.notify_all();
    };
  }

  template <class Condition>
  [[nodiscard]] bool wait(Condition condition) {
    const auto deadline = std::chrono::steady_clock::now() + kTestTimeout;
    base::MutexLock lock(mutex_);
    while (!condition(*this)) {
      if (!changed_.wait_until(mutex_, deadline)) return condition(*this);
    }
    return true;
  }
  [[nodiscard]] bool wait_open() {
    return wait([](Recorder& r) { return r.open_ || r.closed_; }) && open();
  }
  [[nodiscard]] bool wait_closed() {
    return wait([](Recorder& r) { return r.closed_.has_value(); });
  }
  [[nodiscard]] bool wait_messages(std::size_t count) {
    return wait([count](Recorder& r) { return r.received_ >= count || r.closed_; }) &&
           received() >= count;
  }
  [[nodiscard]] bool wait_sends_done() {
    return wait([](Recorder& r) { return r.done_ == r.sends_; });
  }

  [[nodiscard]] bool open() const { return locked(open_); }
  [[nodiscard]] std::optional<Error> closed() const { return locked(closed_); }
  [[nodiscard]] ErrorCode closed_code() const {
    return closed().value_or(Error(ErrorCode::internal, "not closed")).code();
  }
  [[nodiscard]] std::string closed_text() const {
    return closed() ? closed()->what() : "not closed";
  }
  [[nodiscard]] Hello peer() const { return locked(peer_); }
  [[nodiscard]] std::shared_ptr<Connection> connection() const { return locked(connection_); }
  [[nodiscard]] std::size_t received() const { return locked(received_); }
  [[nodiscard]] std::size_t sends() const { return locked(sends_); }
  [[nodiscard]] std::size_t done_count() const { return locked(done_); }
  [[nodiscard]] std::size_t failed() const { return locked(failed_); }
  [[nodiscard]] std::optional<Error> send_error() const { return locked(send_error_); }
  [[nodiscard]] std::vector<std::string> faults() const { return locked(faults_); }
  [[nodiscard]] std::vector<Message> take_messages() {
    base::MutexLock lock(mutex_);
    return std::exchange(messages_, {});
  }
  [[nodiscard]] std::vector<std::string> take_texts() {
    std::vector<std::string> texts;
    for (const Message& message : take_messages()) texts.push_back(text_of(message));
    return texts;
  }

 private:
  template <class T>
  [[nodiscard]] T locked(const T& value) const {
    base::MutexLock lock(mutex_);
    return value;
  }

  mutable base::Mutex mutex_;
  base::CondVar changed_;
  bool busy_ = false;
  bool open_ = false;
  std::optional<Error> closed_;
  Hello peer_;
  std::shared_ptr<Connection> connection_;
  std::vector<Message> messages_;
  std::size_t received_ = 0;
  std::size_t sends_ = 0;
  std::size_t done_ = 0;
  std::size_t failed_ = 0;
  std::optional<Error> send_error_;
  std::vector<std::string> faults_;
};

// Of a connection that sends back what comes.
inline ConnectionEvents echo_events() {
  const auto echo = std::make_shared<Recorder>();
  echo->handle = [](const std::shared_ptr<Connection>& connection, Message message) {
    connection->send(std::move(message), nullptr);
  };
  return echo->events();
}

}  // namespace stitch::transport
