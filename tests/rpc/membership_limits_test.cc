// How much may be said about the members of a world.
#include <gtest/gtest.h>

#include <string>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/membership/member_card.h"
#include "stitch/rpc/membership/notice.h"
#include "tests/support/error_of.h"

namespace {

using stitch::ErrorCode;
using stitch::WorkerId;
using stitch::rpc::LifeState;
using stitch::rpc::MemberCard;
using stitch::rpc::Notice;
using stitch::testing::error_of;
using stitch::testing::has_text;

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

}  // namespace
