// The store of torch's as a place to meet: a c10d::TCPStore in this process serves it.
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <signal.h>

#include <future>

#include "stitch/rpc/world/c10d_store.h"
#include "tests/support/world_test.h"

namespace c10d_store_test {
namespace {

using namespace std::chrono_literals;
using stitch::ErrorCode;
using stitch::rpc::make_c10d_store;
using stitch::testing::error_of;
using stitch::testing::has_text;
using stitch::transport::SecretKey;
using stitch::transport::Store;
using Claims = std::map<std::string, std::string>;

c10::intrusive_ptr<c10d::TCPStore> serve() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

std::vector<std::uint8_t> raw(const std::string& text) { return {text.begin(), text.end()}; }

// With a secret and without.
class C10dStore : public ::testing::TestWithParam<bool> {
 protected:
  std::shared_ptr<Store> open() const {
    return make_c10d_store("127.0.0.1", server_->getPort(), key_, 5s);
  }
  const c10::intrusive_ptr<c10d::TCPStore> server_ = serve();
  const std::shared_ptr<const SecretKey> key_ =
      GetParam() ? SecretKey::from_random("a secret") : nullptr;
  const std::shared_ptr<Store> store_ = open();
};

TEST_P(C10dStore, HasWhatWasSet) {
  const auto other = open();
  EXPECT_EQ(store_->try_get("k"), std::nullopt);
  auto later = std::async(std::launch::async, [&] { return other->get("k", 30s); });
  store_->set("k", std::string("\0v", 2));
  EXPECT_EQ(later.get(), std::string("\0v", 2));
  store_->set("k", "");
  EXPECT_EQ(other->try_get("k"), "");
  EXPECT_TRUE(other->erase("k"));
  EXPECT_FALSE(other->erase("k"));
  EXPECT_TRUE(has_text(error_of([&] { (void)store_->get("k", 20ms); }), ErrorCode::timeout,
                       "key \"k\" was not set within 20 ms in c10d store at 127.0.0.1:"));
  EXPECT_EQ(error_of([&] { store_->set("", "v"); }).code(), ErrorCode::invalid_argument);
  const std::string large(std::size_t{4} << 20, 'x');
  store_->set("large", large);
  EXPECT_TRUE(other->try_get("large") == large);
  EXPECT_EQ(error_of([&] { store_->set("k", std::string(Store::kMaxValueBytes, 'x')); }).code(),
            ErrorCode::out_of_range);
}

TEST_P(C10dStore, ClaimsAreExclusiveUntilTheyAreDestroyed) {
  const auto other = open();
  Store::Claimed first = store_->claim("member/a", "one");
  ASSERT_NE(first.claim, nullptr);
  for (const auto& store : {store_, other}) {
    const Store::Claimed refused = store->claim("member/a", "one");
    EXPECT_EQ(refused.claim, nullptr);
    EXPECT_EQ(refused.holder, "one");
  }
  auto both = std::async(std::launch::async, [&] { return other->claims("member/", 2, 30s); });
  const auto leader = other->claim("leader", "x");
  const auto second = other->claim("member/b", "");
  EXPECT_EQ(both.get(), (Claims{{"member/a", "one"}, {"member/b", ""}}));
  EXPECT_EQ(store_->try_get("member/a"), std::nullopt) << "a claim is no value";
  first.claim.reset();
  EXPECT_EQ(store_->claims("member/", 2, 50ms), (Claims{{"member/b", ""}}));
  EXPECT_NE(other->claim("member/a", "again").claim, nullptr);
  EXPECT_EQ(other->claims("", 1, 0ms), (Claims{{"leader", "x"}}));
}

// Any process that reaches the store can write into it.
TEST_P(C10dStore, AValueThatIsNotOursIsRefused) {
  const bool sealed = key_ != nullptr;
  store_->set("k", "value");
  store_->set("other", "value");
  const auto kept = server_->get("k");
  EXPECT_EQ(std::string(kept.begin(), kept.end()).find("value") == std::string::npos, sealed);
  const auto refused = [&](const std::vector<std::uint8_t>& bytes, ErrorCode code) {
    server_->set("k", bytes);
    static_cast<void>(server_->check({"k"}));  // it has a reply
    const auto error = error_of([&] { (void)store_->try_get("k"); });
    EXPECT_TRUE(has_text(error, code, "value of key \"k\" in c10d store at 127.0.0.1:"));
  };
  refused(raw("x"), ErrorCode::protocol);
  refused(raw(""), ErrorCode::protocol);
  refused(raw("s"), ErrorCode::unauthenticated);
  refused(raw("s" + std::string(100, 'x')), ErrorCode::unauthenticated);
  if (!sealed) return;
  refused(raw("pvalue"), ErrorCode::unauthenticated);
  refused(server_->get("other"), ErrorCode::unauthenticated);  // of another key
  for (std::size_t at = 1; at < kept.size(); ++at) {
    auto changed = kept;
    changed[at] ^= 1;
    refused(changed, ErrorCode::unauthenticated);
  }
  const auto wrong =
      make_c10d_store("127.0.0.1", server_->getPort(), SecretKey::from_random("another"), 5s);
  EXPECT_EQ(error_of([&] { (void)wrong->try_get("other"); }).code(), ErrorCode::unauthenticated);
  server_->set("k", kept);
  static_cast<void>(server_->check({"k"}));
  EXPECT_EQ(store_->try_get("k"), "value");
}

TEST_P(C10dStore, AFloodOfClaimsIsRefused) {
  const auto mine = store_->claim("member/a", "one");
  server_->add("claims:member/#", 1'000'000'000);
  EXPECT_EQ(error_of([&] { (void)store_->claims("member/", 1, 1s); }).code(), ErrorCode::protocol);
}

INSTANTIATE_TEST_SUITE_P(Each, C10dStore, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "sealed" : "plain"; });

TEST(C10dStores, ThatAreNotThereAreNamed) {
  const std::uint16_t port = serve()->getPort();
  EXPECT_TRUE(has_text(
      error_of([&] { (void)make_c10d_store("127.0.0.1", port, nullptr, 300ms); }),
      ErrorCode::disconnected,
      "c10d store at 127.0.0.1:" + std::to_string(port) + " cannot be reached within 300 ms: "));
}

}  // namespace
}  // namespace c10d_store_test
