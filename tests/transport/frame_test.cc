#include "stitch/transport/wire/frame.h"
#include "stitch/transport/wire/record.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::frame_test {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}
std::string text_of(std::span<const std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Buffer make_buffer(std::size_t bytes, unsigned char fill) {
  Buffer buffer = allocate_buffer(Device{}, bytes);
  std::memset(buffer.data, fill, bytes);
  return buffer;
}

// A frame with every kind of content.
Message make_full_message(const std::string& body = "the body") {
  FrameBuilder builder(7);
  builder.body().append(body.data(), body.size());
  builder.end_body();
  builder.add_section(3, bytes_of("three"));
  builder.add_buffer(make_buffer(100, 0xaa));
  builder.add_buffer(make_buffer(kInlineBytes + 1, 0xbb));
  builder.add_section(4, {});
  builder.add_buffer(make_buffer(0, 0));
  return std::move(builder).finish();
}

Message copy(const Message& from) {
  Message message;
  message.frame.append(from.frame.data(), from.frame.size());
  message.buffers = from.buffers;
  return message;
}

template <class T>
void poke(Message& message, std::size_t offset, T value) {
  ASSERT_LE(offset + sizeof(T), message.frame.size());
  std::memcpy(message.frame.data() + offset, &value, sizeof(T));
}

template <class T>
T peek(const Message& message, std::size_t offset) {
  T value;
  std::memcpy(&value, message.frame.data() + offset, sizeof(T));
  return value;
}

std::string problem_of(const Message& message) {
  try {
    FrameView view(message);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::protocol);
    return error.what();
  }
  return "none";
}

TEST(Frame, CarriesTheNumbersOfASession) {
  FrameBuilder builder(7);
  builder.end_body();
  Message message = std::move(builder).finish();
  EXPECT_EQ(numbers_of(message.frame)->number, 0U);
  put_numbers(message.frame, {FrameNumbers::kLarge | 5, {6, 7}});
  const auto numbers = numbers_of(message.frame);
  EXPECT_EQ(numbers->number, FrameNumbers::kLarge | 5);
  EXPECT_EQ(numbers->received[0], 6U);
  EXPECT_EQ(numbers->received[1], 7U);
  EXPECT_EQ(FrameView(message).kind(), 7) << "and stays whole";
  EXPECT_FALSE(numbers_of(base::Bytes(63)));
}

TEST(Frame, IsNotMadeWithMoreSectionsThanAReaderTakes) {
  FrameBuilder builder(7);
  builder.end_body();
  for (std::size_t i = 0; i < FrameView::kMaxSections; ++i) builder.add_section(1, {});
  EXPECT_EQ(stitch::testing::error_of([&] { builder.add_section(1, {}); }).code(),
            ErrorCode::out_of_range);
  const Message message = std::move(builder).finish();
  EXPECT_EQ(FrameView(message).sections().size(), FrameView::kMaxSections);
}

TEST(Frame, CarriesKindBodySectionsAndBuffers) {
  const Message message = make_full_message();
  const FrameView view(message);
  EXPECT_EQ(view.kind(), 7);
  EXPECT_EQ(text_of(view.body()), "the body");
  ASSERT_EQ(view.sections().size(), 2U);
  ASSERT_NE(view.section(3), nullptr);
  EXPECT_EQ(text_of(view.section(3)->bytes), "three");
  ASSERT_NE(view.section(4), nullptr);
  EXPECT_TRUE(view.section(4)->bytes.empty());
  EXPECT_EQ(view.section(5), nullptr);
  ASSERT_EQ(view.buffers().size(), 3U);
  EXPECT_TRUE(view.buffers()[0].in_frame);
  EXPECT_EQ(view.buffers()[0].buffer.bytes, 100U);
  EXPECT_EQ(static_cast<unsigned char*>(view.buffers()[0].buffer.data)[99], 0xaa);
  EXPECT_FALSE(view.buffers()[1].in_frame);
  EXPECT_EQ(view.buffers()[1].buffer.bytes, kInlineBytes + 1);
  EXPECT_TRUE(view.buffers()[2].in_frame);
  EXPECT_EQ(view.buffers()[2].buffer.bytes, 0U);
  EXPECT_EQ(message.buffers.size(), 1U);
}

TEST(Frame, IsOnlyAHeaderWhenEmpty) {
  FrameBuilder builder(0xffff);
  builder.end_body();
  const Message message = std::move(builder).finish();
  EXPECT_EQ(message.frame.size(), FrameBuilder::kHeaderBytes);
  const FrameView view(message);
  EXPECT_EQ(view.kind(), 0xffff);
  EXPECT_TRUE(view.body().empty());
  EXPECT_TRUE(view.sections().empty());
  EXPECT_TRUE(view.buffers().empty());
}

TEST(Frame, HasTheDocumentedBytes) {
  FrameBuilder builder(0x0102);
  builder.body().append("xy", 2);
  builder.end_body();
  builder.add_section(0x0304, bytes_of("z"));
  const Message message = std::move(builder).finish();
  EXPECT_EQ(std::memcmp(message.frame.data(), "STCH\x02\x00\x02\x01", 8), 0);
  EXPECT_EQ(peek<std::uint32_t>(message, 8), message.frame.size());
  EXPECT_EQ(peek<std::uint32_t>(message, 12), 64U);
  EXPECT_EQ(peek<std::uint32_t>(message, 16), 2U);
  EXPECT_EQ(peek<std::uint32_t>(message, 20), 72U);  // after "xy" and "z", at a multiple of 8
  EXPECT_EQ(peek<std::uint32_t>(message, 24), 0U);
  EXPECT_EQ(peek<std::uint32_t>(message, 28), 1U);
  EXPECT_EQ(peek<std::uint32_t>(message, 32), 0U);
  EXPECT_EQ(peek<std::uint32_t>(message, 36), 0U);
  for (const std::size_t number : {40, 48, 56}) EXPECT_EQ(peek<std::uint64_t>(message, number), 0U);
  EXPECT_EQ(peek<std::uint16_t>(message, 72), 0x0304);
  EXPECT_EQ(peek<std::uint32_t>(message, 76), 66U);
  EXPECT_EQ(peek<std::uint32_t>(message, 80), 1U);
  EXPECT_EQ(message.frame.size(), 88U);
}

TEST(Frame, AlignsBuffersInsideIt) {
  FrameBuilder builder(1);
  builder.body().append("odd", 3);
  builder.end_body();
  for (std::size_t i = 1; i < 20; ++i)
    builder.add_buffer(make_buffer(i, static_cast<unsigned char>(i)));
  const Message message = std::move(builder).finish();
  const FrameView view(message);
  for (const auto& entry : view.buffers())
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(entry.buffer.data) % 64, 0U);
}

TEST(Frame, CopiesBuffersUpToTheInlineLimitAndSharesLargerOnes) {
  FrameBuilder builder(1);
  builder.end_body();
  const Buffer small = make_buffer(kInlineBytes, 1);
  const Buffer large = make_buffer(kInlineBytes + 1, 2);
  EXPECT_EQ(builder.add_buffer(small), 0U);
  EXPECT_EQ(builder.add_buffer(large), 1U);
  EXPECT_EQ(builder.buffer_count(), 2U);
  const Message message = std::move(builder).finish();
  ASSERT_EQ(message.buffers.size(), 1U);
  EXPECT_EQ(message.buffers[0].data, large.data);
  EXPECT_EQ(small.keep_alive.use_count(), 1);
  EXPECT_EQ(large.keep_alive.use_count(), 2);
}

TEST(Frame, NeverCopiesMemoryOfOtherDevices) {
  FrameBuilder builder(1);
  builder.end_body();
  int elsewhere = 0;
  builder.add_buffer(Buffer{Device{DeviceType::cuda, 2}, &elsewhere, 4, nullptr});
  const Message message = std::move(builder).finish();
  const FrameView view(message);
  ASSERT_EQ(view.buffers().size(), 1U);
  EXPECT_FALSE(view.buffers()[0].in_frame);
  EXPECT_EQ(view.buffers()[0].buffer.device, (Device{DeviceType::cuda, 2}));
}

TEST(FrameChecks, NameTheFieldAndBothValues) {
  const Message good = make_full_message();
  const std::string total = std::to_string(good.frame.size());
  {
    Message m = copy(good);
    poke<char>(m, 0, 'X');
    EXPECT_EQ(problem_of(m), "frame is malformed: magic is not \"STCH\"");
  }
  {
    Message m = copy(good);
    poke<std::uint16_t>(m, 4, 9);
    EXPECT_EQ(problem_of(m), "frame is malformed: version 9 is not the 2 spoken here");
  }
  {
    Message m = copy(good);
    poke<std::uint32_t>(m, 8, 1000000);
    EXPECT_EQ(problem_of(m), "frame is malformed: total size 1000000 differs from the " + total +
                                 " bytes that arrived");
  }
  {
    Message m = copy(good);
    poke<std::uint32_t>(m, 16, ~std::uint32_t{0});
    EXPECT_EQ(problem_of(m),
              "frame is malformed: body of 4294967295 bytes at offset 64 does not lie in "
              "the frame of " +
                  total + " bytes");
  }
  {
    Message m = copy(good);
    poke<std::uint32_t>(m, 28, 0xffffffffU);
    EXPECT_NE(problem_of(m).find("section table of 4294967295 entries"), std::string::npos);
  }
  {
    Message m = copy(good);
    poke<std::uint32_t>(m, 32, 0xffffffffU);
    EXPECT_NE(problem_of(m).find("buffer table of 4294967295 entries"), std::string::npos);
  }
  {
    FrameBuilder builder(7);
    builder.body().resize(FrameBuilder::kHeaderBytes + (kMaxBuffers + 1) * 16);
    Message m = std::move(builder).finish();
    poke<std::uint32_t>(m, 20, 64U);
    poke<std::uint32_t>(m, 28, 257U);
    EXPECT_NE(problem_of(m).find("section table of 257 entries"), std::string::npos);
    poke<std::uint32_t>(m, 28, 0U);
    poke<std::uint32_t>(m, 24, 64U);
    poke<std::uint32_t>(m, 32, static_cast<std::uint32_t>(kMaxBuffers + 1));
    EXPECT_NE(problem_of(m).find("buffer table of 1048577 entries"), std::string::npos);
  }
  {
    Message m = copy(good);
    poke<std::uint32_t>(m, peek<std::uint32_t>(m, 20) + 8, 0xfffffff0U);
    EXPECT_NE(problem_of(m).find("section 0 of 4294967280 bytes at offset 72"), std::string::npos);
  }
  const std::size_t buffers = peek<std::uint32_t>(good, 24);
  {
    Message m = copy(good);
    poke<std::uint8_t>(m, buffers, 9);
    EXPECT_EQ(problem_of(m),
              "frame is malformed: buffer 0 names device type 9, known are 0 (cpu) and 1 (cuda)");
  }
  {
    Message m = copy(good);
    poke<std::uint32_t>(m, buffers + 4, 65);
    EXPECT_EQ(problem_of(m), "frame is malformed: buffer 0 at offset 65 is not aligned to 64");
  }
  {
    // The third, of no bytes, onto the first, of 100.
    Message m = copy(good);
    const auto first = peek<std::uint32_t>(m, buffers + 4);
    poke<std::uint32_t>(m, buffers + 32 + 4, first);
    EXPECT_EQ(problem_of(m), "frame is malformed: buffer 2 at offset " + std::to_string(first) +
                                 " overlaps the one before it, which ends at " +
                                 std::to_string(first + 100));
  }
  {
    Message m = copy(good);
    poke<std::uint64_t>(m, buffers + 16 + 8, 5);
    EXPECT_EQ(problem_of(m), "frame is malformed: buffer 1 was announced with 5 bytes, 16385 came");
  }
  {
    Message m = copy(good);
    poke<std::uint8_t>(m, buffers + 16, 1);
    EXPECT_EQ(problem_of(m),
              "frame is malformed: buffer 1 was announced on device 1:0 and came on cpu");
  }
}

TEST(FrameChecks, CompareBuffersBesideTheFrameWithItsTable) {
  Message missing = make_full_message();
  missing.buffers.clear();
  EXPECT_EQ(problem_of(missing),
            "frame is malformed: buffer 1 should have come beside the frame, but only 0 did");
  Message surplus = make_full_message();
  surplus.buffers.push_back(make_buffer(1, 0));
  EXPECT_EQ(problem_of(surplus),
            "frame is malformed: buffer count 1 beside the frame differs from the 2 that came");
}

TEST(FrameChecks, RefuseEveryTruncation) {
  const Message good = make_full_message();
  for (std::size_t size = 0; size < good.frame.size(); ++size) {
    Message cut;
    cut.frame.append(good.frame.data(), size);
    cut.buffers = good.buffers;
    EXPECT_NE(problem_of(cut), "none") << size;
    // Also when the header has the size of the truncated frame.
    if (size >= FrameBuilder::kHeaderBytes) {
      poke<std::uint32_t>(cut, 8, static_cast<std::uint32_t>(size));
      EXPECT_NE(problem_of(cut), "none") << size;
    }
  }
}

}  // namespace
}  // namespace stitch::transport::frame_test
