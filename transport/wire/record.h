#pragma once

#include <cstddef>
#include <cstdint>

namespace stitch::transport {

// The records of a stream connection; see WIRE.md. A record is a header, `buffers` sizes of 8 bytes
// each (message and bulk), and then the bytes it announces (message: the frame and the buffers,
// data: a piece of the bulk message in flight).
enum class RecordKind : std::uint8_t {
  message = 1,  // a whole small message
  bulk = 2,  // the start of a large message: its bytes follow in data records, with other messages
             // in between
  data = 3,
};

struct RecordHeader {
  RecordKind kind = RecordKind::message;
  std::uint32_t buffers = 0;  // message and bulk: the number of buffers beside the frame
  std::uint64_t bytes = 0;    // message and bulk: of the frame; data: of the piece

  static constexpr std::size_t kBytes = 16;
  void encode(std::byte* at) const noexcept;
  // Throws Error(protocol) when the bytes are not a header.
  [[nodiscard]] static RecordHeader decode(const std::byte* at);
};

// A message of this size or less, buffers included, travels as one record.
inline constexpr std::size_t kSmallMessageBytes = std::size_t{32} << 10;
inline constexpr std::size_t kSmallMessageBuffers = 8;
// A bulk message has at most this many buffers.
inline constexpr std::size_t kMaxBuffers = std::size_t{1} << 20;

}  // namespace stitch::transport
