#pragma once

#include <uv.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "stitch/transport/bytes.h"

namespace stitch::transport {

class FramedStream;

// What the owner of a stream hears. Called on the loop's thread.
class FrameReceiver {
 public:
  virtual ~FrameReceiver() = default;
  virtual void on_frame(FramedStream& stream, std::span<const std::byte> frame) = 0;
  // The stream ended: exactly once, the last call, also after close().
  virtual void on_closed(FramedStream& stream, const std::string& why) = 0;
};

// A TCP connection of the store: eight magic bytes each way, then frames of {u32 length,
// little-endian; bytes}. A length is compared with the limit before memory is taken, and memory
// then grows with what really arrives. Keeps itself alive from creation until it is closed. Thread
// contract: the loop's thread only.
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
  void start(std::shared_ptr<FrameReceiver> receiver, std::size_t max_frame_bytes);
  void set_receiver(std::shared_ptr<FrameReceiver> receiver) { receiver_ = std::move(receiver); }
  void set_max_frame_bytes(std::size_t bytes) { max_frame_bytes_ = bytes; }
  // While more than this waits to be sent, nothing is read: the other side must take its answers
  // before it asks for more.
  void set_max_unsent_bytes(std::size_t bytes) { max_unsent_bytes_ = bytes; }
  void send(Bytes frame) { write(std::move(frame), false); }
  // Closes once the frame is sent.
  void send_last(Bytes frame) { write(std::move(frame), true); }
  void close(const std::string& why);
  [[nodiscard]] bool closing() const { return closing_; }
  // True when the other side has sent the magic bytes: it is a store or its client.
  [[nodiscard]] bool greeted() const { return greeted_; }

 private:
  struct Write;
  FramedStream() = default;
  void write(Bytes frame, bool last);
  void submit(std::unique_ptr<Write> request);
  void read();
  void on_read(std::ptrdiff_t bytes);
  void on_written(bool last, int status);
  void take_frames();

  uv_tcp_t tcp_{};
  std::shared_ptr<FramedStream> self_;  // until the handle is closed
  std::shared_ptr<FrameReceiver> receiver_;
  std::size_t max_frame_bytes_ = 0;
  std::size_t max_unsent_bytes_ = kNoLimit;
  Bytes input_;
  std::size_t filled_ = 0;  // of input_
  bool greeted_ = false;
  bool paused_ = false;  // too much is unsent
  bool taking_ = false;  // inside take_frames()
  bool closing_ = false;
  std::string why_;
};

}  // namespace stitch::transport
