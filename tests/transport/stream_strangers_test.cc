// Strangers that connect to stitch's own endpoint, and peers that break its rules: each ends its
// own connection and nothing else.
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "stitch/transport/stream/shm_link.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/support/plain_test.h"
#include "tests/transport/raw_peer.h"

namespace stitch::transport::stream_strangers_test {
namespace {

using std::chrono::milliseconds;

StreamOptions over(std::vector<std::string> transports,
                   const std::string& bind_address = "127.0.0.1") {
  return {std::move(transports), bind_address};
}

// An endpoint that listens, a Recorder for each connection that comes, and one good connection to
// it that must keep working.
class Server {
 public:
  explicit Server(const std::string& transport, EndpointOptions self = options(1)) {
    endpoint = make_stream_endpoint(std::move(self), over({transport}));
    address = endpoint
                  ->listen([this] {
                    base::MutexLock lock(mutex_);
                    accepted_.push_back(std::make_shared<Recorder>());
                    return accepted_.back()->events();
                  })
                  .front();
    client_ = make_stream_endpoint(options(2), over({transport}));
    good_ = client_->connect(address, {1}, out_->events());
    EXPECT_TRUE(out_->wait_open()) << out_->closed_text();
  }
  ~Server() {
    client_.reset();
    endpoint.reset();
    for (std::size_t i = 0; i < accepted_.size(); ++i)
      EXPECT_EQ(recorder(i)->faults(), std::vector<std::string>{});
  }
  [[nodiscard]] std::size_t accepted() const {
    base::MutexLock lock(mutex_);
    return accepted_.size();
  }
  // Of the connection with this number; the good one has 0.
  [[nodiscard]] std::shared_ptr<Recorder> recorder(std::size_t index) const {
    base::MutexLock lock(mutex_);
    return accepted_.at(index);
  }
  [[nodiscard]] std::shared_ptr<Recorder> next() {
    ++next_;
    EXPECT_TRUE(wait_until([this] { return accepted() > next_; }));
    return recorder(next_);
  }
  // The good connection carries one more message each way.
  void expect_alive() {
    const auto in = recorder(0);
    const std::size_t before = in->received();
    const std::size_t back = out_->received();
    good_->send(make_message("to"), nullptr);
    ASSERT_TRUE(in->wait_messages(before + 1)) << in->closed_text();
    in->connection()->send(make_message("fro"), nullptr);
    ASSERT_TRUE(out_->wait_messages(back + 1)) << out_->closed_text();
  }
  std::unique_ptr<Endpoint> endpoint;
  std::string address;

 private:
  mutable base::Mutex mutex_;
  std::vector<std::shared_ptr<Recorder>> accepted_;
  std::size_t next_ = 0;
  std::unique_ptr<Endpoint> client_;
  const std::shared_ptr<Recorder> out_ = std::make_shared<Recorder>();
  std::shared_ptr<Connection> good_;
};

class Strangers : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Stream, Strangers, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Strangers, GarbageEndsOnlyItsConnection) {
  Server server(GetParam());
  std::mt19937_64 random(11);
  for (int round = 0; round < 60; ++round) {
    const base::Descriptor stranger = connect_raw(server.address);
    ASSERT_TRUE(stranger);
    std::string words;
    if (round % 3 == 0) {
      words = "GET /index.html HTTP/1.1\r\nHost: localhost\r\n\r\n";
    } else {
      words.resize(16 + random() % 5000);
      for (char& each : words) each = static_cast<char>(random());
      words[0] = static_cast<char>(4 + random() % 200);
    }
    send_raw(stranger.get(), words);
    EXPECT_TRUE(wait_hung_up(stranger.get()));
    const auto seen = server.next();
    ASSERT_TRUE(seen->wait_closed());
    EXPECT_EQ(seen->closed_code(), ErrorCode::protocol) << seen->closed_text();
    EXPECT_FALSE(seen->open());
    server.expect_alive();
  }
}

TEST_P(Strangers, GarbageAfterTheHandshakeEndsOnlyItsConnection) {
  Server server(GetParam());
  for (int round = 0; round < 20; ++round) {
    RawPeer peer(server.address);
    ASSERT_TRUE(peer.shake_hands());
    const auto seen = server.next();
    peer.write_message("a good one");
    ASSERT_TRUE(seen->wait_messages(1));
    const std::vector<std::string> bad{
        record_text(RecordKind::data, 0, 5, "lost!"), record_text(RecordKind::bulk, 0xffffff, 1),
        record_text(RecordKind::message, 0, std::uint64_t{1} << 60), std::string(100, '\xff'),
        record_text(RecordKind::bulk, 0, 50) + record_text(RecordKind::data, 0, 51)};
    peer.write(bad[static_cast<std::size_t>(round) % bad.size()]);
    ASSERT_TRUE(seen->wait_closed());
    EXPECT_EQ(seen->closed_code(), ErrorCode::protocol) << seen->closed_text();
    EXPECT_EQ(seen->received(), 1U);
    EXPECT_TRUE(wait_hung_up(peer.socket()));
    server.expect_alive();
  }
}

TEST_P(Strangers, StrangersThatHangUpAreForgotten) {
  Server server(GetParam());
  const std::string hello = RawPeer::hello();
  for (int round = 0; round < 60; ++round) {
    if (round % 3 == 0) {
      const base::Descriptor stranger = connect_raw(server.address);  // sends nothing
    } else {
      RawPeer peer(server.address);
      const std::string words = record_text(RecordKind::message, 0, hello.size(), hello);
      // Half a handshake: part of the hello, or all of it and no verdict.
      peer.write(
          std::string_view(words).substr(0, round % 3 == 1 ? words.size() / 2 : words.size()));
    }
    const auto seen = server.next();
    ASSERT_TRUE(seen->wait_closed());
    EXPECT_EQ(seen->closed_code(), ErrorCode::disconnected) << seen->closed_text();
    server.expect_alive();
  }
}

TEST_P(Strangers, ASilentConnectionIsClosedInTime) {
  EndpointOptions self = options(1);
  self.handshake_timeout = milliseconds(300);
  Server server(GetParam(), self);
  const base::Descriptor silent = connect_raw(server.address);
  const auto first = server.next();
  RawPeer half(server.address);
  const std::string hello = RawPeer::hello();
  half.write(record_text(RecordKind::message, 0, hello.size(), hello).substr(0, 40));
  const auto second = server.next();
  RawPeer undecided(server.address);
  undecided.write_message(hello);
  const auto third = server.next();
  for (const auto& each : {first, second, third}) {
    ASSERT_TRUE(each->wait_closed());
    EXPECT_EQ(each->closed_code(), ErrorCode::disconnected);
    EXPECT_NE(each->closed_text().find("did not finish its handshake within 300 ms"),
              std::string::npos)
        << each->closed_text();
  }
  EXPECT_TRUE(wait_hung_up(silent.get()));
  EXPECT_TRUE(wait_hung_up(half.socket()));
  EXPECT_TRUE(wait_hung_up(undecided.socket()));
  server.expect_alive();
}

TEST_P(Strangers, ConnectingToASilentServerFails) {
  EndpointOptions impatient = options(1);
  impatient.handshake_timeout = milliseconds(100);
  const auto endpoint = make_stream_endpoint(impatient, over({GetParam()}));
  const bool tcp = std::string(GetParam()) == "tcp";
  const base::Descriptor silent(::socket(tcp ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  std::string address;
  if (tcp) {
    const auto ip = IpAddress::parse("127.0.0.1", 0);
    ASSERT_EQ(::bind(silent.get(), reinterpret_cast<const sockaddr*>(&ip->address), ip->bytes), 0);
    sockaddr_in bound{};
    socklen_t bytes = sizeof(bound);
    ASSERT_EQ(::getsockname(silent.get(), reinterpret_cast<sockaddr*>(&bound), &bytes), 0);
    address =
        "tcp://127.0.0.1:" + std::to_string((bound.sin_port >> 8) | ((bound.sin_port & 0xff) << 8));
  } else {
    const std::string name = "stitch-test-silent-" + std::to_string(::getpid());
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    std::memcpy(at.sun_path + 1, name.data(), name.size());
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    ASSERT_EQ(::bind(silent.get(), reinterpret_cast<const sockaddr*>(&at), bytes), 0);
    address = "shm://" + name;
  }
  ASSERT_EQ(::listen(silent.get(), 8), 0);
  const auto recorder = std::make_shared<Recorder>();
  endpoint->connect(address, {1}, recorder->events())->send(make_message("m"), recorder->done());
  ASSERT_TRUE(recorder->wait_closed());
  EXPECT_EQ(recorder->closed_code(), ErrorCode::disconnected);
  EXPECT_EQ(recorder->closed_text(),
            "connection " + address + " did not finish its handshake within 100 ms");
  EXPECT_TRUE(recorder->wait_sends_done());
}

TEST(StrangersShm, WrongOffersAreRefused) {
  struct Case {
    const char* what;
    RawOffer offer;
    const char* expected;
  };
  std::vector<Case> cases{{"no descriptor", {}, "0 descriptors"},
                          {"two descriptors", {}, "2 descriptors"},
                          {"ten descriptors", {}, "descriptors"},
                          {"too small", {}, "size"},
                          {"empty", {}, "size"},
                          {"too large", {}, "size"},
                          {"unsealed", {}, "change its size"},
                          {"not sealable", {}, "change its size"},
                          {"may grow", {}, "change its size"},
                          {"wrong ring", {}, "rings of 2097152 bytes"},
                          {"huge ring", {}, "rings of"},
                          {"wrong magic", {}, "not one of stitch"},
                          {"too few words", {}, "not one of stitch"}};
  cases[0].offer.descriptors = 0;
  cases[1].offer.descriptors = 2;
  cases[2].offer.descriptors = 10;
  cases[3].offer.bytes = 4096;
  cases[4].offer.bytes = 0;
  cases[5].offer.bytes += 4096;
  cases[6].offer.seals = 0;
  cases[7].offer.sealable = false;
  cases[8].offer.seals = F_SEAL_SHRINK;
  cases[9].offer.words = std::string("STCHSHM1") + std::string("\0\0\x20\0\0\0\0\0", 8);
  cases[10].offer.words = std::string("STCHSHM1") + std::string(8, '\xff');
  cases[11].offer.words[7] = '2';
  cases[12].offer.words.resize(8);
  Server server("shm");
  for (int round = 0; round < 3; ++round) {
    for (const Case& each : cases) {
      SCOPED_TRACE(each.what);
      const base::Descriptor stranger = connect_raw(server.address);
      ASSERT_TRUE(stranger);
      const base::Descriptor memory = send_offer(stranger.get(), each.offer);
      const auto seen = server.next();
      EXPECT_TRUE(wait_hung_up(stranger.get(), milliseconds(3000))) << "it was taken";
      if (!seen->closed()) continue;
      ASSERT_TRUE(seen->wait_closed());
      EXPECT_EQ(seen->closed_code(), ErrorCode::protocol);
      EXPECT_NE(seen->closed_text().find(each.expected), std::string::npos) << seen->closed_text();
    }
    server.expect_alive();
  }
}

TEST(StrangersShm, AnOfferWithoutADescriptorToSpareIsNotThePeersFault) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  const base::Descriptor peer(ends[0]);
  base::Descriptor own(ends[1]);
  const base::Descriptor memory = send_offer(peer.get(), {});
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  Error seen;
  try {
    static_cast<void>(accept_shm_link(own));
  } catch (const Error& error) {
    seen = error;
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(seen.code(), ErrorCode::overloaded) << seen.what();
}

// Memory that cannot be mapped for writing ends that peer's connection only.
TEST(StrangersShm, MemoryThatCannotBeWrittenIsRefused) {
  Server server("shm");
  RawOffer offer;
  offer.seals |= F_SEAL_WRITE;
  const base::Descriptor stranger = connect_raw(server.address);
  const base::Descriptor memory = send_offer(stranger.get(), offer);
  EXPECT_TRUE(wait_hung_up(stranger.get()));
  ASSERT_TRUE(server.next()->wait_closed());
  server.expect_alive();
}

TEST(StrangersShm, CorruptWritePositionsEndTheConnection) {
  Server server("shm");
  constexpr std::uint64_t kRing = RawPeer::kRing;
  for (const std::uint64_t ahead : {kRing + 1, 2 * kRing, ~std::uint64_t{0},
                                    ~std::uint64_t{0} - kRing, std::uint64_t{1} << 63}) {
    RawPeer peer(server.address);
    ASSERT_TRUE(peer.shake_hands());
    const auto seen = server.next();
    peer.write_message("a good one");
    ASSERT_TRUE(seen->wait_messages(1));
    peer.at<std::uint64_t>(true, RawPeer::written).fetch_add(ahead);
    peer.ring_doorbell();
    ASSERT_TRUE(seen->wait_closed()) << ahead;
    EXPECT_EQ(seen->closed_code(), ErrorCode::protocol) << seen->closed_text();
    EXPECT_NE(seen->closed_text().find("ring is corrupt"), std::string::npos)
        << seen->closed_text();
    EXPECT_EQ(seen->received(), 1U);
    EXPECT_TRUE(wait_hung_up(peer.socket()));
    server.expect_alive();
  }
}

// Before the handshake: the memory arrives with a wrong value in each word of its control blocks.
TEST(StrangersShm, CorruptOfferedMemoryEndsOnlyItsConnection) {
  Server server("shm");
  for (const off_t word : {0, 64, 128, 192, 256, 320, 384, 448}) {
    for (const std::uint64_t value : {std::uint64_t{1}, std::uint64_t{RawPeer::kRing} + 1,
                                      std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
      SCOPED_TRACE(std::to_string(value) + " at " + std::to_string(word));
      RawOffer offer;
      offer.words_in_memory = {{word, value}};
      const base::Descriptor stranger = connect_raw(server.address);
      const base::Descriptor memory = send_offer(stranger.get(), offer);
      const auto seen = server.next();
      // The accepting side's first write finds an impossible read position. (One that is behind by
      // one byte is possible: it looks like a byte that was not taken.)
      if (word == 256 + RawPeer::taken && value != ~std::uint64_t{0}) {
        EXPECT_TRUE(wait_hung_up(stranger.get(), milliseconds(5000)));
        ASSERT_TRUE(seen->wait_closed());
        EXPECT_EQ(seen->closed_code(), ErrorCode::protocol) << seen->closed_text();
      }
      server.expect_alive();
      if (HasFatalFailure()) std::abort();  // its poller hangs, and could not be ended
    }
  }
}

TEST(StrangersShm, CorruptReadPositionsEndTheConnection) {
  Server server("shm");
  constexpr std::uint64_t kRing = RawPeer::kRing;
  for (const std::uint64_t ahead : {std::uint64_t{1}, kRing, 2 * kRing, std::uint64_t{1} << 63}) {
    RawPeer peer(server.address);
    ASSERT_TRUE(peer.shake_hands());
    const auto seen = server.next();
    ASSERT_TRUE(seen->wait_open());
    peer.at<std::uint64_t>(false, RawPeer::taken).fetch_add(ahead);
    seen->connection()->send(make_message("not taken"), seen->done());
    peer.ring_doorbell();
    const bool ended = seen->wait([](Recorder&) { return true; }) &&
                       wait_until([&] { return seen->closed().has_value(); }, milliseconds(3000));
    EXPECT_TRUE(ended) << "taken is ahead of written by " << ahead << ": a send never completes";
    if (ended) {
      EXPECT_EQ(seen->closed_code(), ErrorCode::protocol) << seen->closed_text();
    }
    server.expect_alive();
  }
}

// The link by itself: a side that is about to sleep must see a ring that was corrupted since it
// last looked.
TEST(StrangersShm, ACorruptRingIsSeenBeforeSleeping) {
  std::array<int, 2> pair{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair.data()), 0);
  const base::Descriptor peer(pair[0]);
  base::Descriptor ours(pair[1]);
  const base::Descriptor memory = send_offer(peer.get(), {});
  const auto link = accept_shm_link(ours);
  ASSERT_NE(link, nullptr);
  link->wake();
  std::array<char, 10> bytes{};
  const iovec part{bytes.data(), bytes.size()};
  EXPECT_EQ(link->read({&part, 1}), 0U);
  EXPECT_EQ(link->ended(), std::nullopt);
  const std::uint64_t out_of_range = 3 * RawPeer::kRing;
  ASSERT_EQ(::pwrite(memory.get(), &out_of_range, sizeof(out_of_range), 0), 8);
  EXPECT_FALSE(link->sleep()) << "the peer saw it awake and sent no wake-up";
}

TEST(StrangersShm, EndlessWakeUpsDoNotStopOthers) {
  Server server("shm");
  RawPeer peer(server.address);
  ASSERT_TRUE(peer.shake_hands());
  ASSERT_TRUE(server.next()->wait_open());
  std::atomic<bool> stop{false};
  std::thread flood([&] {
    const std::string bells(60'000, '\0');
    while (!stop.load()) {
      if (::send(peer.socket(), bells.data(), bells.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 &&
          errno != EAGAIN)
        return;
    }
  });
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<bool> through{false};
  std::thread watch([&] {
    static_cast<void>(wait_until([&] { return through.load(); }, milliseconds(5000)));
    stop = true;
  });
  for (int i = 0; i < 20; ++i) server.expect_alive();
  through = true;
  const auto time = std::chrono::steady_clock::now() - begin;
  watch.join();
  flood.join();
  EXPECT_LT(time, milliseconds(4500)) << "only when the wake-ups had ended";
}

}  // namespace
}  // namespace stitch::transport::stream_strangers_test
