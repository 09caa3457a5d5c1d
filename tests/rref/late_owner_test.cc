// References that come before the news that their owner has joined.
#include "stitch/rref/agent/rref_agent.h"
#include "tests/support/world_test.h"

namespace late_owner_test {
namespace {

using namespace stitch::testing;

int twice(int value) { return 2 * value; }

TEST(ReferencesOfALateOwner, HaveItsNameOnceThatIsKnown) {
  const auto store = stitch::transport::make_hash_store();
  const auto join = [&](const char* name) {
    return stitch::init({.name = name, .world_size = "1:4", .init_timeout = 30s, .store = store});
  };
  auto first = join("first");
  const WorkerScope scope(first);
  const auto rrefs = stitch::rref::rrefs_of(*stitch::rpc::current_agent());
  const auto life = stitch::rref::life_of({"", WorkerId(1), 1});
  const WorkerInfo& before = rrefs->known_info_of(life);
  EXPECT_EQ(before, (WorkerInfo{"", WorkerId(1), 1}));
  auto second = join("second");
  ASSERT_TRUE(eventually([&] { return first.workers().size() == 2; }));
  EXPECT_EQ(rrefs->known_info_of(life), second.info());
  EXPECT_EQ(first.rpc_sync<twice>(rrefs->known_info_of(life), 4), 8);
  // What was given out before names it by id and epoch.
  EXPECT_EQ(before.name, "");
  EXPECT_EQ(first.rpc_sync<twice>(before, 5), 10);
}

}  // namespace
}  // namespace late_owner_test
