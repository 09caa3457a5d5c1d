#pragma once

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

// One life of a worker.
struct MembershipSimulation::Node {
  std::size_t index;
  MembershipProtocol protocol;
  bool member;
  bool running = true;
  bool stopped = false;
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
  struct End {
    std::deque<Frame> incoming{};
    Time last_delivery{};
    Time heard{};
    bool sent = false;
    bool lost = false;  // it knows
  };
  std::map<std::size_t, End> ends{};  // by the node there
};

}  // namespace stitch::rpc::testing
