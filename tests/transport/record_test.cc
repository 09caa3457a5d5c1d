// Records, written and read over a link that takes and gives bytes in the worst pieces, and what is
// not a record.
#include "stitch/transport/wire/record.h"
#include "stitch/base/byte_io.h"
#include "stitch/transport/stream/record_reader.h"
#include "stitch/transport/stream/record_writer.h"
#include "tests/support/plain_test.h"
#include "tests/transport/memory_pipe.h"
#include "tests/transport/recorder.h"

namespace stitch::transport::record_test {
namespace {

std::size_t size_of(const Message& message) {
  std::size_t bytes = message.frame.size();
  for (const Buffer& buffer : message.buffers) bytes += buffer.bytes;
  return bytes;
}

bool is_small(const Message& message) {
  return size_of(message) <= kSmallMessageBytes && message.buffers.size() <= kSmallMessageBuffers;
}

// A frame that begins with `number` when there is room for it, then filler; buffers likewise
// filled.
Message make_numbered(std::uint32_t number, std::size_t frame_bytes,
                      const std::vector<std::size_t>& buffers = {}) {
  Message message;
  message.frame.resize(frame_bytes);
  if (frame_bytes > 0)
    std::memset(message.frame.data(), static_cast<int>(number & 0xff), frame_bytes);
  if (frame_bytes >= sizeof(number)) std::memcpy(message.frame.data(), &number, sizeof(number));
  for (const std::size_t bytes : buffers)
    message.buffers.push_back(make_filled_buffer(bytes, static_cast<unsigned char>(number)));
  return message;
}

bool equal(const Message& left, const Message& right) {
  if (left.frame.size() != right.frame.size() || left.buffers.size() != right.buffers.size())
    return false;
  if (left.frame.size() > 0 &&
      std::memcmp(left.frame.data(), right.frame.data(), left.frame.size()) != 0)
    return false;
  for (std::size_t i = 0; i < left.buffers.size(); ++i) {
    const Buffer& a = left.buffers[i];
    const Buffer& b = right.buffers[i];
    if (a.bytes != b.bytes || (a.bytes > 0 && std::memcmp(a.data, b.data, a.bytes) != 0))
      return false;
  }
  return true;
}

std::size_t random_size(Random& random) {
  constexpr std::array<std::size_t, 6> kAround{0, 1, 8 * kKiB, 32 * kKiB, 100 * kKiB, kMiB};
  // Most are small, as in practice; the largest ones are rare.
  const std::size_t around =
      kAround[below(random, 8) < 6 ? below(random, 3) : below(random, kAround.size())];
  const std::size_t size = around + below(random, 3);
  return size == 0 ? 0 : size - 1;
}

Message random_message(Random& random, std::uint32_t number) {
  std::vector<std::size_t> buffers(below(random, 3) == 0 ? below(random, 13) : 0);
  for (std::size_t& bytes : buffers) bytes = random_size(random);
  return make_numbered(number, random_size(random), buffers);
}

// Bytes written by hand.
struct Raw {
  std::vector<std::byte> bytes;
  Raw& header(unsigned kind, std::uint32_t buffers, std::uint64_t size,
              const std::vector<std::uint64_t>& sizes = {}) {
    std::array<std::byte, RecordHeader::kBytes> at{};
    RecordHeader header;
    header.kind = static_cast<RecordKind>(kind);
    header.buffers = buffers;
    header.bytes = size;
    header.encode(at.data());
    bytes.insert(bytes.end(), at.begin(), at.end());
    for (const std::uint64_t each : sizes) {
      const auto* from = reinterpret_cast<const std::byte*>(&each);
      bytes.insert(bytes.end(), from, from + sizeof(each));
    }
    return *this;
  }
  Raw& filler(std::size_t count) {
    bytes.insert(bytes.end(), count, std::byte{'f'});
    return *this;
  }
};

constexpr unsigned kMessage = 1;
constexpr unsigned kBulk = 2;
constexpr unsigned kData = 3;

TEST(Record, HeadersMatchTheProtocol) {
  RecordHeader header{RecordKind::bulk, 0x01020304, 0x1122334455667788};
  std::array<std::byte, RecordHeader::kBytes> at{};
  header.encode(at.data());
  const std::array<unsigned, 16> expected{2,    0,    0,    0,    4,    3,    2,    1,
                                          0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11};
  for (std::size_t i = 0; i < at.size(); ++i)
    EXPECT_EQ(static_cast<unsigned>(at[i]), expected[i]) << i;
  const RecordHeader read = RecordHeader::decode(at.data());
  EXPECT_EQ(read.kind, header.kind);
  EXPECT_EQ(read.buffers, header.buffers);
  EXPECT_EQ(read.bytes, header.bytes);
}

// True when it is written at once; else it is queued.
bool write(RecordWriter& writer, Message message, Pipe& pipe) {
  RecordWriter::QueuedSend queued{std::move(message), nullptr};
  return writer.write(queued, pipe);
}

// Sends random messages through `pipe` and compares what comes out.
void expect_transfer(Pipe& pipe, std::uint64_t seed, std::uint32_t count) {
  Random random(seed);
  RecordWriter writer;
  Receiver receiver;
  std::deque<Message> small;  // what is due, in order
  std::deque<Message> large;
  std::map<std::uint32_t, int> through;
  const auto account = [&](RecordWriter::QueuedSend& outgoing) { outgoing.done(std::nullopt); };
  std::uint32_t sent = 0;
  std::uint32_t came = 0;
  for (std::size_t step = 0; came < count; ++step) {
    ASSERT_LT(step, 20'000'000U) << "nothing moves";
    if (sent < count && below(random, 4) == 0) {
      // The same seed gives the same message twice: one to send, one to compare with.
      const std::uint64_t own = random();
      Random first(own);
      Random second(own);
      RecordWriter::QueuedSend outgoing{
          random_message(first, sent),
          [&through, sent](const std::optional<Error>&) { ++through[sent]; }};
      Message due = random_message(second, sent);
      (is_small(due) ? small : large).push_back(std::move(due));
      ++sent;
      if (below(random, 4) == 0) {
        writer.queue(std::move(outgoing));
      } else if (writer.write(outgoing, pipe)) {
        account(outgoing);
      }
    } else if (below(random, 2) == 0) {
      RecordWriter::Finished finished;
      writer.flush(pipe, finished);
      for (auto& each : finished) account(each);
    } else {
      ASSERT_NO_THROW(receiver.reader.read(pipe));
    }
    for (Message& message : receiver.messages) {
      auto& due = is_small(message) ? small : large;
      ASSERT_FALSE(due.empty());
      ASSERT_TRUE(equal(message, due.front())) << "message " << came << " of " << size_of(message)
                                               << " bytes, due are " << size_of(due.front());
      EXPECT_EQ(message.frame.size() == 0
                    ? 0U
                    : reinterpret_cast<std::uintptr_t>(message.frame.data()) % 64,
                0U);
      due.pop_front();
      ++came;
    }
    receiver.messages.clear();
  }
  RecordWriter::Finished finished;
  writer.flush(pipe, finished);
  for (auto& each : finished) account(each);
  EXPECT_TRUE(writer.empty());
  EXPECT_TRUE(pipe.empty());
  EXPECT_TRUE(writer.take_all().empty());
  ASSERT_EQ(through.size(), count);
  for (const auto& [number, times] : through) EXPECT_EQ(times, 1) << number;
}

TEST(Record, MessagesComeOutEqualOverALinkThatTakesEverything) {
  Pipe pipe(256 * kMiB);
  expect_transfer(pipe, 1, 300);
}

TEST(Record, MessagesComeOutEqualOverAFewBytesAtATime) {
  for (const std::size_t most : {7, 33, 1000}) {
    SCOPED_TRACE(most);
    Pipe pipe(3000, most, most);
    expect_transfer(pipe, most, most < 1000 ? 25 : 60);
  }
}

TEST(Record, MessagesComeOutEqualOverRandomPieces) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(seed);
    Pipe pipe(64 * kKiB * seed, seed, 20 * kKiB * seed);
    expect_transfer(pipe, seed, 120);
  }
}

TEST(Record, SmallMessagesPassALargeOne) {
  Pipe pipe(64 * kKiB);
  RecordWriter writer;
  Receiver receiver;
  RecordWriter::Finished finished;
  write(writer, make_numbered(0, kMiB), pipe);
  write(writer, make_numbered(1, 2 * kMiB), pipe);
  writer.flush(pipe, finished);
  EXPECT_TRUE(finished.empty());
  write(writer, make_numbered(2, 100), pipe);
  write(writer, make_numbered(3, kSmallMessageBytes), pipe);
  std::vector<std::size_t> order;
  for (int round = 0; round < 1000 && order.size() < 4; ++round) {
    receiver.reader.read(pipe);
    writer.flush(pipe, finished);
    for (const Message& message : receiver.messages) order.push_back(message.frame.size());
    receiver.messages.clear();
  }
  EXPECT_EQ(order, (std::vector<std::size_t>{100, kSmallMessageBytes, kMiB, 2 * kMiB}));
  EXPECT_EQ(finished.size(), 4U);
  EXPECT_TRUE(writer.empty());
}

TEST(Record, TheBorderBetweenSmallAndLargeIsTheWholeMessage) {
  struct Case {
    std::size_t frame;
    std::vector<std::size_t> buffers;
    bool small;
  };
  const std::vector<Case> cases{{kSmallMessageBytes, {}, true},
                                {kSmallMessageBytes + 1, {}, false},
                                {0, {kSmallMessageBytes}, true},
                                {1, {kSmallMessageBytes}, false},
                                {0, std::vector<std::size_t>(8, 0), true},
                                {0, std::vector<std::size_t>(9, 0), false},
                                {5, std::vector<std::size_t>(12, 0), false}};
  for (const Case& each : cases) {
    Pipe pipe(kMiB);
    RecordWriter writer;
    Receiver receiver;
    RecordWriter::Finished finished;
    EXPECT_EQ(write(writer, make_numbered(9, each.frame, each.buffers), pipe), each.small);
    writer.flush(pipe, finished);
    EXPECT_EQ(finished.size(), each.small ? 0U : 1U);
    EXPECT_TRUE(writer.empty());
    const auto bytes = pipe.take();
    EXPECT_EQ(static_cast<unsigned>(bytes[0]), each.small ? kMessage : kBulk);
    pipe.put(bytes);
    EXPECT_EQ(receiver.drain(pipe), std::nullopt);
    ASSERT_EQ(receiver.messages.size(), 1U);
    EXPECT_TRUE(equal(receiver.messages[0], make_numbered(9, each.frame, each.buffers)));
  }
}

TEST(Record, EveryMessageIsAccountedForOnceWhereverTheLinkEnds) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    Pipe pipe(1 + below(random, 400 * kKiB), seed, 50 * kKiB);
    RecordWriter writer;
    std::vector<std::uint32_t> small_left;
    std::vector<std::uint32_t> large_left;
    std::multiset<std::uint32_t> seen;
    // Every frame contains its number.
    const auto number_of = [](const RecordWriter::QueuedSend& outgoing) {
      std::uint32_t number = 0;
      std::memcpy(&number, outgoing.message.frame.data(), sizeof(number));
      return number;
    };
    constexpr std::uint32_t kCount = 40;
    for (std::uint32_t i = 0; i < kCount; ++i) {
      if (write(writer,
                make_numbered(i, 4 + random_size(random),
                              std::vector<std::size_t>(below(random, 12), 10)),
                pipe)) {
        seen.insert(i);
      }
      RecordWriter::Finished finished;
      if (below(random, 2) == 0) writer.flush(pipe, finished);
      for (const auto& each : finished) seen.insert(number_of(each));
    }
    for (const auto& each : writer.take_all()) {
      seen.insert(number_of(each));
      (is_small(each.message) ? small_left : large_left).push_back(number_of(each));
    }
    EXPECT_TRUE(writer.empty());
    EXPECT_TRUE(std::is_sorted(small_left.begin(), small_left.end()));
    EXPECT_TRUE(std::is_sorted(large_left.begin(), large_left.end()));
    ASSERT_EQ(seen.size(), kCount) << seed;
    for (std::uint32_t i = 0; i < kCount; ++i) EXPECT_EQ(seen.count(i), 1U) << seed;
    // It can be used anew, from the beginning of a record.
    Pipe fresh(kMiB);
    Receiver receiver;
    EXPECT_TRUE(write(writer, make_numbered(1, 30), fresh));
    EXPECT_EQ(receiver.drain(fresh), std::nullopt);
    EXPECT_EQ(receiver.messages.size(), 1U);
  }
}

TEST(Record, BytesOfALargeMessageMayBeCutAnywhere) {
  for (const std::size_t cut : {1, 2, 3, 17, 24}) {
    Raw raw;
    raw.header(kBulk, 3, 10, {0, 7, 8});
    for (std::size_t left = 25; left > 0;) {
      const std::size_t step = std::min(cut, left);
      raw.header(kData, 0, step).filler(step).header(kMessage, 0, 1).filler(1);
      left -= step;
    }
    Pipe pipe(kMiB, cut, 5);
    pipe.put(raw.bytes);
    Receiver receiver;
    EXPECT_EQ(receiver.drain(pipe), std::nullopt);
    ASSERT_EQ(receiver.messages.size(), 1 + (25 + cut - 1) / cut);
    EXPECT_EQ(size_of(receiver.messages[receiver.messages.size() - 2]), 25U);
  }
}

// Feeds `raw` in one piece and byte by byte: it must be refused both times with a text that
// contains `expected`.
void expect_refused(const Raw& raw, const std::string& expected,
                    RecordReader::Limits limits = {kMiB, kMiB, true}, std::size_t messages = 0) {
  SCOPED_TRACE(expected);
  for (const bool whole : {true, false}) {
    Pipe pipe = whole ? Pipe(64 * kMiB) : Pipe(64 * kMiB, 1, 1);
    pipe.put(raw.bytes);
    Receiver receiver(limits);
    const auto error = receiver.drain(pipe);
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::protocol);
    EXPECT_NE(std::string(error->what()).find(expected), std::string::npos) << error->what();
    EXPECT_EQ(receiver.messages.size(), messages);
    EXPECT_LE(receiver.largest, 100U);
    EXPECT_LE(receiver.allocations, 9U);
  }
}

TEST(Record, UnknownKindsAndReservedBytesAreRefused) {
  for (const unsigned kind : {0U, 4U, 255U})
    expect_refused(Raw().header(kind, 0, 4).filler(4), "kind " + std::to_string(kind));
  for (std::size_t i = 1; i < 4; ++i) {
    Raw raw;
    raw.header(kMessage, 0, 4).filler(4);
    raw.bytes[i] = std::byte{1};
    expect_refused(raw, "reserved");
  }
}

TEST(Record, CountsOfBuffersAreLimited) {
  expect_refused(Raw().header(kMessage, 9, 0, std::vector<std::uint64_t>(9, 0)),
                 "9 buffers, at most 8");
  expect_refused(Raw().header(kBulk, (1U << 20) + 1, 0), "1048577 buffers, at most 1048576");
  expect_refused(Raw().header(kBulk, 0xffffffffU, 0), "4294967295 buffers");
  expect_refused(Raw().header(kMessage, 0xffffffffU, 0), "4294967295 buffers");
}

TEST(Record, ASmallMessageIsSmall) {
  expect_refused(Raw().header(kMessage, 0, kSmallMessageBytes + 1), "small message");
  expect_refused(Raw().header(kMessage, 1, 1, {kSmallMessageBytes}), "small message");
  expect_refused(Raw().header(kMessage, 2, 0, {kSmallMessageBytes, 1}), "small message");
  expect_refused(Raw().header(kMessage, 1, 0, {kSmallMessageBytes + 1}), "small message");
  // Sizes whose sum would wrap.
  constexpr std::uint64_t kHuge = ~std::uint64_t{0};
  expect_refused(Raw().header(kMessage, 2, 0, {kHuge, 1}), "small message", {kMiB, kHuge, true});
  expect_refused(Raw().header(kMessage, 8, 100, {1, kHuge, 0, 0, 0, 0, 0, 0}), "small message",
                 {kHuge, kHuge, true});
}

TEST(Record, DataMustBelongToALargeMessageAndFit) {
  expect_refused(Raw().header(kData, 0, 4).filler(4), "data without");
  expect_refused(Raw().header(kBulk, 1, 10, {100}).header(kData, 0, 0), "data of 0 bytes");
  expect_refused(Raw().header(kBulk, 1, 10, {100}).header(kData, 1, 10).filler(10), "data");
  expect_refused(Raw().header(kBulk, 1, 10, {100}).header(kData, 0, 111),
                 "data of 111 bytes where 110 are missing");
  expect_refused(
      Raw().header(kBulk, 1, 10, {100}).header(kData, 0, 60).filler(60).header(kData, 0, 51),
      "data of 51 bytes where 50 are missing");
  expect_refused(Raw().header(kBulk, 1, 10, {100}).header(kData, 0, ~std::uint64_t{0}),
                 "110 are missing");
  expect_refused(Raw().header(kBulk, 0, 10).header(kData, 0, 10).filler(10).header(kData, 0, 1),
                 "data without", {kMiB, kMiB, true}, 1);
  expect_refused(Raw().header(kBulk, 9, 0, std::vector<std::uint64_t>(9, 0)).header(kData, 0, 1),
                 "data without", {kMiB, kMiB, true}, 1);
}

TEST(Record, ALargeMessageDoesNotBeginInsideAnother) {
  expect_refused(Raw().header(kBulk, 0, 10).header(kBulk, 0, 10), "inside another");
  expect_refused(Raw()
                     .header(kBulk, 0, 10)
                     .header(kData, 0, 9)
                     .filler(9)
                     .header(kMessage, 0, 1)
                     .filler(1)
                     .header(kBulk, 0, 0),
                 "inside another", {kMiB, kMiB, true}, 1);
}

TEST(Record, LimitsOfFramesAndBuffersHold) {
  const RecordReader::Limits limits{1000, 2000, true};
  expect_refused(Raw().header(kMessage, 0, 1001),
                 "frame of 1001 bytes exceeds the limit of 1000 bytes", limits);
  expect_refused(Raw().header(kBulk, 0, 1001),
                 "frame of 1001 bytes exceeds the limit of 1000 bytes", limits);
  expect_refused(Raw().header(kBulk, 0, ~std::uint64_t{0}), "exceeds the limit of 1000 bytes",
                 limits);
  expect_refused(Raw().header(kMessage, 2, 1, {1, 2001}),
                 "buffer of 2001 bytes exceeds the limit of 2000 bytes", limits);
  expect_refused(Raw().header(kBulk, 2, 1, {1, 2001}),
                 "buffer of 2001 bytes exceeds the limit of 2000 bytes", limits);
  expect_refused(Raw().header(kBulk, 2, 1, {1, ~std::uint64_t{0}}),
                 "exceeds the limit of 2000 bytes", limits);
  Pipe pipe(kMiB);
  pipe.put(Raw()
               .header(kMessage, 1, 1000, {2000})
               .filler(3000)
               .header(kBulk, 1, 1000, {2000})
               .header(kData, 0, 3000)
               .filler(3000)
               .bytes);
  Receiver receiver(limits);
  EXPECT_EQ(receiver.drain(pipe), std::nullopt);
  EXPECT_EQ(receiver.messages.size(), 2U);
}

TEST(Record, AHandshakeMessageIsShortAndPlain) {
  const RecordReader::Limits limits{512, 0, false};
  expect_refused(Raw().header(kMessage, 0, 513), "513 bytes", limits);
  expect_refused(Raw().header(kMessage, 1, 10, {0}).filler(10), "handshake", limits);
  expect_refused(Raw().header(kBulk, 0, 10).header(kData, 0, 10).filler(10), "handshake", limits);
  expect_refused(Raw().header(kData, 0, 10).filler(10), "data without", limits);
  Pipe pipe(kMiB);
  pipe.put(Raw().header(kMessage, 0, 512).filler(512).bytes);
  Receiver receiver(limits);
  EXPECT_EQ(receiver.drain(pipe), std::nullopt);
  EXPECT_EQ(receiver.messages.size(), 1U);
}

TEST(Record, TheFrameIsThereBeforeMemoryIsAskedForWhatComesBesideIt) {
  for (const std::size_t frame_bytes : {std::size_t{100}, std::size_t{300'000}}) {
    Message message;
    message.frame.resize(frame_bytes);
    for (std::size_t i = 0; i < frame_bytes; ++i)
      message.frame.data()[i] = static_cast<std::byte>(i * 7);
    const std::string frame(reinterpret_cast<const char*>(message.frame.data()), frame_bytes);
    for (const std::size_t bytes : {std::size_t{10'000}, std::size_t{700'000}})
      message.buffers.push_back(make_filled_buffer(bytes, 3));
    Pipe pipe(64 * kKiB);
    Receiver receiver;
    RecordWriter writer;
    RecordWriter::Finished finished;
    write(writer, std::move(message), pipe);
    while (!writer.empty()) {
      writer.flush(pipe, finished);
      ASSERT_FALSE(receiver.drain(pipe));
    }
    ASSERT_EQ(receiver.messages.size(), 1U);
    EXPECT_EQ(receiver.last_frame, frame);
    EXPECT_EQ(receiver.allocations, 2U);
    EXPECT_TRUE(is_filled(receiver.messages[0].buffers[1], 700'000, 3));
  }
}

// In whatever pieces it arrives; the next message is whole.
TEST(Record, ALargeMessageWithoutMemoryIsThrownAwayWhileItIsRead) {
  for (const std::size_t room : {std::size_t{64}, 5 * kKiB, kMiB}) {
    Pipe pipe(room);
    std::vector<Message> messages;
    RecordReader reader(
        [](const base::Bytes&, std::size_t bytes) -> Buffer {
          if (bytes > 300'000) throw Error(ErrorCode::overloaded, "no");
          return allocate_buffer({}, bytes);
        },
        [] {
          return RecordReader::Limits{kMiB, kMiB, true};
        },
        [&](Message message) { messages.push_back(std::move(message)); });
    RecordWriter writer;
    RecordWriter::Finished finished;
    writer.queue({make_numbered(1, 40'000, {100, 500'000, 7, 400'000}), nullptr});
    writer.queue({make_numbered(2, 40'000, {200'000}), nullptr});
    while (!writer.empty()) {
      writer.flush(pipe, finished);
      while (reader.read(pipe)) {
      }
    }
    ASSERT_EQ(messages.size(), 2U);
    EXPECT_TRUE(lacks_buffers(messages[0]));
    EXPECT_EQ(messages[0].frame.size(), 40'000U);
    ASSERT_EQ(messages[0].buffers.size(), 4U);
    EXPECT_EQ(messages[0].buffers[3].bytes, 400'000U);
    EXPECT_TRUE(equal(messages[1], make_numbered(2, 40'000, {200'000})));
  }
}

}  // namespace
}  // namespace stitch::transport::record_test
