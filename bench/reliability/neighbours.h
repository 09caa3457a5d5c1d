#pragma once

#include <cstddef>

namespace stitch_reliability {

struct NeighbourSettings {
  std::size_t connections = 5000;  // half-open ones
  double seconds = 10;             // of each measure
};

// Measures the calls between two workers over TCP: alone; and while one of them has half-open
// connections, which send nothing and are opened again when it closes them, and a peer that reads
// nothing of what it is sent. Prints the table and returns the exit status: 0 if all calls were
// answered.
[[nodiscard]] int measure_neighbours(const NeighbourSettings& settings);

}  // namespace stitch_reliability
