#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"

// Fixed-size little-endian fields and length-prefixed strings, read with every length checked. Not
// thread-safe.
namespace stitch::base {

class ByteWriter {
 public:
  explicit ByteWriter(Bytes& out) : out_(out) {}

  template <WireScalar T>
  void write(T value) {
    value = to_wire_order(value);
    out_.append(&value, sizeof(T));
  }
  void write_string(std::string_view text) {
    write(static_cast<std::uint32_t>(text.size()));
    out_.append(text.data(), text.size());
  }
  void write_bytes(std::span<const std::byte> bytes) { out_.append(bytes.data(), bytes.size()); }

 private:
  Bytes& out_;
};

class ByteReader {
 public:
  // `what` names the thing being read in errors; it must outlive the reader.
  ByteReader(std::span<const std::byte> bytes, std::string_view what)
      : bytes_(bytes), what_(what) {}

  template <WireScalar T>
  [[nodiscard]] T read() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return to_wire_order(value);
  }
  [[nodiscard]] std::string read_string() {
    const auto text = take(read<std::uint32_t>());
    return std::string(reinterpret_cast<const char*>(text.data()), text.size());
  }
  [[nodiscard]] std::span<const std::byte> take(std::size_t bytes) {
    if (bytes > remaining()) {
      throw Error(ErrorCode::protocol,
                  std::string(what_) + " is cut short: " + std::to_string(bytes) +
                      " bytes wanted, " + std::to_string(remaining()) + " left");
    }
    const auto taken = bytes_.subspan(at_, bytes);
    at_ += bytes;
    return taken;
  }
  // A count of items of at least `bytes_each` bytes. Throws Error(protocol), before memory is
  // allocated for them, when the rest is too short for that many.
  [[nodiscard]] std::uint32_t read_count(std::size_t bytes_each) {
    const auto count = read<std::uint32_t>();
    if (bytes_each != 0 && count > remaining() / bytes_each) {
      throw Error(ErrorCode::protocol, std::string(what_) + " announces " + std::to_string(count) +
                                           " items, but only " + std::to_string(remaining()) +
                                           " bytes are left");
    }
    return count;
  }
  [[nodiscard]] std::size_t remaining() const noexcept { return bytes_.size() - at_; }
  void expect_end() const {
    if (remaining() != 0) {
      throw Error(ErrorCode::protocol,
                  std::string(what_) + " has " + std::to_string(remaining()) + " bytes too many");
    }
  }

 private:
  std::span<const std::byte> bytes_;
  std::string_view what_;
  std::size_t at_ = 0;
};

}  // namespace stitch::base
