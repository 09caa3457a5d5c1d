#include "stitch/transport/tensorpipe_endpoint.h"

#include <tensorpipe/tensorpipe.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "stitch/transport/blocked_signal.h"
#include "stitch/transport/connection_set.h"
#include "stitch/transport/handshaking_connection.h"
#include "stitch/transport/ip_address.h"
#include "stitch/transport/mutex.h"
#include "stitch/transport/reader_thread.h"
#include "stitch/transport/tensorpipe_selection.h"

// How TensorPipe's callbacks reach ours. TensorPipe has no thread for its pipes: whichever thread
// calls it, or brings it news from a transport, runs all callbacks that are due, also those of
// other connections. So:
//   - a callback that comes inside one of our own calls (InsideCall is set) may be on the thread of
//   somebody who holds a lock:
//     what it has for the user is handed to the endpoint's reader thread;
//   - any other comes on a thread of TensorPipe and is delivered there at once, which saves a
//   switch of threads.
// A connection has one outstanding read at a time, and asks for the next after delivery: that keeps
// the order, and makes the failure of that read the natural place from which on_closed is reported.
namespace stitch::transport {

namespace {

namespace tp = ::tensorpipe;

constexpr std::string_view kUvScheme = "uv://";

// Set while this thread is inside a call to TensorPipe.
class InsideCall {
 public:
  InsideCall() : before_(std::exchange(current, true)) {}
  ~InsideCall() { current = before_; }
  InsideCall(const InsideCall&) = delete;
  InsideCall& operator=(const InsideCall&) = delete;
  [[nodiscard]] static bool on_this_thread() noexcept { return current; }

 private:
  static thread_local bool current;
  const bool before_;
};
thread_local bool InsideCall::current = false;

// TensorPipe's text without its source position.
[[nodiscard]] std::string text_of(const tp::Error& error) {
  std::string text = error.what();
  if (const auto at = text.find(" (this error originated at"); at != std::string::npos)
    text.resize(at);
  return text;
}

[[nodiscard]] std::shared_ptr<tp::transport::Context> make_transport(const std::string& name) {
  return name == "tensorpipe-shm" ? tp::transport::shm::create() : tp::transport::uv::create();
}
[[nodiscard]] std::shared_ptr<tp::channel::Context> make_channel(const std::string& name) {
  return name == "cma" ? tp::channel::cma::create() : tp::channel::basic::create();
}
[[nodiscard]] std::string listen_url(const std::string& transport,
                                     const std::string& bind_address) {
  if (transport == "tensorpipe-shm") return "tensorpipe-shm://";
  return bind_address.find(':') == std::string::npos ? "uv://" + bind_address
                                                     : "uv://[" + bind_address + "]";
}

class PipeConnection;

// What an endpoint's connections share. Kept alive by the endpoint and its connections; the
// TensorPipe context in it ends in join(), never where a connection happens to be dropped. Thread
// contract: any thread.
class PipeHub : public std::enable_shared_from_this<PipeHub> {
 public:
  PipeHub(EndpointOptions options, TensorPipeOptions tensorpipe);  // use make()
  // REQUIRES: the options have been checked.
  [[nodiscard]] static std::shared_ptr<PipeHub> make(EndpointOptions options,
                                                     TensorPipeOptions tensorpipe);

  const EndpointOptions options;
  const std::shared_ptr<ReaderThread> thread = std::make_shared<ReaderThread>();

  [[nodiscard]] std::vector<std::string> listen(Endpoint::Accept accept);
  [[nodiscard]] std::shared_ptr<Connection> connect(const std::string& address,
                                                    ConnectionEvents events);
  void close();
  void join();

  void remove(const std::shared_ptr<PipeConnection>& connection) {
    connections_.remove(connection);
  }
  // Held by everything that TensorPipe may still call back; join() waits until nobody holds it.
  [[nodiscard]] std::shared_ptr<void> busy() {
    MutexLock lock(mutex_);
    return busy_;
  }

 private:
  [[nodiscard]] static Error closed_error() {
    return Error(ErrorCode::shutting_down, "tensorpipe endpoint is closed");
  }
  [[nodiscard]] std::shared_ptr<tp::Listener> open_listener(const std::vector<std::string>& urls);
  // Hands out the next pipe of `listener`; the chain ends with the listener.
  void accept_next(const std::shared_ptr<tp::Listener>& listener);
  void accepted(const std::shared_ptr<tp::Listener>& listener, std::shared_ptr<tp::Pipe> pipe);
  // One stray connection that says nothing useful breaks a TensorPipe listener: it is then opened
  // again at its addresses.
  void reopen_listener(int attempt);

  TensorPipeOptions tensorpipe_;  // constant after construction
  ConnectionSet<PipeConnection> connections_;
  Mutex mutex_;
  CondVar idle_changed_;
  bool idle_ STITCH_GUARDED_BY(mutex_) = false;  // nobody holds busy() any more
  std::shared_ptr<void> busy_ STITCH_GUARDED_BY(mutex_);
  std::shared_ptr<tp::Context> context_ STITCH_GUARDED_BY(mutex_);
  std::shared_ptr<tp::Listener> listener_ STITCH_GUARDED_BY(mutex_);
  std::shared_ptr<const Endpoint::Accept> accept_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::string> addresses_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t accepted_count_ STITCH_GUARDED_BY(mutex_) = 0;
};

// A connection over one TensorPipe pipe. A frame travels as the payload of one TensorPipe message,
// its buffers as that message's tensors, read from and written to their own memory.
class PipeConnection final : public HandshakingConnection {
 public:
  PipeConnection(std::shared_ptr<PipeHub> hub, std::string name, bool accepted,
                 ConnectionEvents events)
      : HandshakingConnection(hub->options, std::move(events), hub->thread),
        hub_(std::move(hub)),
        name_(std::move(name)),
        accepted_(accepted) {}

  void send(Message message, SendDone done) override;
  [[nodiscard]] std::string describe() const override { return name_; }

  // Takes the pipe, says hello and starts to read. Exactly one of begin() and fail() is called,
  // once.
  void begin(std::shared_ptr<tp::Pipe> pipe);
  void fail(const Error& error) { ended(error); }

 protected:
  void transmit_handshake(Bytes message) override;
  void shut() override;
  void finished() override;

 private:
  // A message on its way out; it keeps the memory until TensorPipe is through with it.
  struct Outgoing {
    Message message;
    SendDone done;
    std::shared_ptr<PipeConnection> connection;
    std::shared_ptr<void> busy;
  };
  void write(const std::shared_ptr<Outgoing>& outgoing);
  void written(Outgoing& outgoing, const std::optional<Error>& error);

  void read_next();
  void descriptor_came(const tp::Error& error, const tp::Descriptor& descriptor);
  void message_came(Message message);
  [[nodiscard]] std::optional<Error> violation_of(const tp::Descriptor& descriptor) const;
  [[nodiscard]] Error translate(const tp::Error& error, bool connecting) const;

  [[nodiscard]] std::shared_ptr<PipeConnection> self() {
    return std::static_pointer_cast<PipeConnection>(shared_from_this());
  }
  // The pipe, and what keeps join() waiting while TensorPipe has something of ours. Both null when
  // the connection has finished.
  struct Stream {
    std::shared_ptr<tp::Pipe> pipe;
    std::shared_ptr<void> busy;
  };
  [[nodiscard]] Stream stream() {
    MutexLock lock(stream_mutex_);
    return stream_;
  }

  const std::shared_ptr<PipeHub> hub_;
  const std::string name_;
  const bool accepted_;
  Mutex stream_mutex_;
  Stream stream_ STITCH_GUARDED_BY(stream_mutex_);
  bool shut_ STITCH_GUARDED_BY(stream_mutex_) = false;
};

void PipeConnection::begin(std::shared_ptr<tp::Pipe> pipe) {
  bool shut = false;
  {
    std::shared_ptr<void> busy = hub_->busy();
    MutexLock lock(stream_mutex_);
    stream_ = {pipe, std::move(busy)};
    shut = shut_;
  }
  if (shut) {
    InsideCall call;
    pipe->close();
  }
  start();
  read_next();
}

void PipeConnection::send(Message message, SendDone done) {
  auto outgoing =
      std::make_shared<Outgoing>(Outgoing{std::move(message), std::move(done), self(), nullptr});
  when_open([outgoing = std::move(outgoing)](const std::optional<Error>& error) {
    if (error) {
      outgoing->connection->written(*outgoing, error);
    } else {
      outgoing->connection->write(outgoing);
    }
  });
}

void PipeConnection::transmit_handshake(Bytes message) {
  write(std::make_shared<Outgoing>(
      Outgoing{Message{std::move(message), {}}, nullptr, self(), nullptr}));
}

void PipeConnection::write(const std::shared_ptr<Outgoing>& outgoing) {
  const auto [pipe, busy] = stream();
  if (pipe == nullptr) return written(*outgoing, reason());
  outgoing->busy = busy;
  tp::Message message;
  Bytes& frame = outgoing->message.frame;
  if (frame.size() > 0) message.payloads.push_back({frame.data(), frame.size(), ""});
  message.tensors.reserve(outgoing->message.buffers.size());
  for (const Buffer& buffer : outgoing->message.buffers) {
    if (buffer.device != Device{}) {
      return written(*outgoing,
                     Error(ErrorCode::unimplemented,
                           "buffer on device cuda:" + std::to_string(buffer.device.index) +
                               " cannot be sent over " + name_ + ": it moves CPU memory only"));
    }
    // With a target device named, TensorPipe need not ask the receiver for one.
    message.tensors.push_back(
        {tp::CpuBuffer{buffer.data}, buffer.bytes, tp::Device{tp::kCpuDeviceType, 0}, ""});
  }
  InsideCall call;
  pipe->write(std::move(message), [outgoing](const tp::Error& error) {
    PipeConnection& connection = *outgoing->connection;
    connection.written(
        *outgoing, error ? std::optional<Error>(connection.translate(error, false)) : std::nullopt);
  });
}

void PipeConnection::written(Outgoing& outgoing, const std::optional<Error>& error) {
  outgoing.message = {};
  if (!outgoing.done) return;
  std::optional<Error> reported = error;
  if (error) {
    if (const std::optional<Error> reason = this->reason()) reported = reason;
  }
  SendDone done = std::move(outgoing.done);
  if (InsideCall::on_this_thread()) {
    thread().post(
        [done = std::move(done), reported = std::move(reported)]() mutable { done(reported); });
  } else {
    done(reported);
  }
}

void PipeConnection::read_next() {
  const std::shared_ptr<tp::Pipe> pipe = stream().pipe;
  InsideCall call;
  pipe->readDescriptor([self = self()](const tp::Error& error, const tp::Descriptor& descriptor) {
    self->descriptor_came(error, descriptor);
  });
}

std::optional<Error> PipeConnection::violation_of(const tp::Descriptor& descriptor) const {
  const auto violation = [this](const std::string& what) {
    return Error(ErrorCode::protocol, what + " from " + name_);
  };
  if (descriptor.payloads.size() > 1)
    return violation("message with " + std::to_string(descriptor.payloads.size()) +
                     " payloads instead of 1");
  const std::size_t frame = descriptor.payloads.empty() ? 0 : descriptor.payloads[0].length;
  if (in_handshake()) {
    if (!descriptor.tensors.empty())
      return violation("handshake message with " + std::to_string(descriptor.tensors.size()) +
                       " buffers");
    if (frame > Handshake::kMaxBytes) {
      return violation("handshake message of " + std::to_string(frame) +
                       " bytes over the limit of " + std::to_string(Handshake::kMaxBytes) +
                       " bytes");
    }
    return std::nullopt;
  }
  if (frame > hub_->options.max_frame_bytes) {
    return violation("frame of " + std::to_string(frame) + " bytes over the limit of " +
                     std::to_string(hub_->options.max_frame_bytes) + " bytes");
  }
  for (const auto& tensor : descriptor.tensors) {
    if (tensor.length > hub_->options.max_buffer_bytes) {
      return violation("buffer of " + std::to_string(tensor.length) + " bytes over the limit of " +
                       std::to_string(hub_->options.max_buffer_bytes) + " bytes");
    }
    const tp::Device cpu{tp::kCpuDeviceType, 0};
    if (!(tensor.sourceDevice == cpu) || !tensor.targetDevice.has_value() ||
        !(*tensor.targetDevice == cpu)) {
      return violation("buffer from or for another device than the CPU");
    }
  }
  return std::nullopt;
}

void PipeConnection::descriptor_came(const tp::Error& error, const tp::Descriptor& descriptor) {
  if (error) return ended(translate(error, in_handshake()));
  auto message = std::make_shared<Message>();
  tp::Allocation allocation;
  try {
    if (const auto violation = violation_of(descriptor)) throw *violation;
    if (!descriptor.payloads.empty()) {
      message->frame.resize(descriptor.payloads[0].length);
      allocation.payloads.push_back({message->frame.data()});
    }
    message->buffers.reserve(descriptor.tensors.size());
    allocation.tensors.reserve(descriptor.tensors.size());
    for (const auto& tensor : descriptor.tensors) {
      message->buffers.push_back(hub_->options.allocator(Device{}, tensor.length));
      allocation.tensors.push_back({tp::CpuBuffer{message->buffers.back().data}});
    }
  } catch (...) {
    // The message stays unread: nothing more can come from this pipe.
    const Error problem = to_error(std::current_exception());
    close(problem);
    ended(problem);
    return;
  }
  const std::shared_ptr<tp::Pipe> pipe = stream().pipe;
  InsideCall call;
  pipe->read(std::move(allocation),
             [self = self(), message = std::move(message)](const tp::Error& failure) {
               if (failure) return self->ended(self->translate(failure, self->in_handshake()));
               if (InsideCall::on_this_thread()) {
                 self->thread().post([self, message] { self->message_came(std::move(*message)); });
               } else {
                 self->message_came(std::move(*message));
               }
             });
}

void PipeConnection::message_came(Message message) {
  if (in_handshake()) {
    received_handshake(message.frame.span());
  } else {
    received(std::move(message));
  }
  read_next();
}

Error PipeConnection::translate(const tp::Error& error, bool connecting) const {
  const std::string start = connecting && !accepted_ ? "connect to \"" + name_ + "\" failed: "
                                                     : "connection " + name_ + " ended: ";
  return Error(ErrorCode::disconnected, start + text_of(error));
}

void PipeConnection::shut() {
  std::shared_ptr<tp::Pipe> pipe;
  {
    MutexLock lock(stream_mutex_);
    shut_ = true;
    pipe = stream_.pipe;
  }
  if (pipe == nullptr) return;
  InsideCall call;
  pipe->close();
}

void PipeConnection::finished() {
  Stream ended;
  {
    MutexLock lock(stream_mutex_);
    ended = std::exchange(stream_, {});
  }
  {
    InsideCall call;
    ended.pipe.reset();
  }
  hub_->remove(self());
}

PipeHub::PipeHub(EndpointOptions options, TensorPipeOptions tensorpipe)
    : options(std::move(options)), tensorpipe_(std::move(tensorpipe)) {
  const SigpipeBlocked blocked;  // TensorPipe's threads start here
  auto context = std::make_shared<tp::Context>();
  // The higher number is preferred. One that is not viable is left out, and listen() then fails
  // over it.
  int priority = 0;
  for (const auto& transport : tensorpipe_.transports)
    context->registerTransport(--priority, transport, make_transport(transport));
  priority = 0;
  for (const auto& channel : tensorpipe_.channels)
    context->registerChannel(--priority, channel, make_channel(channel));
  MutexLock lock(mutex_);
  context_ = std::move(context);
}

std::shared_ptr<PipeHub> PipeHub::make(EndpointOptions options, TensorPipeOptions tensorpipe) {
  auto hub = std::make_shared<PipeHub>(std::move(options), std::move(tensorpipe));
  MutexLock lock(hub->mutex_);
  hub->busy_ = std::shared_ptr<void>(nullptr, [hub](void*) {
    MutexLock deleter_lock(hub->mutex_);
    hub->idle_ = true;
    hub->idle_changed_.notify_all();
  });
  return hub;
}

std::shared_ptr<tp::Listener> PipeHub::open_listener(const std::vector<std::string>& urls) {
  std::shared_ptr<tp::Context> context;
  {
    MutexLock lock(mutex_);
    if (connections_.closed()) throw closed_error();
    context = context_;
  }
  for (const auto& url : urls) {
    if (!url.starts_with(kUvScheme)) continue;
    auto ip = IpAddress::parse_with_port(std::string_view(url).substr(kUvScheme.size()));
    if (!ip) ip = IpAddress::parse(tensorpipe_.bind_address, 0);
    if (ip) ip->check_bindable(url);
  }
  try {
    InsideCall call;
    return context->listen(urls);
  } catch (const std::exception& error) {
    throw Error(ErrorCode::disconnected,
                "address " + urls.front() + " could not be bound: " + error.what());
  }
}

std::vector<std::string> PipeHub::listen(Endpoint::Accept accept) {
  std::vector<std::string> urls;
  for (const auto& transport : tensorpipe_.transports)
    urls.push_back(listen_url(transport, tensorpipe_.bind_address));
  {
    MutexLock lock(mutex_);
    if (accept_ != nullptr) throw Error(ErrorCode::invalid_argument, "endpoint listens already");
  }
  std::shared_ptr<tp::Listener> listener = open_listener(urls);
  std::vector<std::string> addresses;
  for (const auto& transport : tensorpipe_.transports)
    addresses.push_back(listener->url(transport));
  {
    MutexLock lock(mutex_);
    if (connections_.closed()) throw closed_error();
    accept_ = std::make_shared<const Endpoint::Accept>(std::move(accept));
    listener_ = listener;
    addresses_ = addresses;
  }
  accept_next(listener);
  return addresses;
}

void PipeHub::accept_next(const std::shared_ptr<tp::Listener>& listener) {
  InsideCall call;
  listener->accept([self = shared_from_this(), busy = busy(), listener](
                       const tp::Error& error, std::shared_ptr<tp::Pipe> pipe) {
    // Always on the reader thread: it is where Accept and all that follows are expected, and
    // accepting is rare.
    if (error) {
      self->thread->post([self] { self->reopen_listener(0); });
    } else {
      self->thread->post(
          [self, listener, busy, pipe = std::move(pipe)] { self->accepted(listener, pipe); });
    }
  });
}

void PipeHub::accepted(const std::shared_ptr<tp::Listener>& listener,
                       std::shared_ptr<tp::Pipe> pipe) {
  std::shared_ptr<const Endpoint::Accept> accept;
  std::string name;
  {
    MutexLock lock(mutex_);
    if (connections_.closed()) return;
    accept = accept_;
    name = addresses_.front() + "#" + std::to_string(++accepted_count_);
  }
  auto connection =
      std::make_shared<PipeConnection>(shared_from_this(), std::move(name), true, (*accept)());
  if (connections_.add(connection)) {
    connection->begin(std::move(pipe));
  } else {
    connection->fail(closed_error());
  }
  accept_next(listener);
}

void PipeHub::reopen_listener(int attempt) {
  constexpr int kAttempts = 200;
  constexpr std::chrono::milliseconds kPause{50};
  std::vector<std::string> addresses;
  std::shared_ptr<tp::Listener> broken;
  std::shared_ptr<void> busy;  // the context must not go meanwhile
  {
    MutexLock lock(mutex_);
    if (connections_.closed()) return;
    busy = busy_;
    broken.swap(listener_);
    addresses = addresses_;
  }
  {
    InsideCall call;
    broken.reset();
  }
  try {
    const std::shared_ptr<tp::Listener> listener = open_listener(addresses);
    {
      MutexLock lock(mutex_);
      if (connections_.closed()) return;
      listener_ = listener;
    }
    accept_next(listener);
  } catch (const Error&) {
    // Its socket may take a moment to go.
    if (attempt >= kAttempts) return;
    thread->post_at(std::chrono::steady_clock::now() + kPause, [weak = weak_from_this(), attempt] {
      if (const auto self = weak.lock()) self->reopen_listener(attempt + 1);
    });
  }
}

std::shared_ptr<Connection> PipeHub::connect(const std::string& address, ConnectionEvents events) {
  auto connection =
      std::make_shared<PipeConnection>(shared_from_this(), address, false, std::move(events));
  if (!connections_.add(connection)) {
    thread->post([connection] { connection->fail(closed_error()); });
    return connection;
  }
  std::string problem = problem_with_address(address, tensorpipe_.transports);
  std::shared_ptr<tp::Pipe> pipe;
  if (problem.empty()) {
    std::shared_ptr<tp::Context> context;
    {
      MutexLock lock(mutex_);
      context = context_;  // there until the last connection is gone
    }
    try {
      InsideCall call;
      pipe = context->connect(address);
      context.reset();
    } catch (const std::exception& error) {
      problem = error.what();
    }
  }
  if (pipe == nullptr) {
    thread->post([connection, problem = std::move(problem)] {
      connection->fail(Error(ErrorCode::disconnected,
                             "connect to \"" + connection->describe() + "\" failed: " + problem));
    });
  } else {
    connection->begin(std::move(pipe));
  }
  return connection;
}

void PipeHub::close() {
  const auto open = connections_.close();
  if (!open) return;
  std::shared_ptr<tp::Listener> listener;
  {
    // Whoever opens a listener keeps it under this lock, unless it finds the endpoint closed.
    MutexLock lock(mutex_);
    listener.swap(listener_);
  }
  for (const auto& connection : *open) connection->close(closed_error());
  if (listener != nullptr) {
    InsideCall call;
    listener->close();
    listener.reset();
  }
}

void PipeHub::join() {
  close();
  connections_.wait_until_empty();
  std::shared_ptr<void> busy;
  std::shared_ptr<tp::Context> context;
  {
    MutexLock lock(mutex_);
    busy.swap(busy_);
    lock.unlock();
    busy.reset();
    lock.lock();
    while (!idle_) idle_changed_.wait(mutex_);
    context.swap(context_);
  }
  if (context != nullptr) {
    InsideCall call;
    context->join();
    context.reset();
  }
  thread->join();
  std::shared_ptr<const Endpoint::Accept> accept;
  MutexLock lock(mutex_);
  accept.swap(accept_);
}

class TensorPipeEndpoint final : public Endpoint {
 public:
  TensorPipeEndpoint(EndpointOptions options, TensorPipeOptions tensorpipe)
      : hub_(PipeHub::make(std::move(options), std::move(tensorpipe))) {}
  ~TensorPipeEndpoint() override { hub_->join(); }

  std::vector<std::string> listen(Accept accept) override {
    return hub_->listen(std::move(accept));
  }
  std::shared_ptr<Connection> connect(const std::string& address,
                                      ConnectionEvents events) override {
    return hub_->connect(address, std::move(events));
  }
  void close() override { hub_->close(); }
  void join() override { hub_->join(); }

 private:
  const std::shared_ptr<PipeHub> hub_;
};

}  // namespace

std::unique_ptr<Endpoint> make_tensorpipe_endpoint(EndpointOptions options,
                                                   TensorPipeOptions tensorpipe) {
  static_cast<void>(
      encode(options.self));  // a name that is too long is the caller's mistake: say so now
  TensorPipeOptions usable =
      select_usable(std::move(tensorpipe), [](const TensorPipeOptions& trial) {
        EndpointOptions trial_options;
        trial_options.self.name = "self-transfer";
        return std::make_unique<TensorPipeEndpoint>(std::move(trial_options), trial);
      });
  return std::make_unique<TensorPipeEndpoint>(std::move(options), std::move(usable));
}

}  // namespace stitch::transport
