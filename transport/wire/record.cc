#include "stitch/transport/wire/record.h"

#include <cstring>

#include "stitch/base/byte_io.h"
#include "stitch/base/error.h"

namespace stitch::transport {

void RecordHeader::encode(std::byte* at) const noexcept {
  std::memset(at, 0, 4);
  at[0] = static_cast<std::byte>(kind);
  const auto wire_buffers = base::to_wire_order(buffers);
  const auto wire_bytes = base::to_wire_order(bytes);
  std::memcpy(at + 4, &wire_buffers, sizeof(wire_buffers));
  std::memcpy(at + 8, &wire_bytes, sizeof(wire_bytes));
}

RecordHeader RecordHeader::decode(const std::byte* at) {
  const auto kind = static_cast<std::uint8_t>(at[0]);
  if (kind < 1 || kind > 3)
    throw Error(ErrorCode::protocol,
                "record is malformed: kind " + std::to_string(kind) + " is unknown");
  if (at[1] != std::byte{0} || at[2] != std::byte{0} || at[3] != std::byte{0}) {
    throw Error(ErrorCode::protocol, "record is malformed: its reserved bytes are not 0");
  }
  RecordHeader header;
  header.kind = static_cast<RecordKind>(kind);
  std::memcpy(&header.buffers, at + 4, sizeof(header.buffers));
  std::memcpy(&header.bytes, at + 8, sizeof(header.bytes));
  header.buffers = base::to_wire_order(header.buffers);
  header.bytes = base::to_wire_order(header.bytes);
  return header;
}

}  // namespace stitch::transport
