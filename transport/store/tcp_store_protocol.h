#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "stitch/base/error.h"
#include "stitch/transport/store/store_map.h"
#include "stitch/transport/wire/frame.h"

namespace stitch::transport {

// What a client of a TCP store and the server send each other, as frames of a connection between
// workers (WIRE.md). Kind 1 is a request:
//   {u64 number, u8 operation, string key, string value, i64 count}
// Kind 2 is its reply:
//   {u64 number, u8 ErrorCode or 0, u8 whether the value is there, i64 count, u32 entries, for
//   each: string key, string value}
// and the value, or the text of the error, as a buffer. Strings have their length before them in 4
// bytes. `get` and `claims` are answered when the key is there, or so many claims; `stop_waiting`
// asks for the answer of another request now. `release` and `stop_waiting` have no reply of their
// own.
enum class StoreOperation : std::uint8_t {
  set = 1,
  get,
  try_get,
  erase,
  claim,
  claims,
  release,
  stop_waiting,
};

struct StoreRequest {
  std::uint64_t number = 0;  // chosen by the client
  StoreOperation operation = StoreOperation::set;
  std::string key{};  // claims: the prefix
  std::string value{};
  std::int64_t count = 0;  // claims; stop_waiting: the number of the other one
};

struct StoreReply {
  std::uint64_t number = 0;
  std::optional<ErrorCode> error{};  // its text is the value
  StoreMap::Value value{};
  std::int64_t count = 0;       // erase, claim: 1 for yes
  StoreMap::Entries entries{};  // claims
};

// Of a request, with what stands around its key and values.
inline constexpr std::size_t kMaxRequestBytes = Store::kMaxValueBytes + 8192;

[[nodiscard]] Message encode(const StoreRequest& request);
[[nodiscard]] Message encode(const StoreReply& reply);
// Throw Error(protocol) for a message that is malformed, or has what a store does not take.
[[nodiscard]] StoreRequest decode_store_request(const Message& message);
[[nodiscard]] StoreReply decode_store_reply(const Message& message);

}  // namespace stitch::transport
