#include "stitch/transport/store/tcp_store_protocol.h"

#include <algorithm>

#include "stitch/base/byte_io.h"
#include "stitch/base/printable.h"
#include "stitch/transport/store/store_handshake.h"

namespace stitch::transport {

base::Bytes encode_accepted(const base::Bytes& rest) {
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(std::uint8_t{0});
  writer.write_bytes(rest.span());
  return bytes;
}

base::Bytes encode_refused(ErrorCode code, const std::string& text) {
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(code);
  constexpr std::size_t kMaxText = 4000;
  writer.write_string(std::string_view(text).substr(0, kMaxText));
  return bytes;
}

std::span<const std::byte> decode_status(std::span<const std::byte> bytes) {
  base::ByteReader reader(bytes, "reply of a tcp store");
  const auto status = reader.read<std::uint8_t>();
  if (status == 0) return reader.take(reader.remaining());
  if (status > static_cast<std::uint8_t>(ErrorCode::internal)) {
    throw Error(ErrorCode::protocol,
                "reply of a tcp store has an unknown status " + std::to_string(status));
  }
  const std::string text = base::printable(reader.read_string());
  reader.expect_end();
  throw Error(static_cast<ErrorCode>(status), text);
}

std::string store_address(const std::string& host, std::uint16_t port, int port_span) {
  std::string text = host.find(':') == std::string::npos ? host : '[' + host + ']';
  text += ':' + std::to_string(port);
  if (port_span > 1) text += ".." + std::to_string(port + port_span - 1);
  return text;
}

int ports_of(const TcpStoreOptions& options) {
  constexpr int kLastPort = 65535;
  return options.port == 0 ? 1 : std::clamp(options.port_span, 1, kLastPort - options.port + 1);
}

}  // namespace stitch::transport
