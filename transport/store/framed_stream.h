#pragma once

#include <uv.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/transport/store/byte_budget.h"
#include "stitch/transport/wire/session_seal.h"

namespace stitch::transport {

class FramedStream;

// The callbacks of a stream's owner. Called on the loop's thread.
class FrameReceiver {
 public:
  virtual ~FrameReceiver() = default;
  // May throw: that ends the stream as on_error() says.
  virtual void on_frame(FramedStream& stream, std::span<const std::byte> frame) = 0;
  // The received bytes are not a frame (`protocol`), were not sealed by the other side
  // (`unauthenticated`), or on_frame() has thrown. The stream is closed with the error after this
  // call, unless this sends a last frame.
  virtual void on_error(FramedStream&, const Error&) {}
  // The stream ended: exactly once, the last call, also after close().
  virtual void on_closed(FramedStream& stream, const Error& why) = 0;
};

// A TCP connection of the store: eight magic bytes each way, then frames of {u32 length,
// little-endian; bytes}, or sealed records instead of frames after seal(). A length is compared
// with the limits before memory is taken, and memory then grows with the bytes that arrive.
// Exceptions do not leave callbacks of libuv: each ends this one stream. Keeps itself alive from
// creation until it is closed. Thread contract: the loop's thread only.
class FramedStream : public std::enable_shared_from_this<FramedStream> {
 public:
  static constexpr std::size_t kNoLimit = ~std::size_t{0};

  static std::shared_ptr<FramedStream> create(uv_loop_t* loop);
  ~FramedStream();
  FramedStream(const FramedStream&) = delete;
  FramedStream& operator=(const FramedStream&) = delete;

  // The handle, to connect or accept with before start().
  [[nodiscard]] uv_tcp_t* tcp() { return &tcp_; }
  // Sends the magic bytes and begins to read. REQUIRES: connected.
  void start(std::shared_ptr<FrameReceiver> receiver, std::size_t frame_bytes);
  void set_receiver(std::shared_ptr<FrameReceiver> receiver) { receiver_ = std::move(receiver); }
  // Only frames of this size are accepted; start() sets the first size.
  void expect_frames_of(std::size_t bytes) { least_frame_bytes_ = most_frame_bytes_ = bytes; }
  void expect_frames_up_to(std::size_t bytes) {
    least_frame_bytes_ = 0;
    most_frame_bytes_ = bytes;
  }
  // From now on frames are sealed, and received ones must be.
  void seal(std::unique_ptr<Sealer> sealer, std::unique_ptr<Opener> opener);
  // Incomplete and unsent frames count against `budget` from now on.
  void set_budget(std::shared_ptr<ByteBudget> budget);
  // While more than this is unsent, nothing is read: the other side must read its replies before it
  // sends further requests.
  void set_max_unsent_bytes(std::size_t bytes) { max_unsent_bytes_ = bytes; }
  // May throw Error(overloaded): nothing was sent then.
  void send(base::Bytes frame) { write(std::move(frame), false); }
  // Closes once the frame is sent; frames that arrive meanwhile are dropped.
  void send_last(base::Bytes frame) { write(std::move(frame), true); }
  void close(const Error& why) noexcept;
  [[nodiscard]] std::size_t unsent_bytes() const;
  // True when the other side has sent the magic bytes: it is a store or its client.
  [[nodiscard]] bool greeted() const { return greeted_; }

 private:
  struct Write;
  FramedStream() = default;
  void write(base::Bytes frame, bool last);
  void submit(std::unique_ptr<Write> request);
  void read();
  void on_read(std::ptrdiff_t bytes);
  void on_written(bool last, int status);
  void on_closed() noexcept;
  void take_frames();
  // The frame at `at`, which is moved to its end; nothing when it is incomplete.
  [[nodiscard]] std::optional<std::span<const std::byte>> next_frame(std::size_t& at);
  void take_magic(std::size_t& at);
  void fail(const Error& error);

  uv_tcp_t tcp_{};
  std::shared_ptr<FramedStream> self_;  // until the handle is closed
  std::shared_ptr<FrameReceiver> receiver_;
  std::size_t least_frame_bytes_ = 0;
  std::size_t most_frame_bytes_ = 0;
  std::size_t max_unsent_bytes_ = kNoLimit;
  base::Bytes input_;
  std::size_t filled_ = 0;  // of input_
  std::shared_ptr<ByteBudget> budget_;
  BudgetShare held_;  // for input_
  std::unique_ptr<Sealer> sealer_;
  std::unique_ptr<Opener> opener_;
  bool greeted_ = false;
  bool paused_ = false;  // too much is unsent
  bool taking_ = false;  // inside take_frames()
  bool ending_ = false;  // the last frame is being sent
  bool closing_ = false;
  Error why_;
};

}  // namespace stitch::transport
