#pragma once

#include <string>

#include "traffic.h"

namespace stitch_reliability {

// The exit statuses of a worker process of a chaos run.
inline constexpr int kFinished = 0;
inline constexpr int kLeft = 64;       // to come back in another life
inline constexpr int kNotJoined = 65;  // init() failed

struct WorkerSettings {
  int rank = 0;
  int workers = 0;
  int life = 0;
  int threads = 2;    // that make calls
  std::string store;  // the file where workers meet
  std::string fault;  // Options::fault
  TrafficSettings traffic;
};

// One life of a worker: joins, makes and serves operations until the run is over or this life is of
// no use any more, notes in the book what it leaves behind, and returns the exit status.
[[nodiscard]] int live(const WorkerSettings& settings);

}  // namespace stitch_reliability
