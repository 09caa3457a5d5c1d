#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/transport/store/store.h"
#include "stitch/transport/store/tcp_store.h"

// The requests and replies of the TCP store, in the frames of FramedStream, after the handshake
// (store_handshake.h). With a secret each is a sealed record (session_seal.h). Integers are
// little-endian, strings are {u32 length, bytes}.
//
//   client: u64 id, u8 operation, arguments:   set {key, value}   get {key, i64 timeout ms}
//           try_get {key}   wait {u32 count, keys, i64 timeout ms}   add {key, i64}
//           compare_and_set {key, u8 is expected, expected, desired}   erase {key}
//   server: u64 id, status; when that is 0: the result:   get {value}   try_get {u8 is there,
//           value}   add {i64}   compare_and_set {value}   erase {u8}. Otherwise a text. In any
//           order: replies to gets and waits are sent once the keys are there
//   server: u64 0, status, text: the reason for which it closes the connection
//
// status is a u8: 0, or an ErrorCode. Ids begin at 1. A malformed message ends its connection.
namespace stitch::transport {

enum class StoreOperation : std::uint8_t {
  set = 1,
  get,
  try_get,
  wait,
  add,
  compare_and_set,
  erase
};

inline constexpr std::size_t kMaxKeysOfAWait = 16384;
inline constexpr std::uint64_t kFarewell = 0;  // instead of the id of a request
inline constexpr std::size_t kMaxReplyBytes = Store::kMaxValueBytes + 4096;
inline constexpr std::size_t kMaxRequestBytes = 2 * Store::kMaxValueBytes + 4096;

[[nodiscard]] base::Bytes encode_accepted(const base::Bytes& rest);
[[nodiscard]] base::Bytes encode_refused(ErrorCode code, const std::string& text);
// The result after a status of 0. Throws the Error that was sent otherwise, or Error(protocol).
[[nodiscard]] std::span<const std::byte> decode_status(std::span<const std::byte> bytes);

// "host:port", with brackets around an IPv6 address; "host:29500..29503" for a span of ports.
[[nodiscard]] std::string store_address(const std::string& host, std::uint16_t port,
                                        int port_span = 1);
// The number of ports from options.port on that are tried.
[[nodiscard]] int ports_of(const TcpStoreOptions& options);

}  // namespace stitch::transport
