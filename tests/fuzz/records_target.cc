#include <algorithm>
#include <optional>

#include "stitch/transport/stream/record_reader.h"
#include "stitch/transport/wire/record.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::record_streams {

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

// What a reader made of a stream.
struct Read {
  std::vector<std::uint64_t> messages;  // a number of each, from its bytes
  bool refused = false;
};

static void mix(std::uint64_t& number, Bytes bytes) {
  number = (number ^ bytes.size()) * 1099511628211U;
  for (const std::byte each : bytes)
    number = (number ^ std::to_integer<std::uint64_t>(each)) * 1099511628211U;
}

// Reads the stream in pieces; buffers are allowed from the message `before_buffers` on.
static Read read_all(Bytes stream, std::size_t piece, unsigned before_buffers) {
  Read read;
  std::size_t taken = 0;
  Source source(stream, piece);
  RecordReader reader(
      [](const base::Bytes&, std::size_t bytes) { return transport::allocate_buffer({}, bytes); },
      [&] {
        RecordReader::Limits limits;
        limits.frame_bytes = kMaxFrame;
        limits.buffer_bytes = kMaxBuffer;
        limits.buffers_allowed = read.messages.size() >= before_buffers;
        limits.message_bytes = kMaxFrame + 2 * kMaxBuffer;
        return limits;
      },
      [&](transport::Message message) {
        std::uint64_t number = 14695981039346656037U;
        mix(number, message.frame.span());
        taken += message.frame.size();
        for (const auto& buffer : message.buffers) {
          mix(number, {static_cast<const std::byte*>(buffer.data), buffer.bytes});
          taken += buffer.bytes;
        }
        read.messages.push_back(number);
        require(taken <= stream.size(), "messages have more bytes than arrived");
      });
  read.refused = !accepts([&] {
    while (!source.empty()) {
      if (!reader.read(source)) break;
    }
  });
  return read;
}

// The input: the size of the pieces, how many messages come before buffers are allowed, records.
static bool run(Bytes input) {
  Choices choices(input);
  const std::size_t piece = 1 + std::size_t{choices.word()};
  const unsigned before_buffers = choices.byte() % 4;
  const Bytes stream = choices.rest();
  const Read in_pieces = read_all(stream, piece, before_buffers);
  const Read at_once = read_all(stream, stream.size() + 1, before_buffers);
  require(in_pieces.messages == at_once.messages && in_pieces.refused == at_once.refused,
          "what is read depends on the pieces in which it arrives");
  return !in_pieces.refused && in_pieces.messages.size() > before_buffers;
}

static void append(base::Bytes& to, const RecordHeader& header,
                   const std::vector<std::uint64_t>& sizes) {
  std::byte encoded[RecordHeader::kBytes];
  header.encode(encoded);
  to.append(encoded, sizeof(encoded));
  base::ByteWriter out(to);
  for (const std::uint64_t size : sizes) out.write(size);
}

static void append_text(base::Bytes& to, std::size_t bytes) {
  const std::string filler(bytes, 'x');
  to.append(filler.data(), filler.size());
}

static base::Bytes stream_of(std::uint16_t piece, std::uint8_t before_buffers) {
  base::Bytes stream;
  base::ByteWriter out(stream);
  out.write(piece);
  out.write(before_buffers);
  return stream;
}

static Seeds seeds() {
  using transport::RecordKind;
  Seeds list;
  base::Bytes small = stream_of(700, 0);
  append(small, {RecordKind::message, 1, 64}, {100});
  append_text(small, 164);
  append(small, {RecordKind::message, 0, 0}, {});
  list.push_back({"small", std::move(small)});
  base::Bytes bulk = stream_of(300, 0);
  append(bulk, {RecordKind::bulk, 1, 100}, {4000});
  append(bulk, {RecordKind::data, 0, 2000}, {});
  append_text(bulk, 2000);
  append(bulk, {RecordKind::message, 0, 5}, {});
  append_text(bulk, 5);
  append(bulk, {RecordKind::data, 0, 2100}, {});
  append_text(bulk, 2100);
  list.push_back({"bulk", std::move(bulk)});
  base::Bytes after = stream_of(9, 2);
  for (int i = 0; i < 2; ++i) {
    append(after, {RecordKind::message, 0, 80}, {});
    append_text(after, 80);
  }
  append(after, {RecordKind::bulk, 3, 10}, {0, 50, 7});
  append(after, {RecordKind::data, 0, 67}, {});
  append_text(after, 67);
  list.push_back({"after-handshake", std::move(after)});
  return list;
}

}  // namespace stitch::fuzz::record_streams

namespace stitch::fuzz {
// Twice 64 KiB are read ahead, and a buffer of at most 256 KiB is taken once what precedes it is
// there.
const Target records{"records", record_streams::run, record_streams::seeds, 64,
                     std::size_t{2} << 20};
}  // namespace stitch::fuzz
