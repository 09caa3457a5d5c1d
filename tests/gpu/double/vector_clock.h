#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace stitch::transport::gpu::test {

// The `count`-th action on a timeline: one timeline for each stream and each host thread.
struct Epoch {
  std::size_t timeline = 0;
  std::uint64_t count = 0;
};

// What is known to have happened on each timeline (Mattern, Fidge 1988).
class VectorClock {
 public:
  [[nodiscard]] bool covers(const Epoch& epoch) const {
    return epoch.timeline < counts_.size() && counts_[epoch.timeline] >= epoch.count;
  }
  void advance(const Epoch& epoch) {
    if (counts_.size() <= epoch.timeline) counts_.resize(epoch.timeline + 1);
    counts_[epoch.timeline] = std::max(counts_[epoch.timeline], epoch.count);
  }
  void join(const VectorClock& other) {
    if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
    for (std::size_t i = 0; i < other.counts_.size(); ++i) {
      counts_[i] = std::max(counts_[i], other.counts_[i]);
    }
  }

 private:
  std::vector<std::uint64_t> counts_;
};

}  // namespace stitch::transport::gpu::test
