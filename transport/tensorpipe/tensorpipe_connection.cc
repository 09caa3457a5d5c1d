#include "stitch/transport/tensorpipe/tensorpipe_connection.h"

#include <string_view>
#include <utility>

#include "stitch/transport/message_limits.h"
#include "stitch/transport/tensorpipe/inside_call.h"

namespace stitch::transport {

namespace {

// TensorPipe's text without its source position.
[[nodiscard]] std::string text_of(const tp::Error& error) {
  std::string text = error.what();
  if (const auto at = text.find(" (this error originated at"); at != std::string::npos)
    text.resize(at);
  return text;
}

}  // namespace

// TensorPipe has no code for a connect that was refused.
void TensorPipeConnection::fail(const Error& error) {
  const std::string_view text = error.what();
  const bool refused = text.find("ECONNREFUSED") != std::string_view::npos ||
                       text.find("Connection refused") != std::string_view::npos;
  if (role() == Role::connecting && in_handshake() && refused) no_process_listens_.store(true);
  ended(error);
}

void TensorPipeConnection::begin(std::shared_ptr<tp::Pipe> pipe) {
  bool shut = false;
  {
    std::shared_ptr<void> busy = endpoint_->busy();
    base::MutexLock lock(stream_mutex_);
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

void TensorPipeConnection::send(Message message, SendDone done) {
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

void TensorPipeConnection::transmit_handshake(base::Bytes message) {
  write(std::make_shared<Outgoing>(
      Outgoing{Message{std::move(message), {}}, nullptr, self(), nullptr}));
}

void TensorPipeConnection::write(const std::shared_ptr<Outgoing>& outgoing) {
  const auto [pipe, busy] = stream();
  if (pipe == nullptr) return written(*outgoing, reason());
  outgoing->busy = busy;
  tp::Message message;
  base::Bytes& frame = outgoing->message.frame;
  if (frame.size() > 0) message.payloads.push_back({frame.data(), frame.size(), ""});
  message.tensors.reserve(outgoing->message.buffers.size());
  for (const Buffer& buffer : outgoing->message.buffers) {
    if (buffer.device != Device{}) {
      return written(*outgoing,
                     Error(ErrorCode::unimplemented,
                           "buffer on device cuda:" + std::to_string(buffer.device.index) +
                               " cannot be sent over " + name_ + ": it moves CPU memory only"));
    }
    // With a target device, TensorPipe does not ask the receiver for one.
    message.tensors.push_back(
        {tp::CpuBuffer{buffer.data}, buffer.bytes, tp::Device{tp::kCpuDeviceType, 0}, ""});
  }
  InsideCall call;
  pipe->write(std::move(message), [outgoing](const tp::Error& error) {
    TensorPipeConnection& connection = *outgoing->connection;
    connection.written(
        *outgoing, error ? std::optional<Error>(connection.translate(error, false)) : std::nullopt);
  });
}

void TensorPipeConnection::written(Outgoing& outgoing, const std::optional<Error>& error) {
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

void TensorPipeConnection::read_next() {
  const std::shared_ptr<tp::Pipe> pipe = stream().pipe;
  InsideCall call;
  pipe->readDescriptor([self = self()](const tp::Error& error, const tp::Descriptor& descriptor) {
    self->descriptor_came(error, descriptor);
  });
}

void TensorPipeConnection::check(const tp::Descriptor& descriptor) const {
  const auto refuse = [this](const std::string& what) {
    throw Error(ErrorCode::protocol, what + " from " + name_);
  };
  if (descriptor.payloads.size() > 1)
    refuse("message with " + std::to_string(descriptor.payloads.size()) + " payloads instead of 1");
  const std::size_t frame = descriptor.payloads.empty() ? 0 : descriptor.payloads[0].length;
  if (in_handshake()) {
    if (!descriptor.tensors.empty())
      refuse("handshake message with " + std::to_string(descriptor.tensors.size()) + " buffers");
    check_size("handshake message", frame, Handshake::kMaxBytes, name_);
    return;
  }
  check_size("frame", frame, endpoint_->options.max_frame_bytes, name_);
  for (const auto& tensor : descriptor.tensors) {
    check_size("buffer", tensor.length, endpoint_->options.max_buffer_bytes, name_);
    const tp::Device cpu{tp::kCpuDeviceType, 0};
    if (!(tensor.sourceDevice == cpu) || !tensor.targetDevice.has_value() ||
        !(*tensor.targetDevice == cpu)) {
      refuse("buffer from or for another device than the CPU");
    }
  }
}

void TensorPipeConnection::descriptor_came(const tp::Error& error,
                                           const tp::Descriptor& descriptor) {
  if (error) return fail(translate(error, in_handshake()));
  note_heard();
  auto message = std::make_shared<Message>();
  tp::Allocation allocation;
  try {
    check(descriptor);
    if (!descriptor.payloads.empty()) {
      message->frame.resize(descriptor.payloads[0].length);
      allocation.payloads.push_back({message->frame.data()});
    }
    message->buffers.reserve(descriptor.tensors.size());
    allocation.tensors.reserve(descriptor.tensors.size());
    for (const auto& tensor : descriptor.tensors) {
      message->buffers.push_back(endpoint_->options.allocator(Device{}, tensor.length));
      allocation.tensors.push_back({tp::CpuBuffer{message->buffers.back().data}});
    }
  } catch (...) {
    // The message stays unread, so the pipe cannot be read any more.
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

void TensorPipeConnection::message_came(Message message) {
  note_heard();
  if (in_handshake()) {
    if (!received_handshake(message.frame.span())) shut();
  } else {
    received(std::move(message));
  }
  read_next();  // also after shut(): the failure of this read reports the end
}

Error TensorPipeConnection::translate(const tp::Error& error, bool connecting) const {
  const std::string start = connecting && role() == Role::connecting
                                ? "connect to \"" + name_ + "\" failed: "
                                : "connection " + name_ + " ended: ";
  return Error(ErrorCode::disconnected, start + text_of(error));
}

void TensorPipeConnection::shut() {
  std::shared_ptr<tp::Pipe> pipe;
  {
    base::MutexLock lock(stream_mutex_);
    shut_ = true;
    pipe = stream_.pipe;
  }
  if (pipe == nullptr) return;
  InsideCall call;
  pipe->close();
}

void TensorPipeConnection::finished() {
  Stream ended;
  {
    base::MutexLock lock(stream_mutex_);
    ended = std::exchange(stream_, {});
  }
  {
    InsideCall call;
    ended.pipe.reset();
  }
  endpoint_->remove(self());
}

}  // namespace stitch::transport
