// What records may cost: memory for what has arrived and not for what is announced, a fair share of
// the link, and no waiting for a link that takes nothing.
#include <deque>

#include "stitch/transport/stream/receive_budget.h"
#include "stitch/transport/stream/record_reader.h"
#include "stitch/transport/stream/record_writer.h"
#include "tests/support/plain_test.h"
#include "tests/transport/memory_pipe.h"
#include "tests/transport/recorder.h"

namespace stitch::transport::record_limits_test {
namespace {

std::vector<std::byte> head_of(RecordKind kind, std::uint64_t bytes,
                               const std::vector<std::uint64_t>& sizes = {}) {
  std::vector<std::byte> all(RecordHeader::kBytes + sizes.size() * 8);
  RecordHeader{kind, static_cast<std::uint32_t>(sizes.size()), bytes}.encode(all.data());
  if (!sizes.empty())
    std::memcpy(all.data() + RecordHeader::kBytes, sizes.data(), sizes.size() * 8);
  return all;
}

void put_data(Pipe& pipe, std::size_t bytes) {
  pipe.put(head_of(RecordKind::data, bytes));
  pipe.put(std::vector<std::byte>(bytes, std::byte{'d'}));
}

TEST(RecordLimits, AnnouncedBuffersTakeMemoryOnlyWhenTheBytesBeforeThemHaveCome) {
  Pipe pipe(64 * kMiB);
  Receiver receiver;
  pipe.put(head_of(RecordKind::bulk, 10, std::vector<std::uint64_t>(1000, 60 * kMiB)));
  put_data(pipe, 9);
  ASSERT_EQ(receiver.drain(pipe), std::nullopt);
  EXPECT_EQ(receiver.allocations, 0U);
  put_data(pipe, 1);
  ASSERT_EQ(receiver.drain(pipe), std::nullopt);
  EXPECT_EQ(receiver.allocations, 1U);
  put_data(pipe, 1000);
  ASSERT_EQ(receiver.drain(pipe), std::nullopt);
  EXPECT_EQ(receiver.allocations, 1U);
}

TEST(RecordLimits, AllBuffersTogetherAreLimited) {
  constexpr std::size_t kHuge = std::size_t{1} << 63;
  for (const std::size_t each : {std::size_t{600}, kHuge}) {
    Pipe pipe(kMiB);
    Receiver receiver({1000, kHuge, true, 1500});
    pipe.put(head_of(RecordKind::bulk, 400, {each, each}));
    const auto error = receiver.drain(pipe);
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::protocol);
    EXPECT_NE(std::string(error->what()).find("exceeds the limit of 1500 bytes"), std::string::npos)
        << error->what();
  }
  Pipe pipe(kMiB);
  Receiver receiver({1000, 1000, true, 1500});
  pipe.put(head_of(RecordKind::bulk, 500, {500, 500}));
  put_data(pipe, 1500);
  EXPECT_EQ(receiver.drain(pipe), std::nullopt);
  EXPECT_EQ(receiver.messages.size(), 1U);
}

TEST(RecordLimits, WhatIsStagedGrowsWithWhatHasComeAndIsGivenBack) {
  Pipe pipe(64 * kMiB);
  Receiver receiver;
  constexpr std::size_t kBuffers = std::size_t{1} << 18;
  const auto head = head_of(RecordKind::bulk, 0, std::vector<std::uint64_t>(kBuffers, 0));
  // The header alone announces 2 MiB of sizes.
  pipe.put({head.begin(), head.begin() + 16});
  ASSERT_EQ(receiver.drain(pipe), std::nullopt);
  EXPECT_LE(receiver.reader.staging_bytes(), 2 * RecordReader::kStagedBytes);
  pipe.put({head.begin() + 16, head.begin() + 300'000});
  ASSERT_EQ(receiver.drain(pipe), std::nullopt);
  EXPECT_LE(receiver.reader.staging_bytes(), 4 * std::size_t{300'000});
  pipe.put({head.begin() + 300'000, head.end()});
  ASSERT_EQ(receiver.drain(pipe), std::nullopt);
  ASSERT_EQ(receiver.messages.size(), 1U);
  EXPECT_EQ(receiver.messages[0].buffers.size(), kBuffers);
  receiver.reader.read(pipe);
  EXPECT_EQ(receiver.reader.staging_bytes(), RecordReader::kStagedBytes);
}

TEST(RecordLimits, LittleIsStagedDuringTheHandshake) {
  bool open = false;
  std::size_t came = 0;
  RecordReader reader(
      [](const base::Bytes&, std::size_t bytes) { return allocate_buffer(Device{}, bytes); },
      [&] {
        return open ? RecordReader::Limits{kMiB, kMiB, true} : RecordReader::Limits{512, 0, false};
      },
      [&](const Message&) { ++came; });
  Pipe pipe(kMiB);
  for (std::size_t i = 1; i <= 10; ++i) {
    pipe.put(head_of(RecordKind::message, 512));
    pipe.put(std::vector<std::byte>(512));
    while (!pipe.empty()) reader.read(pipe);
    EXPECT_EQ(came, i);
    EXPECT_EQ(reader.staging_bytes(), RecordReader::kStagedInHandshake);
  }
  open = true;
  pipe.put(head_of(RecordKind::message, 30'000));
  pipe.put(std::vector<std::byte>(30'000));
  while (!pipe.empty()) reader.read(pipe);
  EXPECT_EQ(came, 11U);
  EXPECT_EQ(reader.staging_bytes(), RecordReader::kStagedBytes);
}

TEST(RecordLimits, NothingIsReadWhileALargeMessageWaitsForTheBudget) {
  std::size_t asked = 0;
  std::size_t given_back = 0;
  bool room = false;
  std::vector<std::size_t> came;
  RecordReader reader(
      [](const base::Bytes&, std::size_t bytes) { return allocate_buffer(Device{}, bytes); },
      [] {
        return RecordReader::Limits{kMiB, kMiB, true};
      },
      [&](const Message& message) { came.push_back(message.frame.size()); },
      {[&](std::size_t bytes) {
         asked = bytes;
         return room;
       },
       [&] { ++given_back; }});
  Pipe pipe(8 * kMiB);
  pipe.put(head_of(RecordKind::message, 1));
  pipe.put(std::vector<std::byte>(1));
  pipe.put(head_of(RecordKind::bulk, 40'000, {100'000}));
  put_data(pipe, 140'000);
  pipe.put(head_of(RecordKind::message, 2));
  pipe.put(std::vector<std::byte>(2));
  for (int i = 0; i < 10; ++i) reader.read(pipe);
  EXPECT_TRUE(reader.waiting());
  EXPECT_EQ(came, std::vector<std::size_t>{1});
  EXPECT_GE(asked, 140'000U);
  EXPECT_FALSE(pipe.empty());
  room = true;
  while (!pipe.empty()) reader.read(pipe);
  EXPECT_FALSE(reader.waiting());
  EXPECT_EQ(came, (std::vector<std::size_t>{1, 40'000, 2}));
  EXPECT_EQ(given_back, 1U);
}

// Small messages pass large ones, but not without limit.
TEST(RecordLimits, ALargeMessageMovesHoweverManySmallOnesThereAre) {
  Pipe pipe(256 * kKiB);
  Receiver receiver;
  RecordWriter writer;
  RecordWriter::Finished finished;
  const auto message_of = [](std::size_t bytes) {
    return RecordWriter::QueuedSend{make_message(std::string(bytes, 'm')), nullptr};
  };
  writer.queue(message_of(kMiB));
  std::size_t small_bytes = 0;
  bool large = false;
  while (!large && small_bytes < 64 * kMiB) {
    for (int i = 0; i < 20; ++i) writer.queue(message_of(20'000));
    writer.flush(pipe, finished);
    receiver.reader.read(pipe);
    for (const Message& message : receiver.messages) {
      large = large || message.frame.size() == kMiB;
      small_bytes += message.frame.size();
    }
    receiver.messages.clear();
  }
  EXPECT_TRUE(large) << "nothing of it in " << small_bytes << " bytes of small ones";
  EXPECT_GT(small_bytes, RecordWriter::kSmallPerPiece) << "small ones are to pass first";
}

TEST(ReceiveBudget, AdmitsWhatFitsAndTheRestInOrder) {
  ReceiveBudget budget(100);
  std::string order;
  const auto note = [&order](char name) { return [&order, name] { order += name; }; };
  EXPECT_TRUE(budget.take(1, 60, note('1')));
  EXPECT_TRUE(budget.take(2, 40, note('2')));
  EXPECT_FALSE(budget.take(3, 50, note('3')));
  EXPECT_FALSE(budget.take(4, 1, note('4'))) << "others wait already";
  EXPECT_FALSE(budget.take(5, 1000, note('5')));
  EXPECT_FALSE(budget.take(6, 10, note('6')));
  budget.give_back(2);
  EXPECT_EQ(order, "");
  budget.give_back(1);
  EXPECT_EQ(order, "34");
  budget.give_back(3);
  EXPECT_EQ(order, "34") << "what is larger than the budget is received alone";
  budget.give_back(4);
  EXPECT_EQ(order, "345");
  EXPECT_EQ(budget.used(), 1000U);
  budget.give_back(5);
  EXPECT_EQ(order, "3456");
  budget.give_back(6);
  budget.give_back(6);
  EXPECT_EQ(budget.used(), 0U);
}

TEST(ReceiveBudget, LeavingMakesRoomForTheNext) {
  ReceiveBudget budget(100);
  std::string order;
  const auto note = [&order](char name) { return [&order, name] { order += name; }; };
  EXPECT_TRUE(budget.take(1, 50, note('1')));
  EXPECT_FALSE(budget.take(2, 100, note('2')));
  EXPECT_FALSE(budget.take(3, 50, note('3')));
  EXPECT_FALSE(budget.insist(3, budget.wait_of(3))) << "another one waits before it";
  budget.give_back(2);
  EXPECT_EQ(order, "3");
  EXPECT_TRUE(budget.insist(3, 1)) << "it waits no more";
  EXPECT_FALSE(budget.take(4, 10, note('4')));
  EXPECT_TRUE(budget.insist(4, budget.wait_of(4))) << "it is the next, and has waited long enough";
  EXPECT_EQ(order, "34");
  EXPECT_EQ(budget.used(), 110U);
}

}  // namespace
}  // namespace stitch::transport::record_limits_test
