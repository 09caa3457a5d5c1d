#include "stitch/transport/framed_stream.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "stitch/transport/byte_io.h"

namespace stitch::transport {

namespace {

// The first byte is no message type of other stores, so that a foreign server hangs up at once.
constexpr std::string_view kMagic = "stitchKV";
constexpr std::size_t kChunkBytes = std::size_t{64} << 10;

FramedStream* stream_of(void* handle) {
  return static_cast<FramedStream*>(static_cast<uv_handle_t*>(handle)->data);
}

}  // namespace

struct FramedStream::Write {
  uv_write_t request{};
  std::uint32_t length = 0;  // in the wire's order
  bool magic = false;        // the magic bytes instead of a frame
  bool last = false;
  Bytes frame;
  std::shared_ptr<FramedStream> stream;
};

std::shared_ptr<FramedStream> FramedStream::create(uv_loop_t* loop) {
  std::shared_ptr<FramedStream> stream(new FramedStream());
  uv_tcp_init(loop,
              &stream->tcp_);  // without a family it only fills in the handle, and cannot fail
  stream->tcp_.data = stream.get();
  stream->self_ = stream;
  return stream;
}

FramedStream::~FramedStream() = default;

void FramedStream::start(std::shared_ptr<FrameReceiver> receiver, std::size_t max_frame_bytes) {
  receiver_ = std::move(receiver);
  max_frame_bytes_ = max_frame_bytes;
  uv_tcp_nodelay(&tcp_, 1);
  uv_tcp_keepalive(&tcp_, 1, 30);
  auto greeting = std::make_unique<Write>();
  greeting->magic = true;
  submit(std::move(greeting));
  if (closing_) return;
  read();
}

void FramedStream::read() {
  const int status = uv_read_start(
      reinterpret_cast<uv_stream_t*>(&tcp_),
      [](uv_handle_t* handle, std::size_t, uv_buf_t* buffer) {
        FramedStream& stream = *stream_of(handle);
        stream.input_.resize(stream.filled_ + kChunkBytes);
        *buffer = uv_buf_init(reinterpret_cast<char*>(stream.input_.data() + stream.filled_),
                              kChunkBytes);
      },
      [](uv_stream_t* handle, ssize_t bytes, const uv_buf_t*) {
        stream_of(handle)->on_read(bytes);
      });
  if (status < 0) close(uv_strerror(status));
}

void FramedStream::on_read(std::ptrdiff_t bytes) {
  if (bytes < 0) {
    close(bytes == UV_EOF ? "the other side closed the connection"
                          : uv_strerror(static_cast<int>(bytes)));
    return;
  }
  filled_ += static_cast<std::size_t>(bytes);
  take_frames();
}

void FramedStream::take_frames() {
  if (taking_) return;
  taking_ = true;
  const auto keep = shared_from_this();
  std::size_t at = 0;
  if (!greeted_) {
    const std::size_t there = std::min(filled_, kMagic.size());
    if (std::memcmp(input_.data(), kMagic.data(), there) != 0)
      close("the other side does not speak the protocol of stitch stores");
    if (!closing_ && there == kMagic.size()) {
      greeted_ = true;
      at = there;
    }
  }
  std::uint32_t length = 0;
  while (greeted_ && !closing_ && !paused_ && filled_ - at >= sizeof(length)) {
    std::memcpy(&length, input_.data() + at, sizeof(length));
    length = to_wire_order(length);
    if (length > max_frame_bytes_) {
      close("a frame of " + std::to_string(length) + " bytes was announced, more than the " +
            std::to_string(max_frame_bytes_) + " allowed");
      break;
    }
    if (filled_ - at - sizeof(length) < length) break;
    const std::span<const std::byte> frame(input_.data() + at + sizeof(length), length);
    at += sizeof(length) + length;
    const std::shared_ptr<FrameReceiver> receiver = receiver_;  // the call may replace it
    receiver->on_frame(*this, frame);
    if (uv_stream_get_write_queue_size(reinterpret_cast<uv_stream_t*>(&tcp_)) > max_unsent_bytes_ &&
        !closing_) {
      paused_ = true;
      uv_read_stop(reinterpret_cast<uv_stream_t*>(&tcp_));
    }
  }
  filled_ -= at;
  if (filled_ == 0) {
    input_ = Bytes();  // idle connections hold no memory
  } else if (at > 0) {
    std::memmove(input_.data(), input_.data() + at, filled_);
  }
  taking_ = false;
}

void FramedStream::write(Bytes frame, bool last) {
  if (closing_) return;
  auto request = std::make_unique<Write>();
  request->length = to_wire_order(static_cast<std::uint32_t>(frame.size()));
  request->frame = std::move(frame);
  request->last = last;
  submit(std::move(request));
}

void FramedStream::submit(std::unique_ptr<Write> request) {
  request->stream = shared_from_this();
  request->request.data = request.get();
  std::array<uv_buf_t, 2> buffers{};
  unsigned count = 1;
  if (request->magic) {
    buffers[0] = uv_buf_init(const_cast<char*>(kMagic.data()), kMagic.size());
  } else {
    buffers[0] = uv_buf_init(reinterpret_cast<char*>(&request->length), sizeof(request->length));
    buffers[1] = uv_buf_init(reinterpret_cast<char*>(request->frame.data()),
                             static_cast<unsigned>(request->frame.size()));
    count = request->frame.size() > 0 ? 2 : 1;
  }
  const int status = uv_write(&request->request, reinterpret_cast<uv_stream_t*>(&tcp_),
                              buffers.data(), count, [](uv_write_t* done, int write_status) {
                                const std::unique_ptr<Write> mine(static_cast<Write*>(done->data));
                                mine->stream->on_written(mine->last, write_status);
                              });
  if (status < 0) {
    close(uv_strerror(status));
  } else {
    (void)request.release();  // the callback owns it
  }
}

void FramedStream::on_written(bool last, int status) {
  if (closing_) return;
  if (status < 0 || last) {
    close(status < 0 ? uv_strerror(status) : "this side closed the connection");
    return;
  }
  if (!paused_ ||
      uv_stream_get_write_queue_size(reinterpret_cast<uv_stream_t*>(&tcp_)) > max_unsent_bytes_ / 2)
    return;
  paused_ = false;
  take_frames();
  if (!paused_ && !closing_) read();
}

void FramedStream::close(const std::string& why) {
  if (closing_) return;
  closing_ = true;
  why_ = why;
  uv_close(reinterpret_cast<uv_handle_t*>(&tcp_), [](uv_handle_t* handle) {
    FramedStream& stream = *stream_of(handle);
    const std::shared_ptr<FramedStream> keep = std::move(stream.self_);
    if (const auto receiver = std::move(stream.receiver_)) receiver->on_closed(stream, stream.why_);
  });
}

}  // namespace stitch::transport
