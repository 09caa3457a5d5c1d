#pragma once

#include <cstdint>

#include "tests/simulation/kernel.h"

namespace stitch::rpc::shutdown_simulation {

// Whether an assumption about workers (rpc/PROTOCOL.md, L2) does not hold: a check must fail.
enum class Wrong : std::uint8_t { nothing, counts_received_first };

// 2 to 5 workers that shut down: real ShutdownProtocol objects, each
// driven as GracefulShutdown does it, over simulated connections and a simulated clock. Programs
// make calls and notifications until they call shutdown, handlers make more, messages of a
// connection keep their order or, being large, do not, and take from 10 us to 150 ms. Workers call
// shutdown at different times or never, with long, short and no limits of waiting; they die, pairs
// of them lose each other, messages of the shutdown cannot be sent, handlers hang. Some of those
// that died come back, the one with the lowest id more often than others: as a new life that begins
// when all members know it, each at its own time. Checked:
//
//   1. GO is said only when no message of the application is on its way between those that are told
//      and none is being handled there. Where a loss is known, the sums are not compared, and what
//      crossed the beginning of the last round, or came from a worker outside, is excepted;
//   2. where nothing was lost, a worker that ends without an error leaves no such message anywhere;
//   3. every worker ends by its limits: of waiting, and of the end once all have called shutdown;
//   4. where all that live call shutdown and no handler hangs, all end without an error, and soon
//      after the last of them has called it;
//   5. errors name whom was waited for: no worker that is lost, none that had called shutdown, all
//      that had not, all whose handlers hang;
//   6. a leader closes after all that it told to;
//   7. no message is refused;
//   8. no GO is said while a worker lives that its leader knows, and that has not called shutdown.
[[nodiscard]] simulation::Outcome run(std::uint64_t number, Wrong wrong = Wrong::nothing);

}  // namespace stitch::rpc::shutdown_simulation
