// The contract of every store, run over each of them and over a prefix of each.
#include <future>

#include <signal.h>

#include "stitch/transport/store/file_store.h"
#include "stitch/transport/store/hash_store.h"
#include "stitch/transport/store/prefix_store.h"
#include "stitch/transport/store/tcp_store.h"
#include "tests/support/forked_child.h"
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
  std::shared_ptr<Store> open() override { return make_file_store(folder_.path() / "store"); }

 private:
  const stitch::testing::TemporaryFolder folder_;
};

class TcpBackend final : public Backend {
 public:
  std::shared_ptr<Store> open() override {
    TcpStoreOptions options = options_;
    options.port = server_.port();
    return make_tcp_store(options);
  }

 private:
  TcpStoreOptions options_{.key = SecretKey::from_random("open sesame")};
  TcpStoreServer server_{options_};
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
  other->set("started", "");
  other->set("later", "here");
  EXPECT_EQ(value.get(), "here");
}

TEST_P(StoreContract, TimeoutsNameTheMissingKey) {
  const auto one = error_of([&] { (void)store_->get("member/3", 20ms); });
  EXPECT_EQ(one.code(), ErrorCode::timeout);
  EXPECT_EQ(one.what(),
            "key " + shown("member/3") + " was not set within 20 ms in " + store_->describe());
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

TEST_P(StoreContract, EraseReturnsWhetherThereWasAValue) {
  EXPECT_FALSE(store_->erase("k"));
  store_->set("k", "v");
  EXPECT_TRUE(store_->erase("k"));
  EXPECT_FALSE(store_->erase("k"));
  EXPECT_EQ(store_->try_get("k"), std::nullopt);
}

TEST_P(StoreContract, LargeValuesPassUpToTheLimit) {
  std::string large(Store::kMaxValueBytes, 'x');
  large[12345] = 'y';
  store_->set("large", large);
  EXPECT_TRUE(open()->get("large", 10s) == large);

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
  EXPECT_EQ(error_of([&] { store_->erase(""); }).code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([&] { (void)store_->claim("", "v"); }).code(), ErrorCode::invalid_argument);
}

using Claims = std::map<std::string, std::string>;

TEST_P(StoreContract, AClaimIsExclusiveUntilItIsDestroyed) {
  const auto other = open();
  Store::Claimed first = store_->claim("member/a", "one");
  ASSERT_NE(first.claim, nullptr);
  EXPECT_EQ(first.holder, "one");
  for (const auto& store : {store_, other}) {
    const Store::Claimed refused = store->claim("member/a", "two");
    EXPECT_EQ(refused.claim, nullptr);
    EXPECT_EQ(refused.holder, "one");
  }
  const Store::Claimed second = other->claim("member/b", "");
  ASSERT_NE(second.claim, nullptr);
  const auto elsewhere = other->claim("leader", std::string("\0x", 2));
  EXPECT_EQ(store_->claims("member/", 2, 0ms), (Claims{{"member/a", "one"}, {"member/b", ""}}));
  EXPECT_EQ(store_->claims("", 3, 0ms).size(), 3U);
  EXPECT_EQ(store_->try_get("member/a"), std::nullopt) << "a claim is no value";
  first.claim.reset();
  EXPECT_TRUE(stitch::testing::eventually([&] {
    return other->claims("member/", 1, 0ms) == Claims{{"member/b", ""}};
  }));
  const Store::Claimed again = other->claim("member/a", "a longer value than the one before");
  EXPECT_NE(again.claim, nullptr);
  EXPECT_EQ(store_->claims("member/a", 1, 0ms).begin()->second,
            "a longer value than the one before");
}

TEST_P(StoreContract, ClaimsWaitForACount) {
  const auto other = open();
  auto seen = std::async(std::launch::async, [&] { return store_->claims("member/", 3, 30s); });
  const auto unrelated = other->claim("members", "");
  std::vector<Store::Claimed> held;
  for (const char* key : {"member/1", "member/2", "member/3"})
    held.push_back(other->claim(key, key));
  EXPECT_EQ(seen.get(),
            (Claims{{"member/1", "member/1"}, {"member/2", "member/2"}, {"member/3", "member/3"}}));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(store_->claims("member/", 4, 100ms).size(), 3U) << "what there is";
  EXPECT_GE(std::chrono::steady_clock::now() - start, 100ms);
}

TEST_P(StoreContract, OneThreadWinsEachRaceToClaim) {
  constexpr int kRounds = 20;
  std::atomic<int> wins = 0;
  std::mutex mutex;
  std::vector<std::unique_ptr<Store::Claim>> held;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&, t] {
        const auto store = t == 0 ? open() : store_;
        for (int round = 0; round < kRounds; ++round) {
          auto claimed = store->claim("leader/" + std::to_string(round), std::to_string(t));
          if (!claimed.claim) continue;
          ++wins;
          const std::lock_guard lock(mutex);
          held.push_back(std::move(claimed.claim));
        }
      });
    }
  }
  EXPECT_EQ(wins, kRounds);
}

// A child of this process cannot see a hash store.
TEST_P(StoreContract, AClaimEndsWithItsProcess) {
  if (std::string(GetParam().name).find("hash") != std::string::npos)
    GTEST_SKIP() << "a hash store is within one process";
  stitch::testing::ForkedChild child([&] {
    const auto mine = open();
    const auto claimed = mine->claim("member/child", "child");
    const auto leader = mine->claim("leader", "child");
    (void)mine->get("never", 60s);
  });
  EXPECT_EQ(store_->claims("member/", 1, 20s), (Claims{{"member/child", "child"}}));
  EXPECT_TRUE(
      stitch::testing::eventually([&] { return store_->claims("leader", 1, 0ms).size() == 1; }));
  EXPECT_EQ(store_->claim("leader", "parent").holder, "child");
  child.kill();
  EXPECT_EQ(child.wait(), 128 + SIGKILL);
  EXPECT_TRUE(stitch::testing::eventually([&] { return store_->claims("", 1, 0ms).empty(); }));
  EXPECT_NE(store_->claim("leader", "parent").claim, nullptr);
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
