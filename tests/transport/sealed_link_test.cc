// Messages over a sealed link, over pipes that take and give bytes in the worst pieces.
#include "stitch/transport/stream/sealed_link.h"
#include "stitch/transport/stream/record_reader.h"
#include "stitch/transport/stream/record_writer.h"
#include "tests/support/plain_test.h"
#include "tests/transport/memory_pipe.h"
#include "tests/transport/recorder.h"

namespace stitch::transport::sealed_link_test {
namespace {

using stitch::testing::error_of;

// One end of two pipes.
class End final : public Link {
 public:
  End(Pipe& in, Pipe& out) : in_(in), out_(out) {}
  int descriptor() const noexcept override { return -1; }
  bool cheap() const noexcept override { return false; }
  std::size_t read(std::span<const iovec> parts) override { return in_.read(parts); }
  std::size_t write(std::span<const iovec> parts) override { return out_.write(parts); }
  std::size_t bulk_room(bool few) override { return few ? 128 * kKiB : 512 * kKiB; }
  bool await_room() override { return true; }
  std::optional<Error> ended() override {
    return hung_up ? std::optional(Error(ErrorCode::disconnected, "hung up")) : std::nullopt;
  }
  void close() noexcept override {}
  bool hung_up = false;

 private:
  Pipe& in_;
  Pipe& out_;
};

SessionKeys keys() {
  const auto secret = SecretKey::from_random("s");
  return derive_session_keys(*secret, "test", {}, {}, Cipher::chacha20_poly1305);
}

std::unique_ptr<Link> sealed(Pipe& in, Pipe& out, Role role, std::span<const std::byte> early = {},
                             std::size_t plain = 0) {
  std::unique_ptr<Link> end = std::make_unique<End>(in, out);
  return make_sealed_link(std::move(end), keys(), role, early, plain);
}

RecordReader reader_into(std::vector<Message>& messages) {
  return RecordReader(
      [](const base::Bytes&, std::size_t bytes) { return allocate_buffer(Device{}, bytes); },
      [] { return RecordReader::Limits{.frame_bytes = kMiB, .buffer_bytes = 8 * kMiB}; },
      [&messages](Message message) { messages.push_back(std::move(message)); });
}

TEST(SealedLink, CarriesMessagesOfAllSizesInPiecesOfAllSizes) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    const std::size_t most = seed < 6 ? 3000 : 300 * kKiB;
    Pipe there(100 * kKiB + seed * 50 * kKiB, seed, most);
    Pipe back(100 * kKiB, seed + 100, most);
    const auto from = sealed(back, there, Role::connecting);
    const auto to = sealed(there, back, Role::accepting);
    std::vector<Message> got;
    RecordReader reader = reader_into(got);
    RecordWriter writer;
    RecordWriter::Finished finished;
    Random random(seed);
    std::vector<std::pair<std::size_t, bool>> sizes;  // and whether as a buffer
    for (int i = 0; i < 60; ++i) {
      constexpr std::array<std::size_t, 7> kSizes{1,         100,       16 * kKiB - 1, 16 * kKiB,
                                                  40 * kKiB, 65 * kKiB, 700 * kKiB};
      const std::size_t size = kSizes[below(random, kSizes.size())];
      sizes.emplace_back(size, below(random, 2) == 0);
      Message message = make_message(sizes.back().second ? "f" : std::string(size, 'f'));
      if (sizes.back().second)
        message.buffers.push_back(make_filled_buffer(size, static_cast<unsigned char>(size)));
      writer.queue({std::move(message), nullptr});
    }
    for (int round = 0; got.size() < sizes.size() && round < 1'000'000; ++round) {
      if (writer.empty()) {
        from->flush_output();
      } else {
        static_cast<void>(writer.flush(*from, finished));
      }
      reader.read(*to);
      EXPECT_FALSE(to->holds_input());  // the poller would not be notified
    }
    ASSERT_EQ(got.size(), sizes.size());
    EXPECT_FALSE(from->holds_output());
    // Large ones may be passed by small ones, so only what has come is compared.
    std::multiset<std::pair<std::size_t, bool>> expected(sizes.begin(), sizes.end());
    for (const Message& message : got) {
      const bool buffer = !message.buffers.empty();
      const std::size_t size = buffer ? message.buffers[0].bytes : message.frame.size();
      const auto found = expected.find({size, buffer});
      ASSERT_NE(found, expected.end());
      expected.erase(found);
      if (buffer) {
        EXPECT_TRUE(is_filled(message.buffers[0], size, static_cast<unsigned char>(size)));
      } else {
        EXPECT_EQ(text_of(message), std::string(size, 'f'));
      }
    }
  }
}

TEST(SealedLink, BeginsBehindWhatIsPlainAndWithWhatWasReadBefore) {
  Pipe there(kMiB, 7, 5);
  Pipe back(kMiB);
  const auto from = sealed(back, there, Role::connecting, {}, 9);
  RecordWriter writer;
  RecordWriter::Finished finished;
  const std::string words = "plaintextthen something sealed";
  const iovec whole{const_cast<char*>(words.data()), words.size()};
  std::size_t written = 0;
  while (written < words.size()) {
    const iovec rest{const_cast<char*>(words.data()) + written, words.size() - written};
    written += from->write({&rest, 1});
  }
  while (!from->flush_output()) {
  }
  std::vector<std::byte> bytes = there.take();
  ASSERT_EQ(bytes.size(), whole.iov_len + SealedRecord::kOverhead);
  EXPECT_EQ(std::memcmp(bytes.data(), "plaintext", 9), 0);
  // The reader had read half of what is sealed when the link was sealed.
  bytes.erase(bytes.begin(), bytes.begin() + 9);
  const std::vector<std::byte> early(bytes.begin(), bytes.begin() + 20);
  Pipe rest(kMiB);
  rest.put(std::vector<std::byte>(bytes.begin() + 20, bytes.end()));
  const auto to = sealed(rest, back, Role::accepting, early);
  std::string got(100, '\0');
  const iovec into{got.data(), got.size()};
  got.resize(to->read({&into, 1}));
  EXPECT_EQ(got, "then something sealed");
}

TEST(SealedLink, AStreamThatEndsWithinARecordReportsIt) {
  Pipe there(kMiB);
  Pipe back(kMiB);
  const auto from = sealed(back, there, Role::connecting);
  const std::string words = "the last words";
  const iovec all{const_cast<char*>(words.data()), words.size()};
  ASSERT_EQ(from->write({&all, 1}), words.size());
  std::vector<std::byte> bytes = there.take();
  for (const bool whole : {true, false}) {
    if (!whole) bytes.pop_back();
    Pipe pipe(kMiB);
    pipe.put(bytes);
    auto end = std::make_unique<End>(pipe, back);
    end->hung_up = true;
    std::unique_ptr<Link> link = std::move(end);
    const auto to = make_sealed_link(std::move(link), keys(), Role::accepting, {}, 0);
    std::string got(100, '\0');
    const iovec into{got.data(), got.size()};
    EXPECT_EQ(to->read({&into, 1}), whole ? words.size() : 0U);
    EXPECT_EQ(to->read({&into, 1}), 0U);
    EXPECT_EQ(to->ended()->code(), ErrorCode::disconnected);
  }
}

TEST(SealedLink, RefusesRecordsOfImpossibleSizes) {
  for (const std::size_t size : {std::size_t{0}, kMaxPlainBytes + 1}) {
    const SessionKeys session = keys();
    Sealer sealer(session.cipher, session.from_connecting);
    const std::vector<std::byte> plain(size);
    std::vector<std::byte> record(size + SealedRecord::kOverhead);
    sealer.seal(plain.data(), size, record.data());
    Pipe pipe(kMiB);
    Pipe back(kMiB);
    pipe.put(record);
    const auto to = sealed(pipe, back, Role::accepting);
    std::string got(100, '\0');
    const iovec into{got.data(), got.size()};
    EXPECT_EQ(error_of([&] {
                static_cast<void>(to->read({&into, 1}));
              }).code(),
              ErrorCode::protocol);
  }
}

}  // namespace
}  // namespace stitch::transport::sealed_link_test
