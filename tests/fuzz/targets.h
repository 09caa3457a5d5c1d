#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/base/bytes.h"
#include "stitch/base/error.h"

// What is fuzzed: the decoders of bytes that peers, files and the environment give. A target feeds
// one input to a decoder, checks what is said of it beyond that it does not crash, and returns
// whether the input was accepted. The same targets are fuzzed by libFuzzer (preset fuzz) and run
// over the kept inputs in corpus/<name>/ in every build (corpus_test.cc).
namespace stitch::fuzz {

using Bytes = std::span<const std::byte>;

struct Seed {
  std::string name;  // of its file in the corpus, behind "seed-"
  base::Bytes bytes;
};
using Seeds = std::vector<Seed>;

struct Target {
  const char* name;
  bool (*run)(Bytes input);
  // Inputs that must be accepted: what the encoders write. Their files are in the corpus.
  Seeds (*seeds)();
  // The memory that one input may take: `factor` bytes for each of its own, and `constant`.
  std::size_t factor = 64;
  std::size_t constant = std::size_t{1} << 20;
};

extern const Target archive;
extern const Target autograd;
extern const Target checkpoint;
extern const Target dumps;
extern const Target frame;
extern const Target gpu;
extern const Target handshake;
extern const Target member_record;
extern const Target pt_file;
extern const Target records;
extern const Target references;
extern const Target safetensors;
extern const Target session;
extern const Target store;
extern const Target tensors;

// Ends the program, so that the input is kept.
[[noreturn]] inline void fail(std::string_view what) {
  std::fprintf(stderr, "a decoder broke a rule: %.*s\n", static_cast<int>(what.size()),
               what.data());
  std::abort();
}
inline void require(bool holds, std::string_view what) {
  if (!holds) fail(what);
}
// Bytes may be refused with these errors only.
inline void require_code(const Error& error, std::initializer_list<ErrorCode> allowed) {
  if (std::find(allowed.begin(), allowed.end(), error.code()) == allowed.end())
    fail(std::string("refused with ") + std::string(to_string(error.code())) + ": " + error.what());
}

// Whether `read` takes its input: it returns, and nothing or true. It may refuse with these errors
// only.
template <class Read>
[[nodiscard]] bool accepts(std::initializer_list<ErrorCode> allowed, const Read& read) {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<const Read&>>) {
      read();
      return true;
    } else {
      return read();
    }
  } catch (const Error& error) {
    require_code(error, allowed);
    return false;
  }
}
template <class Read>
[[nodiscard]] bool accepts(const Read& read) {
  return accepts({ErrorCode::protocol}, read);
}
// A text that others gave, for the output of a terminal.
inline void require_printable(std::string_view text, std::string_view what) {
  const bool printable =
      std::all_of(text.begin(), text.end(), [](char each) { return each >= ' ' && each <= '~'; });
  if (!printable) fail(std::string(what) + " has unprintable characters");
}

// Splits an input into choices and payloads. Reads zeros, and nothing, beyond its end.
class Choices {
 public:
  explicit Choices(Bytes input) : rest_(input) {}
  [[nodiscard]] bool empty() const noexcept { return rest_.empty(); }
  [[nodiscard]] std::uint8_t byte() {
    return empty() ? std::uint8_t{0} : std::to_integer<std::uint8_t>(take(1)[0]);
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
[[nodiscard]] inline std::string text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
[[nodiscard]] inline bool same(Bytes one, Bytes other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end());
}
// A seed of a target whose first byte says which decoder the rest is for.
[[nodiscard]] inline base::Bytes seed_for(std::uint8_t decoder, Bytes rest) {
  base::Bytes seed;
  base::ByteWriter out(seed);
  out.write(decoder);
  out.write_bytes(rest);
  return seed;
}
// Reads every byte, so that a view beyond what arrived is noticed.
inline void touch(Bytes bytes) {
  volatile unsigned sum = 0;
  for (const std::byte each : bytes) sum = sum + std::to_integer<unsigned>(each);
}

}  // namespace stitch::fuzz
