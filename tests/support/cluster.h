#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "stitch/rpc/worker.h"

namespace stitch::testing {

// A whole world in one process: n workers "worker0" to "worker<n-1>" that meet at a HashStore and
// are connected over loopback; each may be silent for 10 s, as on a busy machine. The destructor
// shuts all down gracefully, and fails the test when one could not. Worker 0 is current on the
// thread that made the cluster. Thread contract: one thread; the workers themselves are
// thread-safe.
class Cluster {
 public:
  // All workers have these options; rank and store are the cluster's.
  explicit Cluster(int size, const Options& all = {});
  // `adjust` may change the options of each worker before it starts.
  template <std::invocable<Options&> Adjust>
  Cluster(int size, Adjust adjust) {
    start(size, adjust);
  }
  ~Cluster();
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  [[nodiscard]] Worker& operator[](int rank) { return workers_.at(static_cast<std::size_t>(rank)); }
  [[nodiscard]] int size() const { return static_cast<int>(workers_.size()); }
  // Shuts all workers down gracefully; returns the texts of their errors.
  std::vector<std::string> shutdown();

 private:
  void start(int size, const std::function<void(Options&)>& adjust);

  std::vector<Worker> workers_;
  std::unique_ptr<WorkerScope> scope_;
};

}  // namespace stitch::testing
