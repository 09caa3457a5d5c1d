#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace stitch::rpc::test {

// Two Sessions over connections that break, one history from one seed: messages small and large are
// sent, passed on, delivered and acknowledged in any order that the transports allow; connections
// end anywhere, are noticed by the two sides at different times, and are replaced as PROTOCOL.md,
// section 6 says. Checked after each step: nothing is delivered twice, or out of order where small
// messages keep theirs; each SendDone runs once, and not with success for what never left; a
// request that is sent again says whether its call is over. At the end, over a last connection:
// everything has been delivered, or its sender knows that it never will be, and nothing is kept.
// Not thread-safe.
class SessionSimulation {
 public:
  explicit SessionSimulation(std::uint64_t seed);
  ~SessionSimulation();
  SessionSimulation(const SessionSimulation&) = delete;
  SessionSimulation& operator=(const SessionSimulation&) = delete;

  // The first rule that was broken; empty if none was.
  [[nodiscard]] std::string run();
  struct Counts {
    std::uint64_t delivered = 0;
    std::uint64_t reconnects = 0;
    std::uint64_t resent = 0;
    std::uint64_t duplicates = 0;
  };
  [[nodiscard]] Counts counts() const;

 private:
  class World;
  const std::unique_ptr<World> world_;
};

}  // namespace stitch::rpc::test
