#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "stitch/transport/endpoint.h"
#include "stitch/transport/stream/link.h"
#include "stitch/transport/wire/record.h"

namespace stitch::transport {

// The receiving half of a stream connection: reads records from the link and hands out the messages
// that are complete. Every length is checked before memory is taken for it, and the buffers of a
// large message get theirs one after the other, each when the bytes before it have arrived. Not
// thread-safe. The reader holds no reference to a message once it has been passed to the sink.
class RecordReader {
 public:
  struct Limits {
    std::size_t frame_bytes = 0;
    std::size_t buffer_bytes = 0;
    bool buffers_allowed = true;
    std::size_t message_bytes = std::numeric_limits<std::size_t>::max();  // frame and buffers
    bool (*is_size)(std::size_t frame_bytes) noexcept = nullptr;  // when only some are allowed
  };
  // Asked before each record, since what is allowed grows with the handshake.
  using LimitsNow = std::function<Limits()>;
  using Sink = std::function<void(Message)>;
  // Returns memory for a buffer of the message whose frame, `frame`, has arrived.
  using Memory = std::function<Buffer(const base::Bytes& frame, std::size_t bytes)>;

  // Decides when a large message may begin. Without it: immediately.
  struct Budget {
    // Whether there is room for a message that will take so much memory. When not, nothing more is
    // read until read() is called again and this returns true.
    std::function<bool(std::size_t bytes)> take;
    // The message is complete and owned by its receiver from now on.
    std::function<void()> give_back;
  };

  RecordReader(Memory memory, LimitsNow limits, Sink sink, Budget budget = {});

  // Reads what has arrived, at most about kReadBytes, and passes complete messages to the sink.
  // Returns whether bytes arrived. Throws Error(protocol) when they are malformed, and
  // std::bad_alloc where a frame has no memory; nothing more can be read then.
  bool read(Link& link);
  // Whether a large message waits for the budget.
  [[nodiscard]] bool waiting() const noexcept { return waiting_; }
  // Whether a part of a large message has been read.
  [[nodiscard]] bool in_bulk() const noexcept { return bulk_.has_value(); }
  // Drops what is incomplete, and the memory.
  void clear() noexcept;

  // Bytes that are read ahead: fewer until buffers are allowed, at the end of the handshake.
  static constexpr std::size_t kStagedBytes = std::size_t{64} << 10;
  static constexpr std::size_t kStagedInHandshake = 1024;
  // Memory held for what has been read ahead.
  [[nodiscard]] std::size_t staging_bytes() const noexcept { return staged_.size(); }

  // From within the sink: moves out what has been read ahead of the message. The read() under way
  // ends: what follows is to be read from another link.
  [[nodiscard]] std::vector<std::byte> give_up_rest();

  // Bytes of one read(): then other sources have their turn.
  static constexpr std::size_t kReadBytes = std::size_t{512} << 10;

 private:
  // A bulk message that is being received.
  struct Bulk {
    Message message;
    std::vector<std::size_t> sizes;  // of the buffers, with memory or without
    std::size_t part = 0;            // 0: the frame, then the buffers
    std::size_t offset = 0;          // in it
    std::size_t left = 0;            // bytes missing of the whole message
    base::Bytes thrown_away{};       // where these go once there is no memory for a buffer
    [[nodiscard]] bool lacks_memory() const noexcept { return thrown_away.size() > 0; }
  };

  // Takes one record, or what there is of it, from the staged bytes. False when more must arrive
  // first.
  bool take_record();
  void take_message(const RecordHeader& header);
  // False when it has to wait.
  [[nodiscard]] bool begin_bulk(const RecordHeader& header);
  void take_staged_data();
  [[nodiscard]] std::size_t size_at(std::size_t index) const noexcept;
  void check(const RecordHeader& header) const;
  void check_buffers(const RecordHeader& header) const;
  // The next memory of the bulk message to be filled, empty at its end.
  [[nodiscard]] iovec target() noexcept;
  void filled(std::size_t bytes);
  void advance();
  void end_bulk_if_complete();
  void make_room(std::size_t bytes);

  const Memory memory_;
  const LimitsNow limits_;
  const Sink sink_;
  const Budget budget_;
  base::Bytes staged_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::optional<Bulk> bulk_;
  std::size_t piece_left_ = 0;  // of the data record under way
  bool gave_up_rest_ = false;
  bool open_ = false;  // buffers are allowed
  bool waiting_ = false;
};

}  // namespace stitch::transport
