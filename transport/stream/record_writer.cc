#include "stitch/transport/stream/record_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "stitch/base/byte_io.h"

namespace stitch::transport {

namespace {
// Pieces of memory in one write: few enough for the stack.
constexpr std::size_t kMaxParts = 64;
// Bytes of large messages after a small one during which more small ones are expected.
constexpr std::size_t kSmallAboutBytes = std::size_t{4} << 20;
// Bytes of queued small messages that are written together.
constexpr std::size_t kGatherBytes = std::size_t{256} << 10;

void put_sizes(const Message& message, std::byte* at) noexcept {
  for (const Buffer& buffer : message.buffers) {
    const auto size = base::to_wire_order(static_cast<std::uint64_t>(buffer.bytes));
    std::memcpy(at, &size, sizeof(size));
    at += sizeof(size);
  }
}

[[nodiscard]] std::size_t bytes_of(const Message& message) noexcept {
  std::size_t bytes = message.frame.size();
  for (const Buffer& buffer : message.buffers) bytes += buffer.bytes;
  return bytes;
}
[[nodiscard]] bool is_small(const Message& message, std::size_t bytes) noexcept {
  return bytes <= kSmallMessageBytes && message.buffers.size() <= kSmallMessageBuffers;
}
}  // namespace

// Pieces of memory to be written together.
class RecordWriter::Parts {
 public:
  [[nodiscard]] bool room_for(std::size_t parts) const noexcept {
    return count_ + parts <= kMaxParts;
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::span<const iovec> span() const noexcept { return {parts_.data(), count_}; }
  // Adds [data, data + bytes) without its first `skip` bytes, and takes what it skipped off `skip`.
  void add(const void* data, std::size_t bytes, std::size_t& skip) noexcept {
    const std::size_t skipped = std::min(skip, bytes);
    skip -= skipped;
    if (bytes == skipped) return;
    parts_[count_++] = {const_cast<std::byte*>(static_cast<const std::byte*>(data)) + skipped,
                        bytes - skipped};
    bytes_ += bytes - skipped;
  }

 private:
  std::array<iovec, kMaxParts> parts_;
  std::size_t count_ = 0;
  std::size_t bytes_ = 0;
};

RecordWriter::SmallHead::SmallHead(const Message& message) {
  RecordHeader header;
  header.buffers = static_cast<std::uint32_t>(message.buffers.size());
  header.bytes = message.frame.size();
  bytes = RecordHeader::kBytes + message.buffers.size() * 8;
  header.encode(data.data());
  put_sizes(message, data.data() + RecordHeader::kBytes);
}

RecordWriter::Small::Small(QueuedSend&& what, std::size_t message_bytes)
    : head(what.message), queued(std::move(what)), total_bytes(head.bytes + message_bytes) {}

RecordWriter::Bulk::Bulk(QueuedSend&& what, std::size_t message_bytes)
    : head(RecordHeader::kBytes + what.message.buffers.size() * 8),
      queued(std::move(what)),
      total_bytes(message_bytes) {
  const Message& message = queued.message;
  RecordHeader header;
  header.kind = RecordKind::bulk;
  header.buffers = static_cast<std::uint32_t>(message.buffers.size());
  header.bytes = message.frame.size();
  header.encode(head.data());
  put_sizes(message, head.data() + RecordHeader::kBytes);
}

void RecordWriter::queue(QueuedSend&& queued) {
  const std::size_t bytes = bytes_of(queued.message);
  if (is_small(queued.message, bytes)) {
    bulk_since_small_ = 0;
    small_.emplace_back(std::move(queued), bytes);
  } else {
    bulk_.emplace_back(std::move(queued), bytes);
  }
}

bool RecordWriter::write(QueuedSend& queued, Link& link) {
  const std::size_t bytes = bytes_of(queued.message);
  if (!is_small(queued.message, bytes) || !empty()) {
    queue(std::move(queued));
    return false;
  }
  bulk_since_small_ = 0;
  const SmallHead head(queued.message);
  Parts parts;
  add_small(head, queued.message, 0, parts);
  const std::size_t written = link.write(parts.span());
  if (written == head.bytes + bytes) return true;
  small_.emplace_back(std::move(queued), bytes);
  small_written_ = written;
  return false;
}

void RecordWriter::add_small(const SmallHead& head, const Message& message, std::size_t skip,
                             Parts& parts) {
  parts.add(head.data.data(), head.bytes, skip);
  parts.add(message.frame.data(), message.frame.size(), skip);
  for (const Buffer& buffer : message.buffers) parts.add(buffer.data, buffer.bytes, skip);
}

// The first bulk message's head, or the piece that is under way, or its next piece.
void RecordWriter::add_bulk(Link& link, Parts& parts) {
  const Bulk& bulk = bulk_.front();
  std::size_t skip = bulk_head_written_;
  if (bulk_head_written_ < bulk.head.size()) {
    parts.add(bulk.head.data(), bulk.head.size(), skip);
    return;
  }
  if (piece_bytes_ == 0) {
    piece_bytes_ = piece_left_ = std::min(link.bulk_room(bulk_since_small_ < kSmallAboutBytes),
                                          bulk.total_bytes - bulk_written_);
    if (piece_bytes_ == 0) return;
    piece_head_written_ = 0;
    RecordHeader header;
    header.kind = RecordKind::data;
    header.bytes = piece_bytes_;
    header.encode(piece_head_.data());
  }
  skip = piece_head_written_;
  parts.add(piece_head_.data(), piece_head_.size(), skip);
  const Message& message = bulk.queued.message;
  std::size_t left = piece_left_;
  skip = bulk_written_ - bulk_part_begin_;
  for (std::size_t part = bulk_part_; left > 0 && parts.room_for(1); ++part) {
    const auto bytes = part_of(message, part);
    const std::size_t usable = std::min(bytes.size(), skip + left);
    left -= usable - std::min(skip, usable);
    parts.add(bytes.data(), usable, skip);
  }
}

std::span<const std::byte> RecordWriter::part_of(const Message& message,
                                                 std::size_t part) noexcept {
  if (part == 0) return message.frame.span();
  const Buffer& buffer = message.buffers[part - 1];
  return {static_cast<const std::byte*>(buffer.data), buffer.bytes};
}

RecordWriter::Flushed RecordWriter::flush(Link& link, Finished& finished,
                                          std::size_t enough_bytes) {
  Flushed flushed;
  int idle_turns = 0;
  while (!empty() && flushed.bytes < enough_bytes) {
    Parts parts;
    const bool due = !bulk_.empty() && small_since_bulk_ >= kSmallPerPiece;
    const bool small = small_written_ > 0 || (!bulk_record_under_way() && !small_.empty() && !due);
    if (small) {
      std::size_t skip = small_written_;
      for (const Small& each : small_) {
        if (!parts.room_for(2 + each.queued.message.buffers.size()) || parts.bytes() > kGatherBytes)
          break;
        add_small(each.head, each.queued.message, skip, parts);
        skip = 0;
        if (due) break;  // only the record under way
      }
    } else {
      add_bulk(link, parts);
    }
    const std::size_t written = parts.bytes() == 0 ? 0 : link.write(parts.span());
    const bool short_write = parts.bytes() == 0 || written < parts.bytes();
    flushed.bytes += written;
    if (written > 0 && small) {
      written_small(written, finished);
    } else if (written > 0) {
      written_bulk(written, finished);
    }
    flushed.full = short_write && link.await_room();
    // A link that claims to have room and takes nothing is asked again once, not endlessly.
    idle_turns = written == 0 ? idle_turns + 1 : 0;
    if (idle_turns == 2) flushed.full = true;
    if (flushed.full) break;
  }
  return flushed;
}

void RecordWriter::written_small(std::size_t bytes, Finished& finished) {
  while (bytes > 0) {
    Small& first = small_.front();
    const std::size_t step = std::min(bytes, first.total_bytes - small_written_);
    bytes -= step;
    small_written_ += step;
    if (!bulk_.empty()) small_since_bulk_ += step;
    if (small_written_ < first.total_bytes) return;
    finished.push_back(std::move(first.queued));
    small_.pop_front();
    small_written_ = 0;
  }
}

void RecordWriter::written_bulk(std::size_t bytes, Finished& finished) {
  Bulk& bulk = bulk_.front();
  if (bulk_head_written_ < bulk.head.size()) {
    bulk_head_written_ += bytes;
  } else {
    small_since_bulk_ = 0;
    const std::size_t of_head = std::min(bytes, piece_head_.size() - piece_head_written_);
    piece_head_written_ += of_head;
    bytes -= of_head;
    bulk_written_ += bytes;
    bulk_since_small_ += bytes;
    piece_left_ -= bytes;
    while (bulk_written_ < bulk.total_bytes) {
      const std::size_t of_part = part_of(bulk.queued.message, bulk_part_).size();
      if (bulk_written_ - bulk_part_begin_ < of_part) break;
      bulk_part_begin_ += of_part;
      ++bulk_part_;
    }
    if (piece_left_ == 0 && piece_head_written_ == piece_head_.size()) piece_bytes_ = 0;
  }
  if (bulk_head_written_ < bulk.head.size() || bulk_written_ < bulk.total_bytes) return;
  finished.push_back(std::move(bulk.queued));
  bulk_.pop_front();
  bulk_head_written_ = bulk_written_ = bulk_part_ = bulk_part_begin_ = piece_bytes_ = piece_left_ =
      0;
}

std::size_t RecordWriter::small_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const Small& each : small_) bytes += each.total_bytes;
  return bytes - small_written_;
}

std::vector<RecordWriter::QueuedSend> RecordWriter::take_all() {
  std::vector<QueuedSend> all;
  for (Bulk& each : bulk_) all.push_back(std::move(each.queued));
  for (Small& each : small_) all.push_back(std::move(each.queued));
  small_.clear();
  bulk_.clear();
  small_written_ = bulk_head_written_ = bulk_written_ = bulk_part_ = bulk_part_begin_ =
      piece_bytes_ = piece_left_ = small_since_bulk_ = 0;
  return all;
}

}  // namespace stitch::transport
