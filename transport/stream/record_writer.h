#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <limits>
#include <span>
#include <vector>

#include "stitch/base/recycler.h"
#include "stitch/transport/endpoint.h"
#include "stitch/transport/stream/link.h"
#include "stitch/transport/wire/record.h"

namespace stitch::transport {

// Lays messages out as records and writes as much as the link takes. Large messages are written in
// pieces, one large message at a time; small ones that are sent later pass between the pieces, but
// a piece is written at least after every kSmallPerPiece bytes of them. Small ones keep their order
// among themselves, and so do large ones. Not thread-safe. Invokes no callbacks; completed sends
// are returned to the caller.
class RecordWriter {
 public:
  struct QueuedSend {
    Message message;
    SendDone done;
  };
  using Finished = std::vector<QueuedSend, base::RecyclingAllocator<QueuedSend>>;

  // Queues a message. REQUIRES: its buffers are on the CPU.
  void queue(QueuedSend&& queued);
  // Writes it immediately when nothing is queued before it and `link` has room: true; the message
  // then stays where it is. Otherwise queues it or the rest of it, as queue() does.
  [[nodiscard]] bool write(QueuedSend& queued, Link& link);
  struct Flushed {
    std::size_t bytes = 0;  // written
    bool full = false;      // the link had no room for more, or takes nothing although it has room
  };
  // Writes what there is room for, until at least `enough_bytes` are written. What is written
  // completely is moved to `finished`.
  Flushed flush(Link& link, Finished& finished,
                std::size_t enough_bytes = std::numeric_limits<std::size_t>::max());
  [[nodiscard]] bool empty() const noexcept { return small_.empty() && bulk_.empty(); }
  // Bytes of small messages that are queued.
  [[nodiscard]] std::size_t small_bytes() const noexcept;
  // Everything that is still queued: the large messages, then the small ones, each in order of
  // sending.
  [[nodiscard]] std::vector<QueuedSend> take_all();

  // Bytes of small messages that may pass a large one before its next piece.
  static constexpr std::size_t kSmallPerPiece = std::size_t{512} << 10;

 private:
  // What is written before the message itself.
  struct SmallHead {
    explicit SmallHead(const Message& message);
    std::array<std::byte, RecordHeader::kBytes + kSmallMessageBuffers * 8> data;
    std::size_t bytes = 0;
  };
  struct Small {
    Small(QueuedSend&& what, std::size_t message_bytes);
    SmallHead head;
    QueuedSend queued;
    std::size_t total_bytes = 0;
  };
  struct Bulk {
    Bulk(QueuedSend&& what, std::size_t message_bytes);
    std::vector<std::byte> head;
    QueuedSend queued;
    std::size_t total_bytes = 0;  // of the message
  };
  class Parts;

  static void add_small(const SmallHead& head, const Message& message, std::size_t skip,
                        Parts& parts);
  void add_bulk(Link& link, Parts& parts);
  [[nodiscard]] static std::span<const std::byte> part_of(const Message& message,
                                                          std::size_t part) noexcept;
  void written_small(std::size_t bytes, Finished& finished);
  void written_bulk(std::size_t bytes, Finished& finished);

  // Whether a record of the first bulk message has been written in part: nothing may be written in
  // between.
  [[nodiscard]] bool bulk_record_under_way() const noexcept {
    return piece_bytes_ > 0 ||
           (bulk_head_written_ > 0 && bulk_head_written_ < bulk_.front().head.size());
  }

  std::deque<Small, base::RecyclingAllocator<Small>> small_;
  std::size_t small_written_ = 0;  // of the first
  std::deque<Bulk, base::RecyclingAllocator<Bulk>> bulk_;
  // The first of bulk_: how much of its head and of its message is written, and the piece under
  // way.
  std::size_t bulk_head_written_ = 0;
  std::size_t bulk_written_ = 0;
  std::size_t bulk_part_ = 0;        // where bulk_written_ is: 0 the frame, then the buffers
  std::size_t bulk_part_begin_ = 0;  // and the bytes before that
  std::array<std::byte, RecordHeader::kBytes> piece_head_;
  std::size_t piece_bytes_ = 0;  // 0: none is under way
  std::size_t piece_head_written_ = 0;
  std::size_t piece_left_ = 0;
  std::size_t bulk_since_small_ = 0;  // bytes of large messages since a small one was sent
  std::size_t small_since_bulk_ = 0;  // bytes of small ones since a piece was written
};

}  // namespace stitch::transport
