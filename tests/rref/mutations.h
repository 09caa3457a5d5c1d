#pragma once

namespace stitch::rref {

// The deliberate mistakes that mutations.cmake builds into the lifetime protocol.
enum class Mutation {
  none,
  settles_with_the_registration,    // its creditors, instead of at its acknowledgement
  settles_borrows_at_once,          // when they arrive
  settles_before_the_registration,  // what the owner lent
  pins_keep_no_hold,
  pins_keep_no_entry,
  creators_do_not_wait,   // for the answer, when they let go
  creators_hold_nothing,  // as far as the owner knows
  forgets_what_is_kept,   // settles what outlives its message before it is registered
  takes_in_repetitions,   // of ledger operations
  takes_in_what_is_early,
  takes_back_sent_drops,
  last = takes_back_sent_drops,
};

// Whether this is the one that is turned on.
[[nodiscard]] bool broken(Mutation mutation);

}  // namespace stitch::rref
