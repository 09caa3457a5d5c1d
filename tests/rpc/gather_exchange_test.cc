// The rounds of barriers and all_gathers, without a network.
#include <bit>
#include <deque>

#include "stitch/rpc/agent/gather_exchange.h"
#include "tests/support/plain_test.h"

namespace stitch::rpc::gather_exchange_test {
namespace {

using Key = GatherExchange::Key;
using Given = GatherExchange::Given;
using Values = GatherExchange::Values;

WorkerInfo worker(std::size_t index, std::uint64_t epoch = 1) {
  const std::string digits = std::to_string(index);
  return {"w" + std::string(5 - digits.size(), '0') + digits,
          WorkerId(static_cast<std::uint32_t>(index)), epoch};
}

OwnedObject value(int of) { return OwnedObject::of(std::make_shared<int>(of)); }

int read(const OwnedObject& object) { return *static_cast<const int*>(object.object.get()); }

void expect_failed(const Given& given, ErrorCode code, const std::string& text) {
  ASSERT_TRUE(given.failure.has_value());
  EXPECT_EQ(given.failure->code(), code);
  EXPECT_EQ(given.failure->what(), text);
}

// Exchanges of all workers of a world. Fetches are delivered when deliver() is called.
class Exchanges {
 public:
  explicit Exchanges(std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
      lives_.push_back(worker(i));
      exchanges_.push_back(std::make_unique<GatherExchange>(worker(i)));
    }
  }
  GatherExchange& operator[](std::size_t index) { return *exchanges_[index]; }
  [[nodiscard]] const std::vector<WorkerInfo>& lives() const { return lives_; }

  GatherExchange::Begun begin(std::size_t index, const std::string& what = "a barrier") {
    auto begun = exchanges_[index]->begin(lives_, what, value(static_cast<int>(index)));
    for (std::size_t round = 0; round < begun.sources.size(); ++round) {
      fetches_.push_back(
          [this, index, what, round, key = begun.key, source = begun.sources[round].id.value()] {
            peers_[index].insert(source);
            peers_[source].insert(index);
            const auto fetched = exchanges_[source]->fetch(key, round, what, lives_[index]);
            fetched.given.on_ready([this, index, round, key, given = fetched.given] {
              if (given.has_error()) return;
              if (given.get().failure) return exchanges_[index]->fail(key, *given.get().failure);
              exchanges_[index]->add(key, round, given.get().values);
            });
          });
    }
    return begun;
  }
  std::size_t deliver() {
    std::size_t delivered = 0;
    for (; !fetches_.empty(); ++delivered) {
      const auto next = std::move(fetches_.front());
      fetches_.pop_front();
      next();
    }
    return delivered;
  }
  [[nodiscard]] std::size_t kept() const {
    std::size_t kept = 0;
    for (const auto& each : exchanges_) kept += each->size();
    return kept;
  }
  [[nodiscard]] std::size_t most_peers() const {
    std::size_t most = 0;
    for (const auto& [index, peers] : peers_) most = std::max(most, peers.size());
    return most;
  }

 private:
  std::vector<WorkerInfo> lives_;
  std::vector<std::unique_ptr<GatherExchange>> exchanges_;
  std::deque<std::function<void()>> fetches_;
  std::map<std::size_t, std::set<std::size_t>> peers_;
};

TEST(GatherExchanges, GiveAllValuesToAllInALogarithmOfRounds) {
  for (const std::size_t size : {1U, 2U, 3U, 4U, 5U, 7U, 8U, 9U, 63U, 64U, 65U, 256U, 1024U}) {
    Exchanges all(size);
    std::vector<Future<Values>> done;
    std::size_t fetches = 0;
    for (std::size_t i = 0; i < size; ++i) {
      if (i + 1 == size) {
        fetches += all.deliver();  // what waits for the last one
        EXPECT_TRUE(std::ranges::none_of(done, [](const auto& each) { return each.ready(); }));
      }
      done.push_back(all.begin(i).done);
    }
    fetches += all.deliver();
    const auto rounds = static_cast<std::size_t>(std::bit_width(size - 1));
    EXPECT_EQ(fetches, size * rounds);
    EXPECT_LE(all.most_peers(), 2 * rounds);
    for (std::size_t i = 0; i < size; ++i) {
      ASSERT_TRUE(done[i].ready() && !done[i].has_error()) << i << " of " << size;
      const Values values = done[i].get();
      ASSERT_EQ(values.size(), size);
      for (std::size_t k = 0; k < size; ++k)
        ASSERT_EQ(read(values[k]), static_cast<int>((i + size - k) % size));
    }
    EXPECT_EQ(all.kept(), 0U);
  }
}

TEST(GatherExchanges, AFailureReachesAllThatStillWait) {
  constexpr std::size_t kSize = 13;
  for (std::size_t gone = 0; gone < kSize; ++gone) {
    Exchanges all(kSize);
    const Error why = Error(ErrorCode::disconnected, "it is gone");
    all[gone].close(why.with_worker(worker(gone).name));
    std::vector<Future<Values>> done;
    for (std::size_t i = 0; i < kSize; ++i) {
      if (i != gone) done.push_back(all.begin(i).done);
    }
    all.deliver();
    for (const auto& each : done) {
      ASSERT_TRUE(each.ready() && each.has_error()) << gone;
      EXPECT_EQ(each.error().code(), ErrorCode::disconnected);
      EXPECT_EQ(each.error().worker(), worker(gone).name);
      EXPECT_EQ(each.error().what(), "no answer from " + to_string(worker(gone)) + ": it is gone");
    }
    EXPECT_EQ(all.kept(), 0U);
  }
}

TEST(GatherExchanges, ThoseWhoComeToAFailedGatheringAreToldWhyUntilTheNextOneFails) {
  Exchanges all(3);
  const auto first = all.begin(0);
  all[0].fail(first.key, Error(ErrorCode::timeout, "no answer from w2"));
  EXPECT_EQ(first.done.error().what(), std::string("no answer from w2"));
  const auto asks = [&](const Key& key) {
    return all[0].fetch(key, 0, "a barrier", worker(1)).given.get();
  };
  expect_failed(asks(first.key), ErrorCode::timeout, "no answer from w2");
  EXPECT_EQ(all[0].standing(first.key).first->what(), std::string("no answer from w2"));
  const auto second = all.begin(0);
  EXPECT_EQ(second.key, (Key{first.key.set, 1}));
  all[0].fail(second.key, Error(ErrorCode::timeout, "no answer from w1"));
  expect_failed(asks(second.key), ErrorCode::timeout, "no answer from w1");
  expect_failed(asks(first.key), ErrorCode::timeout,
                to_string(worker(0)) +
                    " has left gathering 0 of these workers long ago: its next one is gathering 2");
  EXPECT_EQ(all.kept(), 0U);
}

TEST(GatherExchanges, OnlyTheReaderOfARoundMayFetchIt) {
  Exchanges all(4);
  const auto begun = all.begin(0);
  for (const auto& [reader, round] : {std::pair(worker(3), 0U), std::pair(worker(1), 1U),
                                      std::pair(worker(1), 7U), std::pair(worker(1, 2), 0U)}) {
    expect_failed(all[0].fetch(begun.key, round, "a barrier", reader).given.get(),
                  ErrorCode::invalid_argument,
                  to_string(reader) + " has no part in that round of the gathering");
  }
  EXPECT_FALSE(all[0].fetch(begun.key, 0, "a barrier", worker(1)).given.get().failure);
}

TEST(GatherExchanges, AValueTooFewIsAnErrorOfTheGathering) {
  Exchanges all(4);
  const auto begun = all.begin(0);
  all[0].add(begun.key, 1, {value(1)});
  ASSERT_TRUE(begun.done.has_error());
  EXPECT_EQ(begun.done.error().code(), ErrorCode::protocol);
  EXPECT_EQ(begun.done.error().what(),
            to_string(worker(2)) + " has given 1 values where 2 were expected");
}

TEST(GatherExchanges, AReaderThatWaitsNoMoreOrIsLostIsNotWaitedFor) {
  for (const bool lost : {false, true}) {
    Exchanges all(2);
    const auto begun = all.begin(0);
    if (lost) {
      all[0].on_lost(worker(1));
    } else {
      // It came too early, and gave up.
      const auto next = Key{begun.key.set, begun.key.number + 1};
      const auto early = all[0].fetch(next, 0, "a barrier", worker(1));
      all[0].stop_waiting(next, early.wait);
      EXPECT_TRUE(early.given.has_error());
      EXPECT_EQ(all[0].size(), 1U);
      static_cast<void>(all[0].fetch(begun.key, 0, "a barrier", worker(1)));
    }
    EXPECT_EQ(all[0].standing(begun.key).second, worker(1));
    all[0].add(begun.key, 0, {value(1)});
    EXPECT_TRUE(begun.done.ready());
    EXPECT_EQ(all.kept(), 0U);
  }
}

TEST(GatherExchanges, NewLivesCountTheirGatheringsFromTheStart) {
  GatherExchange exchange(worker(0));
  const auto key_with = [&](std::uint64_t epoch) {
    return exchange.begin({worker(0), worker(1, epoch)}, "a barrier", value(0)).key;
  };
  const Key first = key_with(1);
  EXPECT_EQ(key_with(1), (Key{first.set, 1}));
  const Key other = key_with(2);
  EXPECT_NE(other.set, first.set);
  EXPECT_EQ(other.number, 0U);
  EXPECT_EQ(key_with(1), (Key{first.set, 2}));
}

TEST(GatherExchanges, ForgetTheSetsOfWorkersThatAreUsedLeast) {
  GatherExchange exchange(worker(0));
  const auto meet = [&](std::uint64_t epoch) {
    const auto begun = exchange.begin({worker(0), worker(1, epoch)}, "a barrier", value(0));
    exchange.fail(begun.key, Error(ErrorCode::timeout, "alone"));
    return begun.key.number;
  };
  constexpr std::uint64_t kSets = 4096;
  for (std::uint64_t epoch = 1; epoch <= kSets; ++epoch) ASSERT_EQ(meet(epoch), 0U);
  EXPECT_EQ(meet(1), 1U);
  EXPECT_EQ(meet(kSets + 1), 0U);  // in the place of 2
  EXPECT_EQ(meet(1), 2U);
  EXPECT_EQ(meet(3), 1U);
  EXPECT_EQ(meet(2), 0U);
}

}  // namespace
}  // namespace stitch::rpc::gather_exchange_test
