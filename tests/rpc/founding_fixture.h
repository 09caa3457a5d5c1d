#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/rpc/world/founding.h"
#include "stitch/transport/store/hash_store.h"
#include "tests/support/error_of.h"

namespace stitch::testing {

// A store that counts its requests, and the bytes of values that it returns.
class CountingStore final : public transport::Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    ++requests;
    store_->set(key, value);
  }
  std::string get(const std::string& key, Timeout timeout) override {
    ++requests;
    std::string value = store_->get(key, timeout);
    bytes += value.size();
    return value;
  }
  std::optional<std::string> try_get(const std::string& key) override {
    ++requests;
    auto value = store_->try_get(key);
    if (value) bytes += value->size();
    return value;
  }
  bool erase(const std::string& key) override {
    ++requests;
    return store_->erase(key);
  }
  Claimed claim(const std::string& key, const std::string& value) override {
    ++requests;
    return store_->claim(key, value);
  }
  std::map<std::string, std::string> claims(const std::string& prefix, std::size_t count,
                                            Timeout timeout) override {
    ++requests;
    return store_->claims(prefix, count, timeout);
  }
  std::string describe() const override { return store_->describe(); }

  std::atomic<std::size_t> requests{0};
  std::atomic<std::size_t> bytes{0};

 private:
  const std::shared_ptr<transport::Store> store_ = transport::make_hash_store();
};

// Workers that found worlds, as far as the store goes.
class Founding : public ::testing::Test {
 protected:
  using Place = rpc::Founding::Place;

  // Later ones have greater tokens.
  rpc::MemberClaim claim_of(const Options& options) {
    rpc::MemberClaim claim;
    const std::string number = std::to_string(next_++);
    claim.record.token = std::string(6 - number.size(), '0') + number;
    claim.record.name = options.name;
    claim.record.rank = options.rank;
    claim.record.size = options.world_size;
    claim.record.process = "process " + number;
    claim.addresses = {"here:" + number};
    return claim;
  }
  // What is in the store of a worker until this ends.
  std::unique_ptr<transport::Store::Claim> claim(const Options& options) {
    const auto claim = claim_of(options);
    auto claimed = store->claim(rpc::world_key::kMember + claim.record.token, claim.encode());
    EXPECT_TRUE(claimed.claim);
    return std::move(claimed.claim);
  }
  Place found(const Options& options, std::chrono::milliseconds limit = std::chrono::seconds(20)) {
    const bool elastic = options.world_size.is_elastic();
    const rpc::Founding::Leading leading{.leads = !elastic && options.rank == 0, .stands = elastic};
    rpc::Founding founding(options, *store, leading, std::chrono::steady_clock::now() + limit);
    return founding.find_place(claim_of(options));
  }
  // All of them at once.
  std::vector<Place> found_together(const std::vector<Options>& workers) {
    std::vector<Place> places(workers.size());
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < workers.size(); ++i) {
      threads.emplace_back([&, i] {
        const auto error = base::failure_of([&] { places[i] = found(workers[i]); });
        if (error) ADD_FAILURE() << "worker \"" << workers[i].name << "\": " << error->what();
      });
    }
    threads.clear();
    return places;
  }
  // The same; how each of them fails.
  std::vector<Error> fail_together(const std::vector<Options>& workers) {
    std::vector<Error> errors(workers.size());
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < workers.size(); ++i) {
      threads.emplace_back(
          [&, i] { errors[i] = error_of([&] { static_cast<void>(found(workers[i])); }); });
    }
    threads.clear();
    return errors;
  }
  static void expect_one_world(const std::vector<Place>& places) {
    for (const auto& place : places) {
      EXPECT_EQ(place.world.lives.size(), places.size());
      EXPECT_EQ(place.world.encode(), places[0].world.encode());
    }
  }

  const std::shared_ptr<CountingStore> store = std::make_shared<CountingStore>();
  const Options a{.name = "a", .rank = 0, .world_size = 2};
  const Options b{.name = "b", .rank = 1, .world_size = 2};

 private:
  std::atomic<int> next_{1};
};

}  // namespace stitch::testing
