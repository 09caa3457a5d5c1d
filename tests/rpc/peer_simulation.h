#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace stitch::rpc::test {

// PeerTables of two or three workers with up to three addresses each, over a SimulatedNetwork: one
// history from one seed. They send each other messages while connections break at one side or at
// both, addresses refuse, workers stop, die, vanish, leave and come back as other lives, pairs are
// cut off from each other, and strangers connect under a worker's name. Checked as it goes: a
// message arrives at most once, at the life that it was sent to, in the order of its stream, and
// not when its sender was told that it failed; a broken connection is replaced or the peer is lost
// within the grace time; a peer is not lost for less, or where nothing has happened; attempts have
// pauses; no more connections are open than the protocol needs. At the end, when nothing fails any
// more: each pair has one connection, bound at both sides with one generation, or is lost to both;
// every message has arrived, or its sender knows that it never will. Not thread-safe.
class PeerSimulation {
 public:
  // `mild`: what happens is over soon enough that no peer may be lost.
  PeerSimulation(std::uint64_t seed, bool mild);
  ~PeerSimulation();
  PeerSimulation(const PeerSimulation&) = delete;
  PeerSimulation& operator=(const PeerSimulation&) = delete;

  // The first rule that was broken; empty if none was.
  [[nodiscard]] std::string run();
  struct Counts {
    std::uint64_t attempts = 0;
    std::uint64_t delivered = 0;
    std::uint64_t failed = 0;
    std::uint64_t reconnects = 0;
    std::uint64_t resent = 0;
    std::uint64_t lost = 0;
    std::uint64_t lives = 0;
    std::uint64_t strangers = 0;
  };
  [[nodiscard]] const Counts& counts() const;

 private:
  class World;
  const std::unique_ptr<World> world_;
};

}  // namespace stitch::rpc::test
