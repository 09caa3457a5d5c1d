// References as values: hashes, texts, as objects of other references, and the list of those that a
// worker has.

#include <sstream>
#include <type_traits>
#include <unordered_map>

#include "tests/rref/tables.h"
#include "tests/support/world_test.h"

// Functions of the same names are registered by other units of this program.
namespace stitch::rref_list_test {
namespace {

using namespace stitch::testing;

Gate gate;
int beyond_the_gate(int value) {
  gate.pass();
  return value;
}
int throws(int) { throw std::runtime_error("no luck"); }
at::Tensor make_ones(int size) { return at::ones({size}); }
struct Tally {
  int count = 0;
  int add(int by) { return count += by; }
};
RRef<Tally> pass_back(RRef<Tally> tally) { return tally; }
RRef<Tally> make_tally_at(std::string where) { return remote<Tally>(where); }
RRef<Tally> make_tally_here() { return make_rref(Tally()); }
RRef<RRef<Tally>> own_reference(RRef<Tally> tally) { return make_rref(std::move(tally)); }
RRef<RRef<RRef<Tally>>> own_reference_again(RRef<RRef<Tally>> tally) {
  return make_rref(std::move(tally));
}

// The entry of a reference; one without an id if there is none.
template <class T>
RRefInfo find(const std::vector<RRefInfo>& list, const RRef<T>& rref) {
  const auto at = std::find_if(list.begin(), list.end(),
                               [&](const RRefInfo& info) { return info.id == to_string(rref); });
  return at == list.end() ? RRefInfo{} : *at;
}

TEST(RRefValues, HashCompareAndPrintByTheirObject) {
  Cluster cluster(2);
  const auto tally = remote<Tally>("worker1");
  const auto same = rpc_sync<&pass_back>("worker1", tally);
  const auto other = remote<Tally>("worker1");
  const std::hash<RRef<Tally>> hash;
  EXPECT_EQ(hash(tally), hash(same));
  EXPECT_EQ(tally, same);
  EXPECT_NE(tally, other);
  std::unordered_map<RRef<Tally>, int> numbers{{tally, 1}, {other, 2}, {RRef<Tally>(), 3}};
  EXPECT_EQ(numbers.at(same), 1);
  EXPECT_EQ(numbers.at(other), 2);
  EXPECT_EQ(numbers.at(RRef<Tally>()), 3);
  EXPECT_EQ(RRef<Tally>(), RRef<Tally>());
  std::ostringstream text;
  text << tally << ", " << RRef<Tally>();
  EXPECT_EQ(text.str(), tally.describe() + ", no rref");
  EXPECT_EQ(to_string(same), tally.describe());
}

TEST(RRefValues, MayBeTheObjectsOfOtherReferences) {
  Cluster cluster(4);
  for (int round = 0; round < 20; ++round) {
    const auto outer = remote<&make_tally_at>("worker1", "worker2");
    EXPECT_EQ(outer.owner().name, "worker1");
    const RRef<Tally> inner = outer.to_here();
    EXPECT_EQ(inner.owner().name, "worker2");
    EXPECT_EQ(inner.rpc_sync<&Tally::add>(1), 1);
    const auto third = rpc_sync<&own_reference>("worker3", inner);
    const auto fourth = rpc_sync<&own_reference_again>("worker1", third);
    EXPECT_EQ(third.owner().name, "worker3");
    EXPECT_EQ(fourth.owner().name, "worker1");
    EXPECT_EQ(fourth.to_here().to_here(), inner);
    EXPECT_EQ(fourth.to_here().to_here().rpc_sync<&Tally::add>(1), 2);
  }
  EXPECT_TRUE(eventually([&] { return testing::tables_empty(cluster); }))
      << testing::tables(cluster);
}

TEST(RRefList, TellsTypeSizeStateHoldersAndOriginOfEachObject) {
  gate.close();
  Cluster cluster(3);
  {
    const auto tensor = remote<&make_ones>("worker1", 1000);
    const auto tally = remote<Tally>("worker1");
    const auto bad = remote<&throws>("worker1", 1);
    const auto late = remote<&beyond_the_gate>("worker1", 1);
    const auto own = make_rref(std::string("abcd"));
    tensor.when_created().get();
    tally.when_created().get();
    EXPECT_TRUE(bad.when_created().wait_for(20s));
    ASSERT_TRUE(gate.wait_for_arrival());  // `late` is there
    const auto there = rrefs(cluster[1]);
    ASSERT_EQ(there.size(), 4u);
    const RRefInfo ones = find(there, tensor);
    EXPECT_EQ(ones.state, RRefState::ready);
    EXPECT_EQ(ones.type, "at::Tensor");
    EXPECT_EQ(ones.bytes, sizeof(at::Tensor) + 4000);
    EXPECT_TRUE(contains(ones.made_by, "make_ones")) << ones.made_by;
    EXPECT_EQ(ones.owner, cluster[1].info());
    EXPECT_EQ(ones.creator, cluster[0].info());
    EXPECT_EQ(ones.holders, std::vector<WorkerInfo>{cluster[0].info()});
    EXPECT_GT(ones.age, 0ns);
    EXPECT_LT(ones.age, 60s);
    EXPECT_TRUE(contains(find(there, tally).type, "Tally"));
    EXPECT_EQ(find(there, tally).bytes, std::nullopt);
    EXPECT_EQ(find(there, bad).state, RRefState::failed);
    EXPECT_EQ(find(there, late).state, RRefState::pending);
    EXPECT_TRUE(contains(find(there, late).made_by, "beyond_the_gate"));
    EXPECT_TRUE(std::is_sorted(there.begin(), there.end(),
                               [](const auto& a, const auto& b) { return a.age > b.age; }));

    const auto here = rrefs();  // of the current worker
    ASSERT_EQ(here.size(), 5u);
    EXPECT_EQ(find(here, tensor).state, RRefState::registered);
    EXPECT_EQ(find(here, late).state, RRefState::creating);
    EXPECT_EQ(find(here, tensor).local, 1u);
    EXPECT_TRUE(contains(find(here, tensor).made_by, "make_ones"));
    EXPECT_EQ(find(here, own).state, RRefState::ready);
    EXPECT_EQ(find(here, own).bytes, sizeof(std::string) + 4);
    EXPECT_EQ(find(here, own).made_by, "");
    const auto made_there = rpc_sync<&make_tally_here>("worker1");
    EXPECT_TRUE(contains(find(rrefs(cluster[1]), made_there).made_by, "make_tally_here"));
    std::ostringstream text;
    text << find(here, own) << "\n" << ones;
    EXPECT_TRUE(contains(text.str(), to_string(own) + " ready at worker \"worker0\" (id 0)"))
        << text.str();
    EXPECT_TRUE(contains(text.str(), "held by worker \"worker0\" (id 0)"));
    EXPECT_TRUE(rrefs(cluster[2]).empty());
    EXPECT_EQ(testing::number(cluster, 1, "bytes_known"),
              static_cast<std::int64_t>(sizeof(at::Tensor) + 4000));
    gate.open();
  }
  EXPECT_TRUE(eventually([&] { return rrefs(cluster[1]).empty() && rrefs().empty(); }));
}

TEST(RRefList, KnowsTheBytesOfSparseTensorsAndOfVectorsOfNumbers) {
  Cluster cluster(1);
  const auto sparse = make_rref(
      at::sparse_coo_tensor(at::tensor({1, 5}, at::kLong).unsqueeze(0), at::ones({2, 4}), {9, 4}));
  const auto numbers = make_rref(std::vector<double>(3));
  const auto all = rrefs();
  EXPECT_EQ(find(all, sparse).bytes, sizeof(at::Tensor) + 2 * 8 + 2 * 4 * 4);
  EXPECT_EQ(find(all, numbers).bytes, sizeof(std::vector<double>) + 3 * 8);
}

TEST(RRefList, ShowsReferencesWhoseOwnerIsGone) {
  Cluster cluster(2);
  const auto tally = remote<Tally>("worker1");
  tally.when_created().get();
  cluster[1].shutdown({.graceful = false});
  ASSERT_TRUE(eventually([&] { return find(rrefs(), tally).state == RRefState::lost; }));
  EXPECT_EQ(find(rrefs(), tally).owner.name, "worker1");
  EXPECT_THROW(static_cast<void>(rrefs(cluster[1])), Error);
  cluster.shutdown();
}

}  // namespace
}  // namespace stitch::rref_list_test
