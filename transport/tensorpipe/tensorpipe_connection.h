#pragma once

#include <tensorpipe/tensorpipe.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/task_thread.h"
#include "stitch/transport/connection_set.h"
#include "stitch/transport/handshaking_connection.h"
#include "stitch/transport/tensorpipe/tensorpipe_selection.h"

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

namespace tp = ::tensorpipe;

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
  const std::shared_ptr<base::TaskThread> thread = std::make_shared<base::TaskThread>();

  [[nodiscard]] std::vector<std::string> listen(Endpoint::Accept accept);
  [[nodiscard]] std::shared_ptr<Connection> connect(const std::string& address,
                                                    ConnectionEvents events);
  // How often a broken listener could not be opened again.
  [[nodiscard]] std::int64_t listener_failures() const noexcept {
    return listener_failures_.load();
  }
  void close();
  void join();

  void remove(const std::shared_ptr<PipeConnection>& connection) {
    connections_.remove(connection);
  }
  // Held by everything that TensorPipe may still call back; join() waits until nobody holds it.
  [[nodiscard]] std::shared_ptr<void> busy() {
    base::MutexLock lock(mutex_);
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
  base::Mutex mutex_;
  base::CondVar idle_changed_;
  bool idle_ STITCH_GUARDED_BY(mutex_) = false;  // nobody holds busy() any more
  std::shared_ptr<void> busy_ STITCH_GUARDED_BY(mutex_);
  std::shared_ptr<tp::Context> context_ STITCH_GUARDED_BY(mutex_);
  std::shared_ptr<tp::Listener> listener_ STITCH_GUARDED_BY(mutex_);
  std::shared_ptr<const Endpoint::Accept> accept_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::string> addresses_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t accepted_count_ STITCH_GUARDED_BY(mutex_) = 0;
  std::atomic<std::int64_t> listener_failures_{0};
};

// A connection over one TensorPipe pipe. A frame travels as the payload of one TensorPipe message,
// its buffers as that message's tensors, read from and written to their own memory.
class PipeConnection final : public HandshakingConnection {
 public:
  PipeConnection(std::shared_ptr<PipeHub> hub, std::string name, bool accepted,
                 ConnectionEvents events)
      : HandshakingConnection(hub->options, accepted ? Role::accepting : Role::connecting,
                              std::move(events), hub->thread),
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
  void transmit_handshake(base::Bytes message) override;
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
    base::MutexLock lock(stream_mutex_);
    return stream_;
  }

  const std::shared_ptr<PipeHub> hub_;
  const std::string name_;
  const bool accepted_;
  base::Mutex stream_mutex_;
  Stream stream_ STITCH_GUARDED_BY(stream_mutex_);
  bool shut_ STITCH_GUARDED_BY(stream_mutex_) = false;
};

}  // namespace stitch::transport
