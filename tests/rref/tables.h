// The debug_info() of a cluster's reference tables.
#pragma once

#include <cstdint>
#include <string>

#include "tests/support/cluster.h"

namespace stitch::testing {

inline std::int64_t number(Cluster& cluster, int rank, const char* name) {
  return cluster[rank].debug_info().at(std::string("rref.") + name);
}

inline bool tables_empty(Cluster& cluster) {
  for (int rank = 0; rank < cluster.size(); ++rank) {
    if (number(cluster, rank, "entries") != 0 || number(cluster, rank, "holds") != 0 ||
        number(cluster, rank, "pins") != 0)
      return false;
  }
  return true;
}

// The numbers that are not zero, one line per worker.
inline std::string tables(Cluster& cluster) {
  std::string text;
  for (int rank = 0; rank < cluster.size(); ++rank) {
    text += "worker" + std::to_string(rank) + ":";
    for (const auto& [name, value] : cluster[rank].debug_info()) {
      if (name.starts_with("rref.") && value != 0)
        text += " " + name.substr(5) + "=" + std::to_string(value);
    }
    text += "\n";
  }
  return text;
}

}  // namespace stitch::testing
