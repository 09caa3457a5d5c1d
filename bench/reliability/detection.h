#pragma once

#include <string>
#include <vector>

namespace stitch_reliability {

struct DetectionSettings {
  int trials = 100;
  std::vector<std::string> kinds;       // of "kill", "stop", "partition"
  std::vector<std::string> namespaces;  // of the network: one for workers 0 and 1, one for worker 2
  // Commands that cut and restore the network between the two; without them STITCH_FAULT does.
  std::string cut;
  std::string restore;
};

// Measures how long after a worker is gone its peers know, and prints the table. Returns the exit
// status. Throws std::invalid_argument for a kind that is unknown.
[[nodiscard]] int measure_detection(const DetectionSettings& settings);

}  // namespace stitch_reliability
