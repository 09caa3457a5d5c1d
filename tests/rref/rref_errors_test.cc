// The errors of a reference whose object, owner or creation failed.

#include <new>

#include "stitch/rpc/gathering.h"
#include "tests/rref/tables.h"
#include "tests/support/world_test.h"

// Functions of the same names are registered by other units of this program.
namespace stitch::rref_errors_test {
namespace {

using namespace stitch::testing;

struct Tally {
  int count = 0;
  int add(int by) { return count += by; }
  std::vector<int> fail() { throw std::out_of_range("no such row"); }
};
int add_one(RRef<Tally> tally) { return tally.rpc_sync<&Tally::add>(1); }
Future<int> add_one_later(RRef<Tally> tally) { co_return co_await tally.rpc_async<&Tally::add>(1); }
int catch_and_tell(RRef<Tally> tally) {
  try {
    return tally.rpc_sync<&Tally::add>(1);
  } catch (const Error& error) {
    return -static_cast<int>(error.code());
  }
}
int throws(int) { throw std::runtime_error("no luck"); }
int fetch_it(RRef<int> number) { return number.to_here(); }

Gate gate;
int beyond_the_gate(int value) {
  gate.pass();
  return value;
}

base::Mutex kept_mutex;
RRef<int> kept;
void keep(RRef<int> number) {
  base::MutexLock lock(kept_mutex);
  kept = std::move(number);
}
RRef<int> give_back() {
  base::MutexLock lock(kept_mutex);
  return std::exchange(kept, RRef<int>());
}

void expect_in(const Error& error, const std::string& part) {
  EXPECT_TRUE(contains(error.what(), part)) << part << "\nis not in\n" << error.what();
}

TEST(RRefErrors, WithoutACurrentWorkerNoReferenceIsMade) {
  const auto texts = [] {
    std::vector<std::string> all;
    std::jthread([&] {
      all.emplace_back(error_of([] { static_cast<void>(make_rref(1)); }).what());
      all.emplace_back(error_of([] { static_cast<void>(remote<&throws>("worker1", 1)); }).what());
    }).join();
    return all;
  };
  for (const std::string& text : texts())
    EXPECT_TRUE(text.starts_with("there is no current worker: ")) << text;
  Cluster cluster(2);
  for (const std::string& text : texts()) {
    EXPECT_TRUE(contains(text, "make one current with stitch::WorkerScope")) << text;
  }
}

// As an argument: what its serialize function throws is a mistake of the program.
struct Unwritable {
  template <class Archive>
  void serialize(Archive&) {
    throw std::runtime_error("not today");
  }
};
struct Taker {
  Taker() = default;
  explicit Taker(Unwritable) {}
  int take(Unwritable) { return 1; }
};
int take(Unwritable) { return 1; }

TEST(RRefErrors, AnArgumentThatCannotBeWrittenMakesNoCallAndNoObject) {
  Cluster cluster(2);
  const auto taker = remote<Taker>("worker1");
  taker.when_created().get();
  const auto expect_refusal = [](const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    EXPECT_EQ(error.worker(), "worker1");
    EXPECT_TRUE(contains(error.function(), "ake")) << error.function();
    expect_in(error, "to worker \"worker1\" (id 1) was not made: ");
    expect_in(error, "std::runtime_error: not today");
  };
  const Unwritable argument;
  const auto future = taker.rpc_async<&Taker::take>(argument);
  expect_refusal(error_of([&] { static_cast<void>(future.get()); }));
  for (const auto& create : std::vector<std::function<void()>>{
           [&] { static_cast<void>(taker.remote<&Taker::take>(argument)); },
           [&] { static_cast<void>(remote<&take>("worker1", argument)); },
           [&] { static_cast<void>(remote<Taker>("worker1", argument)); }}) {
    expect_refusal(error_of(create));
  }
  EXPECT_EQ(number(cluster, 1, "entries"), 1);
}

TEST(RRefErrors, AReferencePassedOnAfterItsOwnersEndNamesTheCallTheOwnerAndItsEpoch) {
  Cluster cluster(3);
  const auto tally = remote<Tally>("worker1");
  EXPECT_EQ(tally.rpc_sync<&Tally::add>(1), 1);
  const std::string gone =
      "worker \"worker1\" epoch " + std::to_string(tally.owner().epoch) + " is gone";
  cluster[1].shutdown({.graceful = false});
  ASSERT_TRUE(eventually([&] { return number(cluster, 0, "holds_lost") == 1; }));

  const Error here = error_of([&] { tally.rpc_sync<&Tally::add>(1); });
  EXPECT_EQ(here.code(), ErrorCode::disconnected);
  EXPECT_EQ(here.worker(), "worker1");
  EXPECT_TRUE(contains(here.function(), "Tally::add")) << here.function();
  expect_in(here, "Tally::add() to worker \"worker1\" (id 1) was not made: " + gone);
  const Error created = error_of([&] { tally.when_created().get(); });
  EXPECT_EQ(created.code(), ErrorCode::disconnected);
  expect_in(created,
            "call RRef::when_created() to worker \"worker1\" (id 1) was not made: " + gone);
  const Error again = error_of([&] { (void)remote<Tally>("worker1"); });
  EXPECT_EQ(again.code(), ErrorCode::disconnected);
  expect_in(again, gone);

  // The handler of another worker cannot use it either; its caller gets the same error.
  for (const Error& there : {error_of([&] { rpc_sync<&add_one>("worker2", tally); }),
                             error_of([&] { rpc_sync<&add_one_later>("worker2", tally); }),
                             error_of([&] { remote<&add_one>("worker2", tally).to_here(); })}) {
    EXPECT_EQ(there.code(), ErrorCode::disconnected) << there.what();
    EXPECT_EQ(there.worker(), "worker1") << there.what();
    EXPECT_TRUE(there.remote());
    expect_in(there, "to worker \"worker2\" (id 2) failed: ");
    expect_in(there, "Tally::add() to worker \"worker1\" (id 1) was not made: " + gone);
  }
  EXPECT_EQ(rpc_sync<&catch_and_tell>("worker2", tally),
            -static_cast<int>(ErrorCode::disconnected));
  cluster.shutdown();
}

TEST(RRefErrors, AFailedCreationNamesItsFunctionAndItsWorkerToEveryUser) {
  gate.close();
  Cluster cluster(3);
  const std::string origin =
      "throws() to worker \"worker1\" (id 1) failed: std::runtime_error: no luck";
  {
    const auto bad = remote<&throws>("worker1", 1);
    const Error creation = error_of([&] { bad.when_created().get(); });
    EXPECT_EQ(creation.code(), ErrorCode::remote_exception);
    EXPECT_EQ(creation.worker(), "worker1");
    EXPECT_TRUE(contains(creation.function(), "throws"));
    expect_in(creation, origin);
    const Error fetch = error_of([&] { (void)bad.to_here(); });
    EXPECT_EQ(fetch.code(), ErrorCode::remote_exception);
    EXPECT_EQ(fetch.worker(), "worker1");
    expect_in(fetch,
              "call RRef::to_here() to worker \"worker1\" (id 1) failed: its object was not ");
    expect_in(fetch, origin);
    expect_in(error_of([&] { rpc_sync<&fetch_it>("worker2", bad); }), origin);
    expect_in(error_of([&] { rpc_sync<&fetch_it>("worker1", bad); }), origin);

    const auto late = remote<&beyond_the_gate>({.to = "worker1", .timeout = 20ms}, 1);
    const Error timeout = error_of([&] { (void)late.to_here(); });
    EXPECT_EQ(timeout.code(), ErrorCode::timeout);
    expect_in(timeout,
              "beyond_the_gate() to worker \"worker1\" (id 1) failed: creation timed out "
              "after 20 ms");
    gate.open();

    const auto tally = remote<Tally>("worker1");
    const auto rows = tally.remote<&Tally::fail>();
    expect_in(error_of([&] { (void)rows.to_here(); }),
              "Tally::fail() to worker \"worker1\" (id 1) failed: std::out_of_range: no such row");

    const auto own = remote<&throws>("worker0", 1);
    expect_in(error_of([&] { own.when_created().get(); }), "throws() to worker \"worker0\" (id 0)");
    expect_in(error_of([&] { (void)own.local_value(); }), "throws() to worker \"worker0\" (id 0)");
    EXPECT_EQ(error_of([&] { (void)own.local_value(); }).worker(), "worker0");
  }
  EXPECT_TRUE(eventually([&] { return tables_empty(cluster); })) << tables(cluster);
}

TEST(RRefErrors, AReferenceThatCameBackToItsCreatorTellsHowTheCreationEnded) {
  Cluster cluster(3);
  for (const bool good : {true, false}) {
    auto number = good ? remote<&beyond_the_gate>("worker1", 5) : remote<&throws>("worker1", 1);
    gate.open();
    EXPECT_EQ(number.when_created().then([](Future<void> done) { return done.has_error(); }).get(),
              !good);
    rpc_sync<&keep>("worker2", number);
    number = RRef<int>();
    ASSERT_TRUE(eventually([&] { return testing::number(cluster, 0, "holds") == 0; }))
        << tables(cluster);
    number = rpc_sync<&give_back>("worker2");
    const auto created = number.when_created();
    ASSERT_TRUE(created.wait_for(20s));
    EXPECT_EQ(created.has_error(), !good);
    if (!good) {
      EXPECT_EQ(created.error().code(), ErrorCode::remote_exception);
      expect_in(created.error(), "std::runtime_error: no luck");
    }
  }
  gate.close();
}

TEST(RRefErrors, WaitsForACreationEndAtTheTimeLimitOfACall) {
  gate.close();
  Cluster cluster(2, {.rpc_timeout = 50ms});
  const auto there = remote<&beyond_the_gate>({.to = "worker1", .timeout = 0s}, 1);
  const auto here = remote<&beyond_the_gate>({.to = "worker0", .timeout = 0s}, 2);
  const auto start = std::chrono::steady_clock::now();
  const Error created = error_of([&] { there.when_created().get(); });
  EXPECT_EQ(created.code(), ErrorCode::timeout);
  EXPECT_EQ(created.worker(), "worker1");
  expect_in(created,
            there.describe() + " was not created by worker \"worker1\" (id 1) within 50 ms");
  EXPECT_EQ(error_of([&] { (void)here.local_value(); }).code(), ErrorCode::timeout);
  EXPECT_EQ(error_of([&] { (void)here.with_timeout(5ms).local_value(); }).code(),
            ErrorCode::timeout);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  gate.open();
  there.with_timeout(20s).when_created().get();
  EXPECT_EQ(here.with_timeout(20s).local_value(), 2);
  EXPECT_EQ(there.to_here(20s), 1) << "a wait that timed out does not change the outcome";
  gate.close();
}

TEST(RRefErrors, ACreationThatAsksForItIsRefusedAtOnceWhereItsOwnerIsFull) {
  gate.close();
  Cluster cluster(2, {.max_inflight_calls = 1});
  const auto first = remote<&beyond_the_gate>("worker1", 3);
  EXPECT_TRUE(gate.wait_for_arrival());
  const TargetOptions refusing{.to = "worker1", .when_full = WhenFull::refuse};
  for (const auto& make : std::vector<std::function<void()>>{
           [&] { remote<&beyond_the_gate>(refusing, 4).when_created().get(); },
           [&] { remote<Tally>(refusing).when_created().get(); }}) {
    const Error refused = error_of(make);
    EXPECT_EQ(refused.code(), ErrorCode::overloaded);
    expect_in(refused, "was not made: 1 calls of ");
  }
  gate.open();
  EXPECT_EQ(first.to_here(), 3);
  EXPECT_TRUE(eventually([&] {
    const auto info = cluster[0].debug_info();
    const auto sent = info.find("rpc.peer.worker1.calls_sent");
    return sent == info.end() || sent->second == 0;
  }));
  EXPECT_EQ(remote<&beyond_the_gate>(refusing, 5).to_here(), 5);
  gate.close();
}

TEST(RRefErrors, CallsThroughAReferenceThatAsksForItAreRefusedAtOnceWhereItsOwnerIsFull) {
  gate.close();
  Cluster cluster(2, {.max_inflight_calls = 1});
  const auto tally = remote<Tally>("worker1");
  tally.when_created().get();
  const auto first = remote<&beyond_the_gate>("worker1", 3);
  EXPECT_TRUE(gate.wait_for_arrival());
  const auto refusing = tally.with_when_full(WhenFull::refuse);
  for (const auto& make : std::vector<std::function<void()>>{
           [&] { refusing.rpc_sync<&Tally::add>(1); },
           [&] { refusing.remote<&Tally::add>(1).when_created().get(); },
           [&] { (void)first.with_when_full(WhenFull::refuse).to_here(); },
           [&] { refusing.with_timeout(10s).rpc_sync<&Tally::add>(1); }}) {
    const Error refused = error_of(make);
    EXPECT_EQ(refused.code(), ErrorCode::overloaded);
    expect_in(refused, "was not made: 1 calls of ");
  }
  gate.open();
  EXPECT_EQ(first.to_here(), 3);
  EXPECT_EQ(refusing.with_when_full(WhenFull::wait).rpc_sync<&Tally::add>(1), 1);
  gate.close();
}

TEST(RRefErrors, AFetchCanBeCancelled) {
  gate.close();
  Cluster cluster(2);
  const auto number = remote<&beyond_the_gate>("worker1", 9);
  const auto fetched = number.to_here_async();
  const auto created = number.when_created();
  fetched.cancel();
  created.cancel();
  EXPECT_EQ(fetched.error().code(), ErrorCode::cancelled);
  EXPECT_EQ(created.error().code(), ErrorCode::cancelled);
  gate.open();
  EXPECT_EQ(number.to_here(), 9);
}

}  // namespace
}  // namespace stitch::rref_errors_test
