// RRef as its user sees it, in whole worlds within one process.

#include <cereal/archives/binary.hpp>
#include <sstream>
#include <unordered_set>
#include <variant>

#include "tests/rref/tables.h"
#include "tests/support/world_test.h"

namespace stitch::rref_test {
namespace {

using namespace stitch::testing;

std::atomic<int> live_counters{0};

// Neither copyable nor movable nor sendable.
class Counter {
 public:
  explicit Counter(int start) : value_(start) { ++live_counters; }
  Counter(int start, std::string name) : value_(start), name_(std::move(name)) { ++live_counters; }
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  ~Counter() { --live_counters; }
  int add(int by) { return value_ += by; }
  int value() const { return value_; }
  std::string name() const { return name_; }
  Future<int> add_later(int by) {
    const int before = co_await rpc_async<&identity>(rpc::current_agent()->self(), value_);
    co_return value_ = before + by;
  }
  std::vector<int> history() const { return {1, 2, value_}; }
  [[noreturn]] void fail() { throw std::out_of_range("no such counter"); }
  static int identity(int x) { return x; }

 private:
  std::atomic<int> value_;
  std::string name_;
};

struct Named {
  std::string name() const { return "named"; }
};
struct Special : Counter, Named {
  explicit Special(int start) : Counter(start) {}
};

int twice(int x) { return 2 * x; }
std::atomic<int> nothings_done{0};
void nothing() { ++nothings_done; }
int use(RRef<Counter> counter) { return counter.rpc_sync<&Counter::add>(1); }
int look_only(const RRef<Counter>& counter) { return counter.valid() ? 1 : 0; }
RRef<Counter> pass_back(RRef<Counter> counter) { return counter; }
RRef<Counter> make_counter(int start) {
  return remote<Counter>(rpc::current_agent()->self(), start);
}
RRef<Counter> make_counter_at(std::string where, int start) {
  return remote<Counter>(where, start);
}
Future<int> use_in_coroutine(RRef<Counter> counter) {
  int last = 0;
  for (int i = 0; i < 3; ++i) last = co_await counter.rpc_async<&Counter::add>(1);
  co_return last;
}
Future<int> fan_out(std::string to, int calls) {
  std::vector<Future<int>> all;
  for (int i = 0; i < calls; ++i) all.push_back(rpc_async<&twice>(to, i));
  int sum = 0;
  for (const int each : co_await when_all(std::move(all))) sum += each;
  co_return sum;
}
base::Mutex promised_mutex;
std::optional<Promise<int>> promised_number;
Future<int> promised() {
  base::MutexLock lock(promised_mutex);
  return promised_number.emplace().future();
}
int throws(int) { throw std::runtime_error("no luck"); }

Gate gate;
int beyond_the_gate(int value) {
  gate.pass();
  return value;
}

base::Mutex kept_mutex;
std::map<std::string, std::vector<RRef<Counter>>> kept;
void keep(std::string where, RRef<Counter> counter) {
  base::MutexLock lock(kept_mutex);
  kept[where].push_back(std::move(counter));
}
void drop_kept(std::string where) {
  std::vector<RRef<Counter>> gone;
  base::MutexLock lock(kept_mutex);
  gone.swap(kept[where]);
}
RRef<Counter> give_kept() {
  base::MutexLock lock(kept_mutex);
  auto last = std::move(kept["there"].at(0));
  kept["there"].clear();
  return last;
}
int fetch_it(RRef<int> number) { return number.to_here(); }
int use_kept(std::string where) {
  RRef<Counter> counter;
  {
    base::MutexLock lock(kept_mutex);
    counter = kept[where].at(0);
  }
  return counter.rpc_sync<&Counter::add>(1);
}

struct Wallet {
  std::string label;
  std::vector<RRef<Counter>> counters;
  std::map<std::string, std::optional<RRef<int>>> numbers;
  std::variant<int, RRef<int>> either = 0;
  std::tuple<std::array<RRef<int>, 2>, std::pair<int, RRef<int>>> deep;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(label, counters, numbers, either, deep);
  }
};
int sum(const Wallet& wallet) {
  int total = 0;
  for (const auto& counter : wallet.counters) total += counter.rpc_sync<&Counter::value>();
  for (const auto& [name, number] : wallet.numbers) {
    if (number) total += number->to_here();
  }
  if (wallet.either.index() == 1) total += std::get<1>(wallet.either).to_here();
  for (const RRef<int>& number : std::get<0>(wallet.deep)) {
    if (number.valid()) total += number.to_here();
  }
  const auto& [present, last] = std::get<1>(wallet.deep);
  if (present != 0) total += last.to_here();
  return total;
}
Wallet give_wallet(int n) {
  Wallet wallet{"mine", {}, {{"none", std::nullopt}}, {}, {}};
  for (int i = 0; i < n; ++i)
    wallet.counters.push_back(remote<Counter>(rpc::current_agent()->self(), i));
  wallet.numbers["seven"] = make_rref(7);
  return wallet;
}

#define EXPECT_EMPTY(cluster)                                                        \
  EXPECT_TRUE(eventually([&] { return tables_empty(cluster); })) << tables(cluster); \
  EXPECT_TRUE(eventually([&] { return live_counters == 0; })) << live_counters << " objects live"

// Not constructed remotely by this program.
struct Served {
  Served(int number, std::string text) : number(number), text(std::move(text)) {}
  int number;
  std::string text;
};
STITCH_EXPORT_CONSTRUCTOR(Served, int, std::string);

TEST(RRef, AConstructorCanBeExported) {
  const auto id = rpc::function_id(typeid(detail::Constructor<Served, int, std::string>).name());
  const rpc::Function* const function = rpc::FunctionRegistry::instance().find(id);
  ASSERT_NE(function, nullptr);
  EXPECT_EQ(function->name, "stitch::rref_test::(anonymous namespace)::Served");
}

TEST(RRef, TheResultOfARemoteFunctionStaysThereUntilFetched) {
  Cluster cluster(2);
  {
    const auto four = remote<&twice>("worker1", 2);
    EXPECT_FALSE(four.is_owner());
    EXPECT_EQ(four.owner().name, "worker1");
    EXPECT_EQ(four.to_here(), 4);
    EXPECT_EQ(four.to_here(5s), 4);
    EXPECT_EQ(four.to_here_async().get(), 4);
    four.when_created().get();
    EXPECT_TRUE(four.confirmed_by_owner());
    EXPECT_EQ(number(cluster, 1, "entries"), 1);
  }
  EXPECT_EMPTY(cluster);
}

TEST(RRef, MethodsRunOnTheOwnerOnATypeThatCannotBeCopiedOrSent) {
  Cluster cluster(2);
  {
    const auto counter = remote<Counter>("worker1", 10, "apples");
    EXPECT_EQ(counter.rpc_sync<&Counter::add>(5), 15);
    EXPECT_EQ(counter.rpc_async<&Counter::add>(5).get(), 20);
    EXPECT_EQ(counter.rpc_sync<&Counter::name>(), "apples");
    EXPECT_EQ(counter.rpc_sync<&Counter::add_later>(1), 21);
    EXPECT_EQ(counter.rpc_async<&Counter::add_later>(-1).get(), 20);
    EXPECT_EQ(counter.remote<&Counter::add_later>(1).to_here(), 21);
    const auto history = counter.remote<&Counter::history>();
    EXPECT_EQ(history.to_here(), (std::vector<int>{1, 2, 21}));
    EXPECT_EQ(history.owner().name, "worker1");
  }
  EXPECT_EMPTY(cluster);
}

TEST(RRef, InheritedMethodsOfAnyBaseReachTheRightObject) {
  Cluster cluster(2);
  const auto special = remote<Special>("worker1", 3);
  EXPECT_EQ(special.rpc_sync<&Special::add>(1), 4);
  EXPECT_EQ((special.rpc_sync<&Special::Named::name>()), "named");
}

TEST(RRef, AnObjectOwnedHereIsSharedNotCopied) {
  Cluster cluster(2);
  {
    const auto mine = make_rref(std::string("text"));
    EXPECT_TRUE(mine.is_owner());
    EXPECT_TRUE(mine.confirmed_by_owner());
    mine.local_value() += "!";
    EXPECT_EQ(mine.to_here(), "text!");
    const auto tensor = make_rref(at::ones({2}));
    tensor.local_value().add_(1);
    EXPECT_TRUE(at::equal(tensor.to_here(), at::full({2}, 2.0)));
  }
  EXPECT_EMPTY(cluster);
}

TEST(RRef, RemoteToOneselfWorksAsToOthers) {
  Cluster cluster(1);
  {
    const auto counter = remote<Counter>("worker0", 1);
    EXPECT_EQ(counter.rpc_sync<&Counter::add>(1), 2);
    EXPECT_EQ(counter.local_value().value(), 2);
    EXPECT_EQ(rpc_sync<&use>("worker0", counter), 3);
    EXPECT_EQ(counter.rpc_async<&Counter::add>(1).get(), 4);
    EXPECT_EQ(counter.remote<&Counter::add>(1).to_here(), 5);
    EXPECT_EQ(remote<&use>("worker0", counter).to_here(), 6);
    EXPECT_EQ(remote<&twice>("worker0", 4).to_here(), 8);
    EXPECT_EQ(remote<&throws>("worker0", 4)
                  .when_created()
                  .then([](Future<void> done) { return done.error().code(); })
                  .get(),
              ErrorCode::remote_exception);
  }
  EXPECT_EMPTY(cluster);
}

TEST(RRef, ReferencesTravelAnywhereInArgumentsAndResults) {
  Cluster cluster(3);
  {
    Wallet wallet{"w",
                  {remote<Counter>("worker1", 1), remote<Counter>("worker2", 2),
                   remote<Counter>("worker0", 3)},
                  {},
                  make_rref(100),
                  {{make_rref(1000), RRef<int>()}, {1, make_rref(10'000)}}};
    wallet.counters.push_back(wallet.counters[0]);
    wallet.numbers["ten"] = make_rref(10);
    wallet.numbers["nothing"] = std::nullopt;
    EXPECT_EQ(rpc_sync<&sum>("worker2", wallet), 1 + 2 + 3 + 1 + 10 + 100 + 1000 + 10'000);
    const Wallet back = rpc_sync<&give_wallet>("worker1", 4);
    EXPECT_EQ(sum(back), 0 + 1 + 2 + 3 + 7);
    EXPECT_EQ(rpc_sync<&sum>("worker2", back), 13);
    EXPECT_FALSE(rpc_sync<&pass_back>("worker1", RRef<Counter>()).valid());
  }
  EXPECT_EMPTY(cluster);
}

TEST(RRef, OneRefersToTheSameObjectWhereverItHasBeen) {
  Cluster cluster(3);
  {
    const auto counter = remote<Counter>("worker1", 0);
    const auto back = rpc_sync<&pass_back>("worker2", rpc_sync<&pass_back>("worker1", counter));
    EXPECT_EQ(back, counter);
    const auto life = [](const WorkerInfo& info) {
      return std::to_string(info.id.value()) + "." + std::to_string(info.epoch);
    };
    EXPECT_EQ(counter.describe(),
              "rref " + life(cluster[1].info()) + "/" + life(cluster[0].info()) + "/0");
    EXPECT_EQ(back.describe(), counter.describe());
    const std::unordered_set<WorkerInfo> owners{counter.owner(), back.owner(), cluster[1].info()};
    EXPECT_EQ(owners.size(), 1u);
    EXPECT_FALSE(owners.contains(make_rref(1).owner()));
    EXPECT_EQ(rpc_sync<&use>("worker2", back), 1);
    EXPECT_EQ(rpc_sync<&use>("worker1", back), 2);
    EXPECT_EQ(rpc_sync<&use>("worker0", back), 3);
    EXPECT_EQ(rpc_sync<&use_in_coroutine>("worker2", back), 6);
  }
  EXPECT_EMPTY(cluster);
}

TEST(RRef, CreationOnAThirdWorkerReachesTheFirst) {
  Cluster cluster(3);
  {
    const auto counter = rpc_sync<&make_counter_at>("worker1", "worker2", 5);
    EXPECT_EQ(counter.owner().name, "worker2");
    EXPECT_EQ(counter.rpc_sync<&Counter::value>(), 5);
    counter.when_created().get();
    const auto other = rpc_sync<&make_counter>("worker1", 6);
    EXPECT_EQ(other.owner().name, "worker1");
    EXPECT_EQ(other.rpc_sync<&Counter::value>(), 6);
  }
  EXPECT_EMPTY(cluster);
}

TEST(RRef, WhatIsAskedOfAnObjectStillBeingCreatedWaitsBehindItsCreation) {
  Cluster cluster(3);
  {
    gate.close();
    const auto slow_one = remote<&beyond_the_gate>("worker1", 100);
    const auto fetched = slow_one.to_here_async();
    const auto fetched_elsewhere = rpc_async<&fetch_it>("worker2", slow_one);
    EXPECT_FALSE(fetched.wait_for(20ms));
    EXPECT_FALSE(fetched_elsewhere.ready());
    gate.open();
    EXPECT_EQ(fetched_elsewhere.get(), 100);
    EXPECT_EQ(fetched.get(), 100);
  }
  EXPECT_EMPTY(cluster);
}

TEST(RRef, AFunctionThatReturnsAFutureMakesItsObjectWhenThatCompletes) {
  Cluster cluster(3);
  {
    const auto counter = remote<Counter>("worker2", 0);
    EXPECT_EQ(remote<&use_in_coroutine>("worker1", counter).to_here(), 3);
    EXPECT_EQ(remote<&fan_out>("worker1", "worker2", 20).to_here(), 380);
    const auto number = remote<&promised>("worker1");
    const auto fetched = number.to_here_async();
    ASSERT_TRUE(eventually([] {
      base::MutexLock lock(promised_mutex);
      return promised_number.has_value();
    }));
    EXPECT_FALSE(fetched.ready());
    std::jthread([] {
      base::MutexLock lock(promised_mutex);
      const Promise<int> promise = *std::exchange(promised_number, std::nullopt);
      lock.unlock();
      promise.set_value(7);
    }).join();
    EXPECT_EQ(fetched.get(), 7);
    EXPECT_EQ(number.to_here(), 7);
  }
  EXPECT_EMPTY(cluster);
}

TEST(RRef, AFetchGivesUpAtItsTimeoutAndTheObjectComesLater) {
  Cluster cluster(2);
  {
    gate.close();
    const auto number = remote<&beyond_the_gate>("worker1", 300);
    EXPECT_THROW((void)number.to_here(20ms), Error);
    gate.open();
    EXPECT_EQ(number.to_here(), 300);
  }
  EXPECT_EMPTY(cluster);
}

TEST(RRef, AVoidResultCanBeWaitedFor) {
  Cluster cluster(2);
  const int before = nothings_done;
  const auto done = remote<&nothing>("worker1");
  done.to_here();
  EXPECT_EQ(nothings_done, before + 1) << "it has run by then, once";
  done.when_created().get();
  done.to_here();
  rpc_sync<&nothing>("worker1");
  EXPECT_EQ(nothings_done, before + 2);
}

TEST(RRef, WrongUsesSayWhatIsWrong) {
  Cluster cluster(2);
  const auto there = remote<&twice>("worker1", 2);
  const auto text_of = [](auto&& f) {
    try {
      f();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    ADD_FAILURE() << "nothing was thrown";
    return std::string();
  };
  EXPECT_TRUE(contains(text_of([&] { (void)there.local_value(); }),
                       "is owned by worker \"worker1\" (id 1), not by worker \"worker0\" (id 0)"));
  EXPECT_EQ(text_of([&] { (void)RRef<int>().to_here(); }), "this RRef refers to nothing");
  EXPECT_TRUE(contains(text_of([&] { (void)remote<&twice>("worker7", 2); }), "worker7"));
  EXPECT_TRUE(contains(text_of([&] { remote<Counter>("worker1", 1).rpc_sync<&Counter::fail>(); }),
                       "std::out_of_range: no such counter"));
  std::stringstream stream;
  cereal::BinaryOutputArchive archive(stream);
  EXPECT_TRUE(contains(text_of([&] { archive(there); }), "only, not into another archive"));
  WorkerScope other(cluster[1]);
  EXPECT_EQ(rpc_sync<&look_only>("worker0", remote<Counter>("worker1", 1)), 1)
      << "a worker may send its own references, not those of others in its process";
  EXPECT_TRUE(contains(text_of([&] { (void)rpc_sync<&fetch_it>("worker0", there); }),
                       "cannot be sent by worker 1"));
}

TEST(RRefLifetime, TheLastHandlePassedBackAndForthKeepsTheObject) {
  Cluster cluster(3);
  auto counter = remote<Counter>("worker1", 0);
  for (int i = 0; i < 300; ++i) {
    rpc_sync<&keep>("worker2", "there", std::move(counter));
    counter = RRef<Counter>();
    ASSERT_EQ(rpc_sync<&use_kept>("worker2", "there"), i + 1);
    counter = rpc_sync<&give_kept>("worker2");
  }
  EXPECT_EQ(counter.rpc_sync<&Counter::value>(), 300);
  counter = RRef<Counter>();
  EXPECT_EMPTY(cluster);
}

TEST(RRefLifetime, DroppedInEveryOrderTheObjectGoesWithTheLast) {
  Cluster cluster(4);
  const std::vector<std::string> places{"worker1", "worker2", "worker3"};
  std::vector<int> order{0, 1, 2};
  do {
    {
      auto counter = remote<Counter>("worker0", 1);
      counter.when_created().get();  // not required before sharing it
      for (const auto& place : places) rpc_sync<&keep>(place, place, counter);
    }
    for (const int each : order) {
      EXPECT_EQ(live_counters, 1);
      const auto& place = places[static_cast<std::size_t>(each)];
      EXPECT_GT(rpc_sync<&use_kept>(place, place), 1);
      rpc_sync<&drop_kept>(place, place);
    }
    EXPECT_EMPTY(cluster);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(RRefLifetime, CreatedPassedOnAndDroppedImmediatelyItReachesTheReceiver) {
  Cluster cluster(3);
  for (int i = 0; i < 100; ++i) {
    notify<&keep>("worker2", "later", remote<Counter>("worker1", i));
    ASSERT_TRUE(eventually([] {
      base::MutexLock lock(kept_mutex);
      return kept["later"].size() == 1;
    }));
    EXPECT_EQ(rpc_sync<&use_kept>("worker2", "later"), i + 1);
    rpc_sync<&drop_kept>("worker2", "later");
  }
  EXPECT_EMPTY(cluster);
}

TEST(RRefLifetime, HandlesOutliveTheirWorkerAndSaySo) {
  RRef<int> mine, theirs;
  {
    Cluster cluster(2);
    mine = make_rref(3);
    theirs = remote<&twice>("worker1", 2);
    EXPECT_EQ(theirs.to_here(), 4);
  }
  EXPECT_EQ(mine.to_here_async().error().code(), ErrorCode::shutting_down);
  EXPECT_EQ(theirs.to_here_async().error().code(), ErrorCode::shutting_down);
}

TEST(RRefLifetime, ObjectsStillReferredToAtShutdownAreDestroyed) {
  {
    Cluster cluster(2);
    static RRef<Counter> kept_here;
    kept_here = remote<Counter>("worker1", 1);
    kept_here.when_created().get();
    EXPECT_EQ(live_counters, 1);
    EXPECT_TRUE(cluster.shutdown().empty());
  }
  EXPECT_EQ(live_counters, 0);
}

}  // namespace
}  // namespace stitch::rref_test
