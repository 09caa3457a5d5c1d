#include "tests/support/cluster.h"

#include <gtest/gtest.h>

#include <exception>
#include <optional>
#include <thread>

#include "stitch/transport/store/hash_store.h"

namespace stitch::testing {

void Cluster::start(int size, const std::function<void(Options&)>& adjust) {
  const auto store = transport::make_hash_store();
  std::vector<std::optional<Worker>> started(static_cast<std::size_t>(size));
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Options options;
        options.rank = rank;
        options.world_size = size;
        options.store = store;
        options.num_threads = 2;
        if (adjust) adjust(options);
        started[static_cast<std::size_t>(rank)].emplace(init(std::move(options)));
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  threads.clear();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  for (auto& worker : started) workers_.push_back(std::move(*worker));
  scope_ = std::make_unique<WorkerScope>(workers_.front());
}

Cluster::Cluster(int size, const Options& all) {
  start(size, [&all](Options& options) {
    Options own = all;
    own.rank = options.rank;
    own.store = options.store;
    if (!own.world_size.is_set()) own.world_size = options.world_size;
    if (own.num_threads == 0) own.num_threads = options.num_threads;
    options = std::move(own);
  });
}

Cluster::~Cluster() {
  for (const auto& error : shutdown()) ADD_FAILURE() << "cluster did not end gracefully: " << error;
}

std::vector<std::string> Cluster::shutdown() {
  scope_.reset();
  std::vector<std::string> errors(workers_.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          workers_[i].shutdown();
        } catch (const std::exception& error) {
          errors[i] = error.what();
        }
      });
    }
  }
  workers_.clear();
  std::erase(errors, std::string());
  return errors;
}

}  // namespace stitch::testing
