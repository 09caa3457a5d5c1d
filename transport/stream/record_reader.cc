#include "stitch/transport/stream/record_reader.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/transport/message_limits.h"

namespace stitch::transport {

namespace {
// Bytes that are read ahead between pieces of a large message: a record header and a little more.
constexpr std::size_t kStagedInBulk = 1024;
static_assert(RecordReader::kStagedBytes >=
              kSmallMessageBytes + RecordHeader::kBytes + kSmallMessageBuffers * 8);
// Bytes that a received buffer costs beside its contents, about.
constexpr std::size_t kPerBuffer = 128;
// Of a message for which there is no memory, bytes that are read at a time.
constexpr std::size_t kThrownAwayAtOnce = std::size_t{64} << 10;

[[noreturn]] void malformed(const std::string& what) {
  throw Error(ErrorCode::protocol, "record is malformed: " + what);
}
}  // namespace

RecordReader::RecordReader(Memory memory, LimitsNow limits, Sink sink, Budget budget)
    : memory_(std::move(memory)),
      limits_(std::move(limits)),
      sink_(std::move(sink)),
      budget_(std::move(budget)) {}

void RecordReader::clear() noexcept {
  bulk_.reset();
  staged_ = base::Bytes();
  begin_ = end_ = piece_left_ = 0;
  waiting_ = false;
}

bool RecordReader::read(Link& link) {
  if (waiting_) {
    while (take_record()) {
    }
    if (waiting_) return false;
  }
  std::size_t total = 0;
  while ((total < kReadBytes || link.holds_input()) && !waiting_) {
    make_room(1);
    iovec parts[2];
    std::size_t count = 0;
    std::size_t direct = 0;
    if (piece_left_ > 0) {
      // Nothing is staged then: the next bytes belong into the message's own memory.
      parts[0] = target();
      parts[0].iov_len = direct = std::min(parts[0].iov_len, piece_left_);
      ++count;
    }
    // A piece that continues after this target must not be staged.
    const bool more_of_piece = direct > 0 && direct < piece_left_;
    // Between pieces of a large message little is staged, so that what follows is read straight
    // into its place.
    const std::size_t stage =
        bulk_ ? std::min(kStagedInBulk, staged_.size() - end_) : staged_.size() - end_;
    if (!more_of_piece) parts[count++] = {staged_.data() + end_, stage};
    const std::size_t got = link.read({parts, count});
    if (got == 0) break;
    total += got;
    if (direct > 0) {
      const std::size_t into = std::min(got, direct);
      piece_left_ -= into;
      filled(into);
      end_ += got - into;
      end_bulk_if_complete();
    } else {
      end_ += got;
    }
    while (take_record()) {
    }
    if (std::exchange(gave_up_rest_, false)) break;
  }
  return total > 0;
}

std::vector<std::byte> RecordReader::give_up_rest() {
  std::vector<std::byte> rest(staged_.data() + begin_, staged_.data() + end_);
  begin_ = end_ = 0;
  gave_up_rest_ = true;
  return rest;
}

// Makes room for `bytes` more, but never for much more than has arrived: an announced size alone
// takes no memory.
void RecordReader::make_room(std::size_t bytes) {
  if (!open_) open_ = limits_().buffers_allowed;
  const std::size_t usual = open_ ? kStagedBytes : kStagedInHandshake;
  if (begin_ == end_) {
    begin_ = end_ = 0;
    if (staged_.size() > usual) staged_ = base::Bytes();
  }
  if (staged_.size() < usual) staged_.resize(usual);
  const std::size_t there = end_ - begin_;
  bytes = std::min(bytes, std::max(usual / 2, there));
  if (staged_.size() - end_ >= std::max(bytes, usual / 2)) return;
  std::memmove(staged_.data(), staged_.data() + begin_, there);
  end_ = there;
  begin_ = 0;
  if (staged_.size() - end_ < bytes) staged_.resize(end_ + bytes);
}

std::size_t RecordReader::size_at(std::size_t index) const noexcept {
  std::uint64_t size = 0;
  std::memcpy(&size, staged_.data() + begin_ + RecordHeader::kBytes + index * 8, sizeof(size));
  return static_cast<std::size_t>(base::to_wire_order(size));
}

void RecordReader::check(const RecordHeader& header) const {
  const Limits limits = limits_();
  check_size("frame", header.bytes, limits.frame_bytes);
  if (limits.is_size != nullptr && !limits.is_size(header.bytes))
    malformed("no message of a handshake has " + std::to_string(header.bytes) + " bytes");
  if (!limits.buffers_allowed && (header.buffers > 0 || header.kind != RecordKind::message)) {
    malformed("a handshake message has no buffers and comes whole");
  }
  const std::size_t most = header.kind == RecordKind::message ? kSmallMessageBuffers : kMaxBuffers;
  if (header.buffers > most)
    malformed(std::to_string(header.buffers) + " buffers, at most " + std::to_string(most) +
              " are allowed");
  if (header.kind == RecordKind::message && header.bytes > kSmallMessageBytes) {
    malformed("a frame of " + std::to_string(header.bytes) + " bytes came as a small message");
  }
}

void RecordReader::check_buffers(const RecordHeader& header) const {
  if (header.buffers == 0) return;
  const std::size_t limit = limits_().buffer_bytes;
  for (std::uint32_t i = 0; i < header.buffers; ++i) check_size("buffer", size_at(i), limit);
}

bool RecordReader::take_record() {
  if (piece_left_ > 0) {
    take_staged_data();
    return end_ > begin_ && piece_left_ == 0;
  }
  const std::size_t staged = end_ - begin_;
  if (staged < RecordHeader::kBytes) return false;
  const RecordHeader header = RecordHeader::decode(staged_.data() + begin_);
  if (header.kind == RecordKind::data) {
    if (!bulk_) malformed("data without a message that it belongs to");
    if (header.buffers != 0 || header.bytes == 0 || header.bytes > bulk_->left) {
      malformed("data of " + std::to_string(header.bytes) + " bytes where " +
                std::to_string(bulk_->left) + " are missing");
    }
    begin_ += RecordHeader::kBytes;
    piece_left_ = static_cast<std::size_t>(header.bytes);
    return true;
  }
  check(header);
  const std::size_t head = RecordHeader::kBytes + std::size_t{header.buffers} * 8;
  if (staged < head) {
    make_room(head - staged);
    return false;
  }
  if (header.kind == RecordKind::bulk) {
    if (bulk_) malformed("a large message begins inside another");
    waiting_ = !begin_bulk(header);
    if (waiting_) return false;
    begin_ += head;
    end_bulk_if_complete();
    return true;
  }
  std::size_t bytes = static_cast<std::size_t>(header.bytes);
  check_buffers(header);
  for (std::uint32_t i = 0; i < header.buffers; ++i) {
    const std::size_t size = size_at(i);
    if (size > kSmallMessageBytes || bytes + size > kSmallMessageBytes)
      malformed("a buffer of " + std::to_string(size) + " bytes came in a small message");
    bytes += size;
  }
  if (staged < head + bytes) {
    make_room(head + bytes - staged);
    return false;
  }
  take_message(header);
  return true;
}

void RecordReader::take_message(const RecordHeader& header) {
  Message message;
  const std::byte* from =
      staged_.data() + begin_ + RecordHeader::kBytes + std::size_t{header.buffers} * 8;
  message.frame.append(from, static_cast<std::size_t>(header.bytes));
  from += header.bytes;
  message.buffers.reserve(header.buffers);
  for (std::uint32_t i = 0; i < header.buffers; ++i) {
    const std::size_t size = size_at(i);
    message.buffers.push_back(memory_(message.frame, size));
    if (size > 0) std::memcpy(message.buffers.back().data, from, size);
    from += size;
  }
  begin_ = static_cast<std::size_t>(from - staged_.data());
  sink_(std::move(message));
}

bool RecordReader::begin_bulk(const RecordHeader& header) {
  check_buffers(header);
  const std::size_t limit = limits_().message_bytes;
  Bulk bulk;
  bulk.left = static_cast<std::size_t>(header.bytes);
  for (std::uint32_t i = 0; i < header.buffers; ++i) {
    const std::size_t size = size_at(i);
    if (bulk.left > limit || size > limit - bulk.left) {
      throw Error(ErrorCode::protocol, "message of " + std::to_string(header.buffers) +
                                           " buffers exceeds the limit of " +
                                           std::to_string(limit) + " bytes for all of them");
    }
    bulk.left += size;
  }
  if (budget_.take) {
    const std::size_t beside = header.buffers * kPerBuffer;
    const std::size_t wanted = bulk.left + std::min(beside, ~bulk.left);
    if (!budget_.take(wanted)) return false;
  }
  bulk.message.frame.resize(static_cast<std::size_t>(header.bytes));
  bulk.sizes.reserve(header.buffers);
  for (std::uint32_t i = 0; i < header.buffers; ++i) bulk.sizes.push_back(size_at(i));
  bulk_ = std::move(bulk);
  advance();
  return true;
}

// Moves on to the part that the next byte belongs to. The memory of a buffer may depend on the
// frame's contents; it is allocated when the bytes before it have arrived. Where there is none, the
// rest of the message is read and thrown away.
void RecordReader::advance() {
  Bulk& bulk = *bulk_;
  std::size_t bytes =
      bulk.part == 0 ? bulk.message.frame.size() : bulk.message.buffers[bulk.part - 1].bytes;
  while (bulk.offset == bytes && bulk.part < bulk.sizes.size()) {
    bytes = bulk.sizes[bulk.part];
    try {
      bulk.message.buffers.push_back(memory_(bulk.message.frame, bytes));
    } catch (const std::exception&) {
      leave_out_buffers(bulk.message, bulk.sizes);
      bulk.thrown_away.resize(kThrownAwayAtOnce);
      return;
    }
    ++bulk.part;
    bulk.offset = 0;
  }
}

// REQUIRES: the message is incomplete.
iovec RecordReader::target() noexcept {
  Bulk& bulk = *bulk_;
  if (bulk.lacks_memory())
    return {bulk.thrown_away.data(), std::min(bulk.thrown_away.size(), bulk.left)};
  const bool frame = bulk.part == 0;
  const std::size_t bytes =
      frame ? bulk.message.frame.size() : bulk.message.buffers[bulk.part - 1].bytes;
  auto* data = frame ? bulk.message.frame.data()
                     : static_cast<std::byte*>(bulk.message.buffers[bulk.part - 1].data);
  return {data + bulk.offset, bytes - bulk.offset};
}

void RecordReader::filled(std::size_t bytes) {
  bulk_->left -= bytes;
  if (bulk_->lacks_memory()) return;
  bulk_->offset += bytes;
  advance();
}

void RecordReader::take_staged_data() {
  while (piece_left_ > 0 && begin_ < end_) {
    const iovec to = target();
    const std::size_t step = std::min({to.iov_len, piece_left_, end_ - begin_});
    std::memcpy(to.iov_base, staged_.data() + begin_, step);
    begin_ += step;
    piece_left_ -= step;
    filled(step);
  }
  end_bulk_if_complete();
}

void RecordReader::end_bulk_if_complete() {
  if (!bulk_ || bulk_->left > 0) return;
  Message message = std::move(bulk_->message);
  bulk_.reset();
  if (budget_.give_back) budget_.give_back();
  sink_(std::move(message));
}

}  // namespace stitch::transport
