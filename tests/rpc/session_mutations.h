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
  acknowledges_the_next,    // before it has come
  leaves_a_gap,             // where a message was withdrawn
  reports_too_early,        // that a message was withdrawn, though another connection has it
  reports_what_may_arrive,  // as refused, though another connection has it
  fails_what_may_arrive,    // at the end of the session, though a connection holds it
  says_the_old_time,        // in a request that is sent again
  last = says_the_old_time,
};

// Whether this mutation is turned on.
[[nodiscard]] bool broken(Mutation mutation);

}  // namespace stitch::rpc
