#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/base/event_loop.h"
#include "stitch/rpc/world/rendezvous.h"
#include "stitch/transport/store/file_store.h"
#include "stitch/transport/store/hash_store.h"
#include "stitch/transport/store/tcp_store.h"
#include "tests/support/temporary_folder.h"

namespace stitch::testing {

inline rpc::MemberRecord record_of(const Options& options) {
  rpc::MemberRecord record;
  record.name = options.name;
  record.rank = options.rank;
  record.world_size = options.world_size.max();
  record.founders = options.world_size.min();
  return record;
}

// Workers that found worlds in a store of each kind, as far as the store goes.
class Founding : public ::testing::TestWithParam<std::string> {
 protected:
  Founding() {
    if (GetParam() == "tcp") {
      transport::TcpStoreOptions options;
      server_ = std::make_unique<transport::TcpStoreServer>(*loop_, options);
      options.port = server_->port();
      store_ = transport::make_tcp_store(*loop_, options);
    } else {
      store_ = GetParam() == "file" ? transport::make_file_store(folder_.path() / "store")
                                    : transport::make_hash_store();
    }
  }
  ~Founding() override {
    store_ = nullptr;
    server_ = nullptr;
    loop_->close();
  }

  transport::Store& store() { return *store_; }
  [[nodiscard]] rpc::Rendezvous make_rendezvous(
      const Options& options,
      std::chrono::milliseconds silent_time = rpc::Rendezvous::kSilentTime) {
    return rpc::Rendezvous(options, *store_, false,
                           std::chrono::steady_clock::now() + std::chrono::seconds(20),
                           silent_time);
  }
  // What one founder does, until a world is founded; returns the record of that.
  rpc::WorldRecord found(const Options& options,
                         std::chrono::milliseconds silent_time = rpc::Rendezvous::kSilentTime) {
    rpc::Rendezvous founding = make_rendezvous(options, silent_time);
    for (;;) {
      if (!founding.meet(record_of(options), [] { return false; })) continue;
      const auto self = founding.self();
      rpc::WorldRecord record;
      record.number = founding.world_number();
      record.size = options.world_size;
      rpc::MemberRecord own = record_of(options);
      own.name = self.name;
      auto cards = founding.exchange({self, {"here:" + self.name}, own.encode()});
      if (!cards) continue;
      for (auto& card : *cards) record.entries.push_back({std::move(card), true});
      if (founding.finish(record)) return record;
    }
  }
  // All of them at once.
  std::vector<rpc::WorldRecord> found_together(
      const std::vector<Options>& workers,
      std::chrono::milliseconds silent_time = rpc::Rendezvous::kSilentTime) {
    std::vector<rpc::WorldRecord> records(workers.size());
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < workers.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          records[i] = found(workers[i], silent_time);
        } catch (const Error& error) {
          ADD_FAILURE() << "worker \"" << workers[i].name << "\": " << error.what();
        }
      });
    }
    threads.clear();
    return records;
  }

 private:
  const TemporaryFolder folder_;
  std::unique_ptr<base::EventLoop> loop_ = std::make_unique<base::EventLoop>("test-loop");
  std::unique_ptr<transport::TcpStoreServer> server_;
  std::shared_ptr<transport::Store> store_;
};

}  // namespace stitch::testing
