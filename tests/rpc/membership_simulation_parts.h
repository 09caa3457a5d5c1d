#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "tests/rpc/membership_simulation.h"

namespace stitch::rpc::testing {

inline constexpr std::chrono::milliseconds kFaults{12'000};  // faults begin within this time

// One life of a worker.
struct MembershipSimulation::Node {
  std::size_t index;
  MembershipProtocol protocol;
  bool member;
  bool running = true;
  bool stopped = false;
  bool frozen = false;  // stopped, and never to go on
  bool doomed = false;  // will be killed or frozen early
  bool leaving = false;
  bool refused = false;
  std::uint64_t tickets = 0;
  std::set<std::pair<std::uint32_t, std::uint64_t>> joined{};  // lives, as this one was told
  std::set<std::pair<std::uint32_t, std::uint64_t>> over{};
  std::vector<std::function<void()>> postponed{};  // until it runs again

  [[nodiscard]] const WorkerInfo& info() const { return protocol.self(); }
  [[nodiscard]] bool takes_part() const { return running && member && !protocol.fenced(); }
};

struct MembershipSimulation::Link {
  enum class State { none, bound, ended } state = State::none;
  Time tried_since{};   // while there is none yet
  bool wanted = false;  // something waits for it
  struct End {
    std::deque<Frame> incoming{};
    Time last_delivery{};
    Time heard{};
    bool sent = false;
    bool lost = false;    // it knows
    bool trying = false;  // it waits for the connection to be made
  };
  std::map<std::size_t, End> ends{};  // by the node there
};

}  // namespace stitch::rpc::testing
