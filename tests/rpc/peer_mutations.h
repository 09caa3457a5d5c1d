#pragma once

namespace stitch::rpc {

// The deliberate mistakes that peer_mutations.cmake builds into Peer, each against a rule of
// PROTOCOL.md, section 6.
enum class Mutation {
  none,
  uses_two_connections,          // rule 2: does not wait for the end of the former one
  keeps_the_former,              // rule 2: does not close what ACCEPT has shown to be of no use
  forgets_the_next,              // rule 2: that was to be used once the former one had ended
  takes_any_token,               // rule 4
  forgets_the_token,             // rule 4: that the other side has chosen
  counts_no_generations,         // rule 4
  both_decide,                   // rule 5: the worker with the lower id answers while it connects
  neither_decides,               // rule 5: neither answers while it connects
  connects_while_it_offers,      // rule 5
  forgets_the_spare,             // rule 5
  waits_for_ever_for_an_answer,  // rule 5: to its OFFER
  waits_for_ever_to_connect,     // rule 5
  tries_one_address,             // rule 7
  makes_no_pause,                // rule 7
  never_gives_up,                // the grace time
  gives_up_at_once,              // the same
  takes_one_address_for_all,     // no process listens at one, others are not asked
  keeps_what_it_does_not_use,    // connections that another one has outrun
  keeps_a_former_life,           // when a worker has come back
  keeps_the_lost,                // the connection of a peer that is lost
  ignores_that_it_is_lost,       // GONE
  names_no_address,
  last = names_no_address,
};

// Whether this mutation is turned on.
[[nodiscard]] bool broken(Mutation mutation);

}  // namespace stitch::rpc
