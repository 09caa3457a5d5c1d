#pragma once

namespace stitch::rpc {

// The deliberate errors that session_mutations.cmake builds into the Session.
enum class Mutation {
  none,
  takes_in_repetitions,
  does_not_send_again,   // what the old connection had got
  forgets_one_too_many,  // of what the peer has received
  forgets_one_too_few,
  lets_others_overtake,  // what is being sent again
  fails_what_is_kept,    // when its connection ends
  tells_twice,
  acknowledges_the_next,  // before it has come
  leaves_a_gap,           // where a message was withdrawn
  last = leaves_a_gap,
};

// Whether this mutation is turned on.
[[nodiscard]] bool broken(Mutation mutation);

}  // namespace stitch::rpc
