// How much may be said about the members of a world.
#include <span>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/membership/member_card.h"
#include "stitch/rpc/membership/membership_protocol.h"
#include "stitch/rpc/membership/notice.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/world/admission.h"
#include "stitch/rpc/world/member_record.h"
#include "tests/support/world_test.h"

namespace membership_limits_test {
namespace {

using namespace stitch::testing;
using stitch::rpc::KnownLife;
using stitch::rpc::LifeState;
using stitch::rpc::MemberCard;
using stitch::rpc::MembershipProtocol;
using stitch::rpc::Notice;

int doubled(int x) { return 2 * x; }

MemberCard read(const MemberCard& card) {
  stitch::base::Bytes bytes;
  stitch::base::ByteWriter out(bytes);
  card.write(out);
  stitch::base::ByteReader in(bytes.span(), "card");
  return MemberCard::read(in);
}

TEST(MemberCard, HasARecordOfLimitedLength) {
  MemberCard card{{"joiner", WorkerId(3), 2}, {}, std::string(65'536, 'x')};
  EXPECT_EQ(read(card), card);
  card.record += 'x';
  EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(read(card)); }), ErrorCode::protocol,
                       "card of worker \"joiner\" (id 3) has a record of 65537 bytes; the limit "
                       "is 65536"));
}

// They become parts of texts and of the names of numbers.
TEST(MemberCard, AddressesThatCannotBeAreRefused) {
  const auto with = [](const std::string& address) {
    return MemberCard{{"w", WorkerId(1), 1}, {"loopback:1", address}, "record"};
  };
  const std::string longest(256, 'a');
  EXPECT_EQ(read(with(longest)).addresses.back(), longest);
  for (const std::string& address :
       {longest + 'a', std::string("tcp://a b"), std::string("tcp://\n"), std::string("tcp://\x80"),
        std::string("tcp://\x7f"), std::string(1, '\0')}) {
    EXPECT_EQ(error_of([&] { static_cast<void>(read(with(address))); }).code(),
              ErrorCode::protocol);
  }
}

TEST(Notices, HaveTextsThatCanBePrinted) {
  const std::string dirty = "it\x1b[2J is\n dead \xff";
  const std::string clean = "it?[2J is? dead ?";
  Notice notice{Notice::Step::dead, {"a", WorkerId(1), 1}, {"b", WorkerId(2), 1}, dirty, {}};
  notice.lives.push_back({{{"a", WorkerId(1), 1}, {}, {}}, LifeState::dead, dirty});
  stitch::base::Bytes bytes;
  notice.write(bytes);
  const Notice read = Notice::read(bytes.span());
  EXPECT_EQ(read.text, clean);
  ASSERT_EQ(read.lives.size(), 1U);
  EXPECT_EQ(read.lives[0].verdict, clean);
  notice.lives[0].verdict = std::string(1000, 'x');
  stitch::base::Bytes longer;
  notice.write(longer);
  EXPECT_EQ(Notice::read(longer.span()).lives[0].verdict, std::string(512, 'x'));
}

// One that is kept is told to others, which would end the connection for it, and be believed.
TEST(WhoAWorkerIs, IsReadWithinOneSetOfBoundsWhereverItStands) {
  constexpr std::uint64_t kLastEpoch = std::uint64_t{1} << 62;
  const auto reads = [](const WorkerInfo& info) {
    const WorkerInfo fine{"w", WorkerId(1), 1};
    const Notice notices[] = {{Notice::Step::dead, info, fine, {}, {}},
                              {Notice::Step::dead, fine, info, {}, {}},
                              {Notice::Step::list, fine, fine, {}, {{{info, {}, {}}}}}};
    int read = 0;
    for (const Notice& notice : notices) {
      stitch::base::Bytes bytes;
      notice.write(bytes);
      const auto error =
          stitch::base::failure_of([&] { static_cast<void>(Notice::read(bytes.span())); });
      if (error) EXPECT_EQ(error->code(), ErrorCode::protocol);
      if (!error) ++read;
    }
    return read;
  };
  EXPECT_EQ(reads({std::string(127, 'a'), WorkerId(65'535), kLastEpoch}), 3);
  EXPECT_EQ(reads({std::string(128, 'a'), WorkerId(1), 1}), 0);
  EXPECT_EQ(reads({"a b", WorkerId(1), 1}), 0);
  EXPECT_EQ(reads({"", WorkerId(1), 1}), 0);
  EXPECT_EQ(reads({"a", WorkerId(65'536), 1}), 0);
  EXPECT_EQ(reads({"a", WorkerId(1), kLastEpoch + 1}), 0);
}

// What a liar says of others.
class Liar : public ::testing::Test {
 protected:
  Liar() {
    const KnownLife lives[] = {{self}, {liar}, {other}};
    protocol.start(lives);
  }
  void says(Notice::Step step, const WorkerInfo& about, std::vector<KnownLife> lives = {}) {
    static_cast<void>(protocol.on_notice(
        liar.info, {step, about, liar.info, "a lie", std::move(lives)}, now += 1s));
  }
  const MemberCard self{{"w0", WorkerId(0), 1}, {}, {}};
  const MemberCard liar{{"w1", WorkerId(1), 1}, {}, {}};
  const MemberCard other{{"w2", WorkerId(2), 1}, {}, {}};
  MembershipProtocol protocol{self, {}};
  MembershipProtocol::Time now{std::chrono::hours(1)};
};

TEST_F(Liar, DoesNotHaveANameOrAnIdKeptTwice) {
  const auto before = protocol.lives();
  for (const auto step : {Notice::Step::member, Notice::Step::list}) {
    for (const WorkerInfo& info :
         {WorkerInfo{"w2", WorkerId(7), 1}, WorkerInfo{"x", WorkerId(2), 2},
          WorkerInfo{"w0", WorkerId(7), 1}, WorkerInfo{"x", WorkerId(0), 2}})
      says(step, info, {{{info, {}, {}}}});
  }
  EXPECT_EQ(protocol.lives(), before);
  EXPECT_FALSE(protocol.fenced());
}

TEST_F(Liar, SaysOfNoOtherThatItHasLeft) {
  says(Notice::Step::left, other.info);
  EXPECT_EQ(protocol.state(other.info), LifeState::alive);
  says(Notice::Step::left, liar.info);
  EXPECT_EQ(protocol.state(liar.info), LifeState::left);
}

TEST_F(Liar, DoesNotHaveMoreKeptThanAListCanTell) {
  for (std::uint32_t id = 3; id < 1'000; ++id) {
    const WorkerInfo info{"w" + std::to_string(id), WorkerId(id), 1};
    const MemberCard card{info, {}, std::string(65'536, 'x')};
    says(Notice::Step::member, card.info, {{card}});
  }
  Notice list{Notice::Step::list, self.info, self.info, {}, protocol.lives()};
  stitch::base::Bytes bytes;
  list.write(bytes);
  EXPECT_LT(bytes.size(), std::size_t{9} << 20);
  EXPECT_GT(list.lives.size(), 100U);
  // The world has its own members still.
  const MemberCard small{{"late", WorkerId(2'000), 1}, {}, {}};
  says(Notice::Step::member, small.info, {{small}});
  EXPECT_EQ(protocol.state(small.info), LifeState::alive);
}

// A stranger that connects, without a secret, says that it is a member, and this worker dead.
TEST_F(Liar, IsAskedItselfWhereItMayBeAnother) {
  const auto effects = protocol.on_unproven_verdict(other.info);
  ASSERT_EQ(effects.probes.size(), 1U);
  EXPECT_EQ(effects.probes[0].about, other.info);
  EXPECT_TRUE(protocol.on_unproven_verdict(other.info).empty());  // one question at a time
  static_cast<void>(protocol.on_probe(other.info, true, now));
  EXPECT_FALSE(protocol.fenced());
  EXPECT_EQ(protocol.state(other.info), LifeState::alive);
}

// A record that a liar has told of another one, or of itself.
TEST(Admission, GoesByTheRecordsThatCanBeRead) {
  stitch::rpc::MemberRecord record;
  record.name = "joiner";
  record.size = stitch::WorldSize::range(1);
  const MemberCard joiner{{"joiner", WorkerId(3), 1}, {}, record.encode()};
  const std::vector<MemberCard> live{{{"w1", WorkerId(1), 1}, {}, "garbage"},
                                     {{"w2", WorkerId(2), 1}, {}, {}}};
  const auto size = stitch::WorldSize::range(1);
  EXPECT_FALSE(stitch::rpc::objection_to(joiner, live, size));
  EXPECT_TRUE(stitch::rpc::objection_to({joiner.info, {}, "garbage"}, live, size));
}

constexpr std::size_t kSmallestLimit = 4096;

// A WELCOME has all members, and more than such a frame of another kind may have.
TEST(FramesOfMembership, AWelcomeMayBeLongerThanOtherFrames) {
  const auto store = stitch::transport::make_hash_store();
  const auto start = [&](int number) {
    std::string name = "worker" + std::to_string(number);
    name.resize(120, '-');
    return stitch::init({.name = name,
                         .world_size = "1:32",
                         .rpc_timeout = 20s,
                         .init_timeout = 30s,
                         .shutdown_timeout = 10s,
                         .num_threads = 1,
                         .max_frame_bytes = kSmallestLimit,
                         .store = store});
  };
  std::vector<Worker> workers;
  for (int i = 0; i < 16; ++i) workers.push_back(start(i));
  EXPECT_EQ(workers.back().world_size(), 16);
  EXPECT_EQ(workers.back().rpc_sync<doubled>(workers.front().name(), 21), 42);
  EXPECT_EQ(workers.front().rpc_sync<doubled>(workers.back().name(), 4), 8);
  while (!workers.empty()) workers.pop_back();
}

TEST(FramesOfMembership, AListMayBeLongerThanOtherFrames) {
  constexpr std::uint32_t kGhosts = 300;
  Cluster cluster(2, {.max_frame_bytes = kSmallestLimit});
  EXPECT_EQ(cluster[0].rpc_sync<doubled>("worker1", 1), 2);
  const auto self = cluster[0].info();
  Notice list{Notice::Step::list, self, self, {}, {}};
  for (std::uint32_t i = 0; i < kGhosts; ++i) {
    list.lives.push_back(
        {{{"ghost" + std::to_string(i), WorkerId(100 + i), 1}, {}, {}}, LifeState::left, {}});
  }
  stitch::rpc::OutMessage message(stitch::rpc::wire::kMembership);
  list.write(message.frame.body());
  cluster[0].agent()->send_control(cluster[1].info(), std::move(message));
  EXPECT_TRUE(eventually([&] { return cluster[1].agent()->known_lives().size() == 2 + kGhosts; }));
  EXPECT_EQ(cluster[0].rpc_sync<doubled>("worker1", 3), 6);
}

}  // namespace
}  // namespace membership_limits_test
