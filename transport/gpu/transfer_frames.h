#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/transport/gpu/nccl_api.h"
#include "stitch/transport/gpu/path_choice.h"

// The frames of device transfers, byte for byte as in PROTOCOL.md: each a kind and fields. encode()
// never fails; decode() throws Error(protocol) for bytes that no correct peer sends. Thread
// contract: any thread.
namespace stitch::transport::gpu {

enum class FrameKind : std::uint8_t {
  hello = 1,
  rts = 2,
  cts = 3,
  retry = 4,
  grant = 5,
  data = 6,
  finished = 7,
  cancel = 8,
  comm_open = 9,
  comm_ready = 10,
  comm_break = 11,
  forget = 12,
};

// A directed pair of devices of two workers in one of its epochs.
struct PairName {
  std::uint32_t source_device = 0;
  std::uint32_t destination_device = 0;
  std::uint64_t epoch = 0;
  friend auto operator<=>(const PairName&, const PairName&) = default;
};

struct HelloFrame {
  std::uint64_t uid = 0;  // of the worker, in keys of the order
  ProcessIdentity process;
  std::int32_t nccl_version = 0;
  std::vector<std::array<char, 16>> device_uuids;
};
struct RtsFrame {
  std::uint64_t id = 0;  // 0: the first transfer of a pair, which tests it
  Path path = Path::staging;
  PairName pair;  // its epoch only for nccl
  std::uint64_t bytes = 0;
  std::uint64_t clock = 0;  // nccl; local and peer: the random key of the offer; else 0
};
struct CtsFrame {
  std::uint64_t id = 0;
  PairName pair;
  std::uint64_t clock = 0;
};
struct RetryFrame {  // destination: begin that transfer again, by staging
  std::uint64_t id = 0;
};
struct GrantFrame {  // destination: has slots for so many more chunks
  std::uint64_t id = 0;
  std::uint32_t chunks = 0;
};
struct DataFrame {
  std::uint64_t id = 0;
  std::uint64_t offset = 0;
  std::span<const std::byte> bytes;
};
struct FinishedFrame {  // destination: has the bytes, or refuses them by `text`
  std::uint64_t id = 0;
  PairName pair{};  // only for id 0
  std::uint8_t failed = 0;
  std::string text{};
};
struct CancelFrame {  // source: the transfer has failed
  std::uint64_t id = 0;
  std::uint8_t code = 0;  // an ErrorCode
  std::string text;
};
struct ForgetFrame {  // source: CANCEL and that FINISHED have crossed
  std::uint64_t id = 0;
};
struct CommOpenFrame {
  PairName pair;
  std::int32_t nccl_version = 0;
  std::uint64_t piece_bytes = 0;  // larger transfers go in pieces of this
  nccl::UniqueId unique_id{};
};
struct CommReadyFrame {
  PairName pair;
};
struct CommBreakFrame {
  PairName pair;
  std::uint8_t from_source = 0;  // 1: the sender of the frame is the source of the pair
  std::string text;
};

template <class Frame>
[[nodiscard]] base::Bytes encode(const Frame& frame);
[[nodiscard]] FrameKind kind_of(std::span<const std::byte> frame);
// REQUIRES: the bytes have the kind of that frame. A DataFrame refers to them.
template <class Frame>
[[nodiscard]] Frame decode(std::span<const std::byte> bytes);

}  // namespace stitch::transport::gpu
