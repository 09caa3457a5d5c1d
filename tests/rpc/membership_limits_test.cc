// How much may be said about the members of a world.
#include <span>

#include "stitch/rpc/membership/member_card.h"
#include "stitch/rpc/membership/notice.h"
#include "tests/support/world_test.h"

namespace membership_limits_test {
namespace {

using namespace std::chrono_literals;
using stitch::ErrorCode;
using stitch::Options;
using stitch::Worker;
using stitch::WorkerId;
using stitch::rpc::KnownLife;
using stitch::rpc::LifeState;
using stitch::rpc::MemberCard;
using stitch::rpc::Notice;
using stitch::testing::Cluster;
using stitch::testing::error_of;
using stitch::testing::eventually;
using stitch::testing::has_text;

int doubled(int x) { return 2 * x; }
std::size_t length(const std::string& text) { return text.size(); }

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

TEST(Notices, HaveTextsThatCanBePrinted) {
  const std::string dirty = "it\x1b[2J is\n dead \xff";
  const std::string clean = "it?[2J is? dead ?";
  Notice notice{Notice::Step::dead, {"a", WorkerId(1), 1}, {dirty, WorkerId(2), 1}, dirty, {}};
  notice.lives.push_back({{{"a", WorkerId(1), 1}, {}, {}}, LifeState::dead, dirty});
  stitch::base::Bytes bytes;
  notice.write(bytes);
  const Notice read = Notice::read(bytes.span());
  EXPECT_EQ(read.text, clean);
  EXPECT_EQ(read.by.name, clean);
  ASSERT_EQ(read.lives.size(), 1U);
  EXPECT_EQ(read.lives[0].verdict, clean);
  notice.by.name = std::string(1000, 'x');
  stitch::base::Bytes longer;
  notice.write(longer);
  EXPECT_EQ(Notice::read(longer.span()).by.name, std::string(127, 'x'));
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
  Cluster cluster(2, [](Options& options) { options.max_frame_bytes = kSmallestLimit; });
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

TEST(FramesOfMembership, OtherFramesGoByTheSmallerLimitOfBothSides) {
  Cluster cluster(2, [](Options& options) {
    if (options.rank == 1) options.max_frame_bytes = kSmallestLimit;
  });
  EXPECT_EQ(cluster[0].rpc_sync<length>("worker1", std::string(1000, 'x')), 1000U);
  EXPECT_TRUE(
      has_text(error_of([&] { cluster[0].rpc_sync<length>("worker1", std::string(8000, 'x')); }),
               ErrorCode::out_of_range, " exceeds max_frame_bytes 4096"));
  EXPECT_EQ(cluster[0].rpc_sync<length>("worker1", std::string(1000, 'x')), 1000U);
}

}  // namespace
}  // namespace membership_limits_test
