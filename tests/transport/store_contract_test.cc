// The contract of every store, run over each of them and over a prefix of each.
#include <unistd.h>

#include <cstdio>
#include <future>

#include "stitch/transport/store/file_store.h"
#include "stitch/transport/store/hash_store.h"
#include "stitch/transport/store/prefix_store.h"
#include "stitch/transport/store/tcp_store.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::store_contract_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::error_of;

// One store with several clients: open() returns another view of the same map.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::shared_ptr<Store> open() = 0;
};

class HashBackend final : public Backend {
 public:
  std::shared_ptr<Store> open() override { return store_; }

 private:
  std::shared_ptr<Store> store_ = make_hash_store();
};

class FileBackend final : public Backend {
 public:
  FileBackend() {
    char path[] = "/tmp/stitch-store-XXXXXX";
    const int file = ::mkstemp(path);
    EXPECT_GE(file, 0);
    ::close(file);
    path_ = path;
  }
  ~FileBackend() override { std::remove(path_.c_str()); }
  std::shared_ptr<Store> open() override { return make_file_store(path_); }

 private:
  std::string path_;
};

class TcpBackend final : public Backend {
 public:
  std::shared_ptr<Store> open() override {
    TcpStoreOptions options = options_;
    options.port = server_.port();
    return make_tcp_store(client_loop_, options);
  }

 private:
  TcpStoreOptions options_{.job = "contract", .key = SecretKey::from_random("open sesame")};
  base::EventLoop server_loop_{"store server"};
  base::EventLoop client_loop_{"store client"};
  TcpStoreServer server_{server_loop_, options_};
};

class PrefixBackend final : public Backend {
 public:
  explicit PrefixBackend(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}
  std::shared_ptr<Store> open() override { return make_prefix_store("here", inner_->open()); }

 private:
  std::unique_ptr<Backend> inner_;
};

template <class B>
std::unique_ptr<Backend> make() {
  return std::make_unique<B>();
}
template <class B>
std::unique_ptr<Backend> make_under_prefix() {
  return std::make_unique<PrefixBackend>(make<B>());
}

struct Kind {
  const char* name;
  std::unique_ptr<Backend> (*make)();
  const char* shown_prefix;  // before the key in error texts
};

class StoreContract : public ::testing::TestWithParam<Kind> {
 protected:
  std::shared_ptr<Store> open() { return backend_->open(); }
  // The key as errors name it.
  static std::string shown(const std::string& key) {
    return '"' + (GetParam().shown_prefix + key) + '"';
  }

  std::unique_ptr<Backend> backend_ = GetParam().make();
  std::shared_ptr<Store> store_ = open();
};

TEST_P(StoreContract, GetReturnsWhatWasSet) {
  store_->set("a", "1");
  store_->set("a", "2");
  store_->set("empty", "");
  store_->set("binary", std::string("\0\xff\n", 3));
  EXPECT_EQ(store_->get("a", 1s), "2");
  EXPECT_EQ(store_->get("empty", 1s), "");
  EXPECT_EQ(store_->get("binary", 1s), std::string("\0\xff\n", 3));
  EXPECT_EQ(store_->try_get("a"), "2");
  EXPECT_EQ(store_->try_get("b"), std::nullopt);
}

TEST_P(StoreContract, GetWaitsForTheKey) {
  const auto other = open();
  auto value = std::async(std::launch::async, [&] { return store_->get("later", 30s); });
  other->add("started", 1);
  other->set("later", "here");
  EXPECT_EQ(value.get(), "here");
}

TEST_P(StoreContract, WaitEndsWhenTheLastKeyIsSet) {
  const auto other = open();
  std::atomic<bool> done = false;
  std::jthread waiter([&] {
    store_->wait({"a", "b", "c"}, 30s);
    done = true;
  });
  other->set("c", "");
  other->set("a", "");
  other->add("b", 0);
  waiter.join();
  EXPECT_TRUE(done);
  store_->wait({}, 0ms);
  store_->wait({"a", "a"}, 0ms);
}

TEST_P(StoreContract, AnErasedKeyIsMissedAgain) {
  const auto other = open();
  store_->set("a", "");
  store_->wait({"a"}, 0ms);
  other->erase("a");
  other->set("b", "");
  const auto error = error_of([&] { store_->wait({"a", "b"}, 0ms); });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
}

TEST_P(StoreContract, TimeoutsNameTheMissingKeys) {
  const auto one = error_of([&] { (void)store_->get("member/3", 20ms); });
  EXPECT_EQ(one.code(), ErrorCode::timeout);
  EXPECT_EQ(one.what(),
            "key " + shown("member/3") + " was not set within 20 ms in " + store_->describe());

  store_->set("b", "");
  const auto two = error_of([&] { store_->wait({"a", "b", "c"}, 0ms); });
  EXPECT_EQ(two.code(), ErrorCode::timeout);
  EXPECT_EQ(two.what(), "keys " + shown("a") + ", " + shown("c") + " were not set within 0 ms in " +
                            store_->describe());
}

TEST_P(StoreContract, TimeoutsAreKept) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(error_of([&] { (void)store_->get("never", 100ms); }).code(), ErrorCode::timeout);
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_GE(took, 100ms);
  EXPECT_LT(took, 10s);
  EXPECT_EQ(error_of([&] { (void)store_->get("never", -5ms); }).code(), ErrorCode::timeout);
}

TEST_P(StoreContract, AVeryLongTimeoutIsNoLimit) {
  const auto other = open();
  auto value =
      std::async(std::launch::async, [&] { return store_->get("later", Store::Timeout::max()); });
  other->set("later", "here");
  EXPECT_EQ(value.get(), "here");
}

TEST_P(StoreContract, AddCounts) {
  EXPECT_EQ(store_->add("n", 5), 5);
  EXPECT_EQ(store_->add("n", -7), -2);
  EXPECT_EQ(store_->get("n", 1s), "-2");
  store_->set("n", "40");
  EXPECT_EQ(store_->add("n", 2), 42);
}

TEST_P(StoreContract, AddRefusesAValueThatIsNoNumber) {
  store_->set("n", "12 apples");
  const auto error = error_of([&] { store_->add("n", 1); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error.what(), "value \"12 apples\" of key " + shown("n") +
                              " is not a 64-bit decimal number in " + store_->describe());
  EXPECT_EQ(store_->get("n", 1s), "12 apples");

  store_->set("n", "9223372036854775807");
  const auto overflow = error_of([&] { store_->add("n", 1); });
  EXPECT_EQ(overflow.code(), ErrorCode::out_of_range);
  EXPECT_EQ(overflow.what(), "sum of 9223372036854775807 and 1 for key " + shown("n") +
                                 " overflows 64 bits in " + store_->describe());
}

TEST_P(StoreContract, AddsFromEightThreadsAllCount) {
  constexpr int kThreads = 8;
  constexpr int kAdds = 50;
  std::vector<std::vector<std::int64_t>> seen(kThreads);
  {
    std::vector<std::jthread> threads;
    for (auto& mine : seen) {
      threads.emplace_back([&mine, store = &mine == &seen[0] ? open() : store_] {
        for (int i = 0; i < kAdds; ++i) mine.push_back(store->add("n", 1));
      });
    }
  }
  std::vector<std::int64_t> all;
  for (const auto& mine : seen) {
    EXPECT_TRUE(std::is_sorted(mine.begin(), mine.end()));
    all.insert(all.end(), mine.begin(), mine.end());
  }
  std::sort(all.begin(), all.end());
  ASSERT_EQ(all.size(), std::size_t{kThreads * kAdds});
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], static_cast<std::int64_t>(i) + 1);
}

TEST_P(StoreContract, CompareAndSetReturnsTheValueAfterwards) {
  EXPECT_EQ(store_->compare_and_set("k", "old", "new"), "");
  EXPECT_EQ(store_->try_get("k"), std::nullopt);
  EXPECT_EQ(store_->compare_and_set("k", std::nullopt, "first"), "first");
  EXPECT_EQ(store_->compare_and_set("k", std::nullopt, "second"), "first");
  EXPECT_EQ(store_->compare_and_set("k", "wrong", "second"), "first");
  EXPECT_EQ(store_->compare_and_set("k", "first", "second"), "second");
  EXPECT_EQ(store_->get("k", 1s), "second");
}

TEST_P(StoreContract, OneThreadWinsEachRaceToSet) {
  constexpr int kRounds = 20;
  std::atomic<int> wins = 0;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&, t] {
        const auto store = t == 0 ? open() : store_;
        for (int round = 0; round < kRounds; ++round) {
          const std::string mine = std::to_string(t);
          if (store->compare_and_set("leader/" + std::to_string(round), std::nullopt, mine) == mine)
            ++wins;
        }
      });
    }
  }
  EXPECT_EQ(wins, kRounds);
}

TEST_P(StoreContract, CompareAndSetWakesWaiters) {
  const auto other = open();
  auto value = std::async(std::launch::async, [&] { return store_->get("k", 30s); });
  other->compare_and_set("k", std::nullopt, "v");
  EXPECT_EQ(value.get(), "v");
}

TEST_P(StoreContract, EraseReturnsWhetherThereWasAValue) {
  EXPECT_FALSE(store_->erase("k"));
  store_->set("k", "v");
  EXPECT_TRUE(store_->erase("k"));
  EXPECT_FALSE(store_->erase("k"));
  EXPECT_EQ(store_->try_get("k"), std::nullopt);
  EXPECT_EQ(store_->add("k", 1), 1);
}

TEST_P(StoreContract, LargeValuesPassUpToTheLimit) {
  std::string large(Store::kMaxValueBytes, 'x');
  large[12345] = 'y';
  store_->set("large", large);
  EXPECT_TRUE(open()->get("large", 10s) == large);
  EXPECT_TRUE(store_->compare_and_set("large", large, large) == large);

  large += 'z';
  const auto error = error_of([&] { store_->set("large", large); });
  EXPECT_EQ(error.code(), ErrorCode::out_of_range);
  EXPECT_NE(
      std::string(error.what())
          .find("8388609 bytes for key " + shown("large") + ", more than the 8388608 allowed"),
      std::string::npos)
      << error.what();
}

TEST_P(StoreContract, KeysAreNeitherEmptyNorLong) {
  const std::string longest(Store::kMaxKeyBytes - std::string(GetParam().shown_prefix).size(), 'k');
  store_->set(longest, "v");
  EXPECT_EQ(store_->get(longest, 1s), "v");
  EXPECT_EQ(error_of([&] { store_->set(longest + 'k', "v"); }).code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([&] { (void)store_->get("", 1s); }).code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([&] { (void)store_->try_get(""); }).code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([&] { store_->wait({"a", ""}, 1s); }).code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([&] { store_->add("", 1); }).code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([&] { store_->compare_and_set("", std::nullopt, "v"); }).code(),
            ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([&] { store_->erase(""); }).code(), ErrorCode::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(
    Stores, StoreContract,
    ::testing::Values(Kind{"hash", &make<HashBackend>, ""}, Kind{"file", &make<FileBackend>, ""},
                      Kind{"tcp", &make<TcpBackend>, ""},
                      Kind{"prefix_of_hash", &make_under_prefix<HashBackend>, "here/"}),
    [](const auto& kind) { return std::string(kind.param.name); });

TEST(PrefixStore, PrefixesDoNotMeet) {
  const auto store = make_hash_store();
  const auto a = make_prefix_store("a", store);
  const auto b = make_prefix_store("b", store);
  a->set("k", "1");
  EXPECT_EQ(b->try_get("k"), std::nullopt);
  EXPECT_EQ(store->get("a/k", 1s), "1");
  EXPECT_EQ(make_prefix_store("x", a)->describe(), store->describe());
}

}  // namespace
}  // namespace stitch::transport::store_contract_test
