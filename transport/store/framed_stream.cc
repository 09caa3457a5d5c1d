#include "stitch/transport/store/framed_stream.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/transport/store/callback_guard.h"

namespace stitch::transport {

namespace {

// The first byte is not a message type of other stores, so that their servers close immediately.
constexpr std::string_view kStreamMagic = "stitchKV";
constexpr std::size_t kChunkBytes = std::size_t{64} << 10;

FramedStream* stream_of(void* handle) {
  return static_cast<FramedStream*>(static_cast<uv_handle_t*>(handle)->data);
}

}  // namespace

struct FramedStream::Write {
  uv_write_t request{};
  std::uint32_t length = 0;  // in wire order
  bool magic = false;        // the magic bytes instead of a frame
  bool sealed = false;       // the frame has its own length
  bool last = false;
  base::Bytes frame;
  BudgetShare share;
  std::shared_ptr<FramedStream> stream;
};

std::shared_ptr<FramedStream> FramedStream::create(uv_loop_t* loop) {
  std::shared_ptr<FramedStream> stream(new FramedStream());
  uv_tcp_init(loop,
              &stream->tcp_);  // without a family it only initializes the handle and cannot fail
  stream->tcp_.data = stream.get();
  stream->self_ = stream;
  return stream;
}

FramedStream::~FramedStream() = default;

void FramedStream::start(std::shared_ptr<FrameReceiver> receiver, std::size_t frame_bytes) {
  receiver_ = std::move(receiver);
  expect_frames_of(frame_bytes);
  uv_tcp_nodelay(&tcp_, 1);
  uv_tcp_keepalive(&tcp_, 1, 30);
  auto greeting = std::make_unique<Write>();
  greeting->magic = true;
  submit(std::move(greeting));
  if (closing_) return;
  read();
}

void FramedStream::seal(std::unique_ptr<Sealer> sealer, std::unique_ptr<Opener> opener) {
  sealer_ = std::move(sealer);
  opener_ = std::move(opener);
}

void FramedStream::set_budget(std::shared_ptr<ByteBudget> budget) {
  budget_ = std::move(budget);
  held_ = BudgetShare(budget_);
}

std::size_t FramedStream::unsent_bytes() const {
  return uv_stream_get_write_queue_size(reinterpret_cast<const uv_stream_t*>(&tcp_));
}

void FramedStream::read() {
  const int status = uv_read_start(
      reinterpret_cast<uv_stream_t*>(&tcp_),
      [](uv_handle_t* handle, std::size_t, uv_buf_t* buffer) {
        FramedStream& stream = *stream_of(handle);
        *buffer = uv_buf_init(nullptr, 0);  // libuv then reports ENOBUFS
        guard_callback(
            [&] {
              stream.input_.resize(stream.filled_ + kChunkBytes);
              *buffer = uv_buf_init(reinterpret_cast<char*>(stream.input_.data() + stream.filled_),
                                    kChunkBytes);
            },
            [](const Error&) {});
      },
      [](uv_stream_t* handle, ssize_t bytes, const uv_buf_t*) {
        stream_of(handle)->on_read(bytes);
      });
  if (status < 0) close(Error(ErrorCode::disconnected, uv_strerror(status)));
}

void FramedStream::on_read(std::ptrdiff_t bytes) {
  if (bytes < 0) {
    const bool halfway = filled_ > 0 && !ending_;
    guard_callback(
        [&] {
          if (bytes != UV_EOF) {
            close(Error(ErrorCode::disconnected, uv_strerror(static_cast<int>(bytes))));
          } else if (halfway) {
            close(Error(ErrorCode::protocol,
                        "the other side closed the connection in the middle of a message"));
          } else {
            close(Error(ErrorCode::disconnected, "the other side closed the connection"));
          }
        },
        [&](const Error& error) { close(error); });
    return;
  }
  filled_ += static_cast<std::size_t>(bytes);
  take_frames();
}

void FramedStream::take_magic(std::size_t& at) {
  const std::size_t there = std::min(filled_, kStreamMagic.size());
  if (std::memcmp(input_.data(), kStreamMagic.data(), there) != 0) {
    throw Error(ErrorCode::protocol, "the other side does not speak the protocol of stitch stores");
  }
  if (there < kStreamMagic.size()) return;
  greeted_ = true;
  at = there;
}

std::optional<std::span<const std::byte>> FramedStream::next_frame(std::size_t& at) {
  std::uint32_t length = 0;
  const std::size_t before = opener_ ? SealedRecord::kHeaderBytes : sizeof(length);
  const std::size_t behind = opener_ ? SealedRecord::kTagBytes : 0;
  const std::size_t there = filled_ - at;
  if (there < before) return std::nullopt;
  std::byte* const start = input_.data() + at;
  std::size_t bytes = 0;
  if (opener_) {
    bytes = opener_->open_header(start);
  } else {
    std::memcpy(&length, start, sizeof(length));
    bytes = base::to_wire_order(length);
  }
  if (bytes < least_frame_bytes_ || bytes > most_frame_bytes_) {
    throw Error(ErrorCode::protocol,
                "a frame of " + std::to_string(bytes) + " bytes was announced, " +
                    (least_frame_bytes_ == most_frame_bytes_ ? "not of the " : "more than the ") +
                    std::to_string(most_frame_bytes_) + " allowed");
  }
  if (there - before < bytes + behind) return std::nullopt;
  at += before + bytes + behind;
  if (opener_) opener_->open(start + before, bytes, start + before);
  return std::span<const std::byte>(start + before, bytes);
}

void FramedStream::take_frames() {
  if (taking_) return;
  taking_ = true;
  const auto keep = shared_from_this();
  std::size_t at = 0;
  guard_callback(
      [&] {
        if (!greeted_ && !ending_) take_magic(at);
        while (greeted_ && !closing_ && !ending_ && !paused_) {
          const auto frame = next_frame(at);
          if (!frame) break;
          const std::shared_ptr<FrameReceiver> receiver = receiver_;  // the call may replace it
          receiver->on_frame(*this, *frame);
          if (unsent_bytes() > max_unsent_bytes_ && !closing_) {
            paused_ = true;
            uv_read_stop(reinterpret_cast<uv_stream_t*>(&tcp_));
          }
        }
        held_.resize(closing_ || ending_ ? 0 : filled_ - at);
      },
      [&](const Error& error) { fail(error); });
  filled_ = closing_ || ending_ ? 0 : filled_ - at;
  if (filled_ == 0) {
    input_ = base::Bytes();  // idle connections hold no memory
  } else if (at > 0) {
    std::memmove(input_.data(), input_.data() + at, filled_);
  }
  taking_ = false;
}

void FramedStream::fail(const Error& error) {
  if (closing_ || ending_) return;
  const std::shared_ptr<FrameReceiver> receiver = receiver_;
  guard_callback([&] { receiver->on_error(*this, error); }, [](const Error&) {});
  if (!ending_) close(error);
}

void FramedStream::write(base::Bytes frame, bool last) {
  if (closing_ || ending_) return;
  auto request = std::make_unique<Write>();
  request->share = BudgetShare(budget_);
  request->share.resize(frame.size());
  if (sealer_) {
    base::Bytes sealed(frame.size() + SealedRecord::kOverhead);
    sealer_->seal(frame.data(), frame.size(), sealed.data());
    request->sealed = true;
    request->frame = std::move(sealed);
  } else {
    request->length = base::to_wire_order(static_cast<std::uint32_t>(frame.size()));
    request->frame = std::move(frame);
  }
  request->last = last;
  ending_ = last;
  submit(std::move(request));
}

void FramedStream::submit(std::unique_ptr<Write> request) {
  request->stream = shared_from_this();
  request->request.data = request.get();
  std::array<uv_buf_t, 2> buffers{};
  unsigned count = 1;
  if (request->magic) {
    buffers[0] = uv_buf_init(const_cast<char*>(kStreamMagic.data()), kStreamMagic.size());
  } else if (request->sealed) {
    buffers[0] = uv_buf_init(reinterpret_cast<char*>(request->frame.data()),
                             static_cast<unsigned>(request->frame.size()));
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
    close(Error(ErrorCode::disconnected, uv_strerror(status)));
  } else {
    (void)request.release();  // the callback owns it
  }
}

void FramedStream::on_written(bool last, int status) {
  if (closing_) return;
  if (status < 0 || last) {
    guard_callback(
        [&] {
          close(Error(ErrorCode::disconnected,
                      status < 0 ? uv_strerror(status) : "this side closed the connection"));
        },
        [&](const Error& error) { close(error); });
    return;
  }
  if (!paused_ || unsent_bytes() > max_unsent_bytes_ / 2) return;
  paused_ = false;
  take_frames();
  if (!paused_ && !closing_) read();
}

void FramedStream::close(const Error& why) noexcept {
  if (closing_) return;
  closing_ = true;
  why_ = why;
  uv_close(reinterpret_cast<uv_handle_t*>(&tcp_),
           [](uv_handle_t* handle) { stream_of(handle)->on_closed(); });
}

void FramedStream::on_closed() noexcept {
  const std::shared_ptr<FramedStream> keep = std::move(self_);
  const auto receiver = std::move(receiver_);
  if (receiver) guard_callback([&] { receiver->on_closed(*this, why_); }, [](const Error&) {});
}

}  // namespace stitch::transport
