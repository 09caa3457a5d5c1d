#include <algorithm>

#include "stitch/base/error.h"
#include "stitch/transport/stream/record_reader.h"
#include "stitch/transport/wire/record.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {
namespace {

using transport::RecordHeader;
using transport::RecordReader;

// Gives the input in pieces.
class Source final : public transport::Link {
 public:
  Source(Bytes bytes, std::size_t piece) : bytes_(bytes), piece_(piece) {}
  int descriptor() const noexcept override { return -1; }
  bool cheap() const noexcept override { return true; }
  std::size_t read(std::span<const iovec> parts) override {
    std::size_t left = std::min(piece_, bytes_.size());
    std::size_t total = 0;
    for (const iovec& part : parts) {
      const std::size_t step = std::min(part.iov_len, left);
      std::copy_n(bytes_.begin(), step, static_cast<std::byte*>(part.iov_base));
      bytes_ = bytes_.subspan(step);
      left -= step;
      total += step;
    }
    return total;
  }
  std::size_t write(std::span<const iovec>) override { return 0; }
  std::size_t bulk_room(bool) override { return 0; }
  bool await_room() override { return true; }
  std::optional<Error> ended() override { return std::nullopt; }
  void close() noexcept override {}
  [[nodiscard]] bool empty() const noexcept { return bytes_.empty(); }

 private:
  Bytes bytes_;
  const std::size_t piece_;
};

constexpr std::size_t kMaxFrame = std::size_t{64} << 10;
constexpr std::size_t kMaxBuffer = std::size_t{256} << 10;

// The input: the size of the pieces, how many messages come before buffers are allowed, records.
bool run(Bytes input) {
  Choices choices(input);
  const std::size_t piece = 1 + std::size_t{choices.word()};
  unsigned before_buffers = choices.byte() % 4;
  unsigned messages = 0;
  Source source(choices.rest(), piece);
  RecordReader reader(
      [](const base::Bytes&, std::size_t bytes) { return transport::allocate_buffer({}, bytes); },
      [&] {
        RecordReader::Limits limits;
        limits.frame_bytes = kMaxFrame;
        limits.buffer_bytes = kMaxBuffer;
        limits.buffers_allowed = messages >= before_buffers;
        limits.message_bytes = kMaxFrame + 2 * kMaxBuffer;
        return limits;
      },
      [&](transport::Message message) {
        ++messages;
        touch({message.frame.data(), message.frame.size()});
        for (const auto& buffer : message.buffers)
          touch({static_cast<const std::byte*>(buffer.data), buffer.bytes});
      });
  try {
    while (!source.empty()) {
      if (!reader.read(source)) break;
    }
    while (reader.read(source)) continue;
    return messages > before_buffers;
  } catch (const Error&) {
    return false;
  }
}

void append(base::Bytes& to, const RecordHeader& header, const std::vector<std::uint64_t>& sizes) {
  std::byte encoded[RecordHeader::kBytes];
  header.encode(encoded);
  to.append(encoded, sizeof(encoded));
  base::ByteWriter out(to);
  for (const std::uint64_t size : sizes) out.write(size);
}

std::vector<base::Bytes> seeds() {
  const std::string filler(40000, 'x');
  std::vector<base::Bytes> list;
  for (const bool bulk : {false, true}) {
    base::Bytes seed;
    base::ByteWriter out(seed);
    out.write(std::uint16_t{700});
    out.write(std::uint8_t{0});
    if (bulk) {
      append(seed, {transport::RecordKind::bulk, 1, 100}, {40000});
      append(seed, {transport::RecordKind::data, 0, 20000}, {});
      seed.append(filler.data(), 20000);
      append(seed, {transport::RecordKind::message, 0, 5}, {});
      seed.append(filler.data(), 5);
      append(seed, {transport::RecordKind::data, 0, 20100}, {});
      seed.append(filler.data(), 20100);
    } else {
      append(seed, {transport::RecordKind::message, 1, 64}, {100});
      seed.append(filler.data(), 164);
    }
    list.push_back(std::move(seed));
  }
  return list;
}

}  // namespace

const Target records{"records", run, seeds};

}  // namespace stitch::fuzz
