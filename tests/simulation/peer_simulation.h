#pragma once

#include <cstdint>

#include "tests/simulation/kernel.h"

namespace stitch::rpc::peer_simulation {

// PeerTables of two or three workers with up to three addresses each, over a SimulatedNetwork. They
// send each other messages while connections break at one side or at both, addresses refuse,
// workers stop, die, vanish, leave and come back as other lives, pairs are cut off from each other,
// and strangers connect under a worker's name. Checked as it goes: a message arrives at most once,
// at the life that it was sent to, in the order of its stream, and not when its sender was told
// that it failed; a broken connection is replaced or the peer is lost within the grace time; a peer
// is not lost for less, or where nothing has happened; attempts have pauses; no more connections
// are open than the protocol needs. At the end, when nothing fails any more: each pair has one
// connection, bound at both sides with one generation, or is lost to both; every message has
// arrived, or its sender knows that it never will.
//
// `mild`: what happens is over soon enough that no peer may be lost.
[[nodiscard]] simulation::Outcome run(std::uint64_t number, bool mild);

}  // namespace stitch::rpc::peer_simulation
