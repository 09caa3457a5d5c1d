#pragma once

#include <cstddef>
#include <deque>

#include "stitch/transport/stream/link.h"
#include "stitch/transport/stream/record_reader.h"
#include "tests/support/plain_test.h"

namespace stitch::transport {

using Random = std::mt19937_64;
inline constexpr std::size_t kKiB = 1024;
inline constexpr std::size_t kMiB = 1024 * kKiB;

inline std::size_t below(Random& random, std::size_t end) {
  return static_cast<std::size_t>(random() % end);
}

// A pipe in memory: what is written can be read. With a seed it takes and gives random amounts of
// at most `most`, sometimes nothing.
class Pipe final : public Link {
 public:
  explicit Pipe(std::size_t capacity) : capacity_(capacity) {}
  Pipe(std::size_t capacity, std::uint64_t seed, std::size_t most)
      : capacity_(capacity), most_(most), random_(seed) {}

  int descriptor() const noexcept override { return -1; }
  bool cheap() const noexcept override { return true; }
  std::size_t read(std::span<const iovec> parts) override {
    std::size_t left = std::min(amount(), bytes_.size());
    std::size_t total = 0;
    for (const iovec& part : parts) {
      const std::size_t step = std::min(part.iov_len, left);
      std::copy_n(bytes_.begin(), step, static_cast<std::byte*>(part.iov_base));
      bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(step));
      left -= step;
      total += step;
    }
    return total;
  }
  std::size_t write(std::span<const iovec> parts) override {
    std::size_t left = std::min(amount(), capacity_ - bytes_.size());
    std::size_t total = 0;
    for (const iovec& part : parts) {
      const auto* from = static_cast<const std::byte*>(part.iov_base);
      const std::size_t step = std::min(part.iov_len, left);
      bytes_.insert(bytes_.end(), from, from + step);
      left -= step;
      total += step;
    }
    return total;
  }
  std::size_t bulk_room(bool) override { return std::min(amount(), capacity_ - bytes_.size()); }
  bool await_room() override { return bytes_.size() == capacity_ || below(random_, 2) == 0; }
  std::optional<Error> ended() override { return std::nullopt; }
  void close() noexcept override {}

  [[nodiscard]] bool empty() const { return bytes_.empty(); }
  void put(const std::vector<std::byte>& bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  [[nodiscard]] std::vector<std::byte> take() {
    std::vector<std::byte> all(bytes_.begin(), bytes_.end());
    bytes_.clear();
    return all;
  }

 private:
  [[nodiscard]] std::size_t amount() {
    if (!most_) return capacity_;
    return below(random_, 8) == 0 ? 0 : 1 + below(random_, *most_);
  }
  const std::size_t capacity_;
  const std::optional<std::size_t> most_;
  Random random_{0};
  std::deque<std::byte> bytes_;
};

// A reader, the messages it passes on and the memory it asks for.
struct Receiver {
  explicit Receiver(RecordReader::Limits limits = {64 * kMiB, 64 * kMiB, true})
      : reader(
            [this](const base::Bytes& frame, std::size_t bytes) {
              ++allocations;
              largest = std::max(largest, bytes);
              last_frame.assign(reinterpret_cast<const char*>(frame.data()), frame.size());
              return allocate_buffer(Device{}, bytes);
            },
            [limits] { return limits; },
            [this](Message message) { messages.push_back(std::move(message)); }) {}
  // Reads until nothing is left, or returns the error.
  std::optional<Error> drain(Pipe& pipe) {
    try {
      while (!pipe.empty()) reader.read(pipe);
    } catch (const Error& error) {
      return error;
    }
    return std::nullopt;
  }
  std::vector<Message> messages;
  std::size_t allocations = 0;
  std::size_t largest = 0;
  std::string last_frame;  // that memory was asked for
  RecordReader reader;
};

}  // namespace stitch::transport
