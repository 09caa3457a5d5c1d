#pragma once

#include <tensorpipe/tensorpipe.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/transport/handshaking_connection.h"
#include "stitch/transport/tensorpipe/tensorpipe_endpoint_state.h"

namespace stitch::transport {

// A connection over one TensorPipe pipe. A frame travels as the payload of one TensorPipe message,
// its buffers as that message's tensors, read from and written to their own memory. It has one
// outstanding read at a time, and starts the next after delivery: that keeps the order, and the
// failure of that read is the one place from which on_closed is reported. Thread contract: as
// Connection; see InsideCall for the threads of its callbacks.
class TensorPipeConnection final : public HandshakingConnection {
 public:
  TensorPipeConnection(std::shared_ptr<TensorPipeEndpointState> endpoint, std::string name,
                       std::optional<Wanted> whom, ConnectionEvents events)
      : HandshakingConnection(endpoint->options, whom, std::move(events), endpoint->thread),
        endpoint_(std::move(endpoint)),
        name_(std::move(name)) {}

  void send(Message message, SendDone done) override;
  [[nodiscard]] std::string describe() const override { return name_; }

  // Takes the pipe, starts the handshake and reads. Exactly one of begin() and fail() is called,
  // once.
  void begin(std::shared_ptr<tp::Pipe> pipe);
  void fail(const Error& error);
  [[nodiscard]] bool no_process_listens() const override { return no_process_listens_.load(); }

 protected:
  void transmit_handshake(base::Bytes message) override;
  void shut() override;
  void finished() override;

 private:
  // A message being sent; it keeps the memory until TensorPipe has completed the write.
  struct Outgoing {
    Message message;
    SendDone done;
    std::shared_ptr<TensorPipeConnection> connection;
    std::shared_ptr<void> busy;
  };
  void write(const std::shared_ptr<Outgoing>& outgoing);
  void written(Outgoing& outgoing, const std::optional<Error>& error);

  void read_next();
  void descriptor_came(const tp::Error& error, const tp::Descriptor& descriptor);
  void message_came(Message message);
  // Throws Error(protocol) for a message that the peer may not send.
  void check(const tp::Descriptor& descriptor) const;
  [[nodiscard]] Error translate(const tp::Error& error, bool connecting) const;

  [[nodiscard]] std::shared_ptr<TensorPipeConnection> self() {
    return std::static_pointer_cast<TensorPipeConnection>(shared_from_this());
  }
  // The pipe, and what keeps join() waiting while TensorPipe may call back. Both null once the
  // connection has finished.
  struct Stream {
    std::shared_ptr<tp::Pipe> pipe;
    std::shared_ptr<void> busy;
  };
  [[nodiscard]] Stream stream() {
    base::MutexLock lock(stream_mutex_);
    return stream_;
  }

  const std::shared_ptr<TensorPipeEndpointState> endpoint_;
  const std::string name_;
  std::atomic<bool> no_process_listens_{false};  // at the address; before the end
  base::Mutex stream_mutex_;
  Stream stream_ STITCH_GUARDED_BY(stream_mutex_);
  bool shut_ STITCH_GUARDED_BY(stream_mutex_) = false;
};

}  // namespace stitch::transport
