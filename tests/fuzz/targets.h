#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/base/bytes.h"

// What is fuzzed: the decoders of bytes that peers, files and the environment give. Each target
// feeds one input to a decoder and returns whether it was accepted; it throws nothing. The same
// targets are fuzzed by libFuzzer (fuzz_<name>, in builds with STITCH_FUZZ) and run over the kept
// inputs in corpus/<name>/ in every build (corpus_test.cc).
namespace stitch::fuzz {

using Bytes = std::span<const std::byte>;

struct Target {
  const char* name;
  bool (*run)(Bytes input);
  // Inputs that must be accepted: what the encoders write.
  std::vector<base::Bytes> (*seeds)();
  // The memory that one input may take: `factor` bytes for each of its own, and `constant`.
  std::size_t factor = 64;
  std::size_t constant = std::size_t{1} << 20;
};

extern const Target archive;
extern const Target checkpoint;
extern const Target frame;
extern const Target handshake;
extern const Target ledger;
extern const Target member_record;
extern const Target options;
extern const Target records;
extern const Target store;
extern const Target tensors;

// Splits an input into choices and payloads. Reads zeros, and nothing, beyond its end.
class Choices {
 public:
  explicit Choices(Bytes input) : rest_(input) {}
  [[nodiscard]] bool empty() const noexcept { return rest_.empty(); }
  [[nodiscard]] std::uint8_t byte() {
    return empty() ? 0 : std::to_integer<std::uint8_t>(take(1)[0]);
  }
  [[nodiscard]] std::uint16_t word() {
    const unsigned low = byte();
    return static_cast<std::uint16_t>(low | (unsigned{byte()} << 8));
  }
  [[nodiscard]] Bytes take(std::size_t most) {
    const Bytes taken = rest_.first(std::min(most, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }
  [[nodiscard]] Bytes rest() { return take(rest_.size()); }

 private:
  Bytes rest_;
};

[[nodiscard]] inline base::Bytes copy_of(Bytes bytes) {
  base::Bytes copy;
  copy.append(bytes.data(), bytes.size());
  return copy;
}
[[nodiscard]] inline base::Bytes bytes_of(std::string_view text) {
  base::Bytes copy;
  copy.append(text.data(), text.size());
  return copy;
}
// Reads every byte, so that a view beyond what arrived is noticed.
inline void touch(Bytes bytes) {
  volatile unsigned sum = 0;
  for (const std::byte each : bytes) sum = sum + std::to_integer<unsigned>(each);
}

}  // namespace stitch::fuzz
