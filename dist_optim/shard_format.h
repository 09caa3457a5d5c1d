#pragma once

#include <ATen/ATen.h>
#include <sodium.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace stitch::optim {

// Constants and helpers shared by the writer and the reader of shards, in the format of
// docs/checkpoints.md. Internal: include it from .cc files only, as it needs libsodium.

inline constexpr std::string_view kShardMagic{"stitchos"};
inline constexpr std::uint32_t kShardVersion = 2;
inline constexpr std::size_t kShardBlockBytes = std::size_t{1} << 20;  // of one read or write
inline constexpr std::string_view kShardSuffix = ".optimizer";
inline constexpr std::string_view kUnpublishedSuffix = ".optimizer.new";  // until publish()

// The index of an element type is its number in the format: append only.
inline constexpr std::array kElementTypes{
    at::kDouble, at::kFloat, at::kHalf,  at::kBFloat16, at::kComplexDouble, at::kComplexFloat,
    at::kLong,   at::kInt,   at::kShort, at::kChar,     at::kByte,          at::kBool};

inline constexpr std::size_t kChecksumBytes = 32;
using ShardChecksum = std::array<unsigned char, kChecksumBytes>;

// BLAKE2b-256 of all bytes passed to update(). Detects damage; it does not authenticate.
// Thread contract: one thread.
class ShardHasher {
 public:
  ShardHasher() { crypto_generichash_init(&state_, nullptr, 0, kChecksumBytes); }
  void update(const void* data, std::size_t size) {
    crypto_generichash_update(&state_, static_cast<const unsigned char*>(data), size);
  }
  ShardChecksum finish() {
    ShardChecksum sum{};
    crypto_generichash_final(&state_, sum.data(), sum.size());
    return sum;
  }

 private:
  crypto_generichash_state state_{};
};

// Throws Error(invalid_argument) "optimizer checkpoint <path> <why>".
[[noreturn]] void refuse_checkpoint(const std::filesystem::path& path, const std::string& why);
// The system's text for an errno.
[[nodiscard]] std::string system_error_text(int error);

}  // namespace stitch::optim
