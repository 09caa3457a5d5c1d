#include "stitch/transport/tcp_store_protocol.h"

#include <sodium.h>

#include <algorithm>

#include "stitch/transport/byte_io.h"

namespace stitch::transport {

Hello make_store_hello(const TcpStoreOptions& options, const char* name) {
  static const int started = sodium_init();
  if (started < 0) throw Error(ErrorCode::internal, "libsodium could not be initialised");
  Hello hello;
  static_assert(crypto_generichash_BYTES_MIN > sizeof(hello.world));
  std::array<unsigned char, crypto_generichash_BYTES_MIN> hash{};
  crypto_generichash(hash.data(), hash.size(),
                     reinterpret_cast<const unsigned char*>(options.job.data()), options.job.size(),
                     nullptr, 0);
  for (std::size_t byte = 0; byte < sizeof(hello.world); ++byte)
    hello.world = hello.world << 8 | hash[byte];
  hello.name = name;
  hello.authenticated = !options.secret.empty();
  randombytes_buf(hello.nonce.data(), hello.nonce.size());
  return hello;
}

Bytes encode_accepted(const Bytes& rest) {
  Bytes bytes;
  ByteWriter writer(bytes);
  writer.write(std::uint8_t{0});
  writer.write_bytes(rest.span());
  return bytes;
}

Bytes encode_refused(ErrorCode code, const std::string& text) {
  Bytes bytes;
  ByteWriter writer(bytes);
  writer.write(code);
  writer.write_string(std::string_view(text).substr(0, kMaxHandshakeBytes - 64));
  return bytes;
}

std::span<const std::byte> decode_status(std::span<const std::byte> bytes) {
  ByteReader reader(bytes, "reply of a tcp store");
  const auto status = reader.read<std::uint8_t>();
  if (status == 0) return reader.take(reader.remaining());
  if (status > static_cast<std::uint8_t>(ErrorCode::internal)) {
    throw Error(ErrorCode::protocol,
                "reply of a tcp store has an unknown status " + std::to_string(status));
  }
  std::string text = reader.read_string();
  reader.expect_end();
  // It may come from a stranger and may end up on a terminal.
  std::replace_if(
      text.begin(), text.end(),
      [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, '?');
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
