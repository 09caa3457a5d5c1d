#pragma once

namespace stitch::rref {

// The deliberate errors that mutations.cmake builds into the lifetime protocol.
enum class Mutation {
  none,
  settles_with_the_registration,    // its creditors, instead of at its acknowledgement
  settles_borrows_at_once,          // when they arrive
  settles_before_the_registration,  // the tokens of the owner
  pins_keep_no_hold,
  pins_keep_no_entry,
  creators_do_not_wait,   // for the answer, when they drop their last reference
  creators_hold_nothing,  // in the owner's table
  forgets_what_is_kept,   // settles a borrow that outlives its message before its registration
  takes_in_repetitions,   // of ledger operations
  takes_in_what_is_early,
  takes_back_sent_drops,
  last = takes_back_sent_drops,
};

// Whether this mutation is turned on.
[[nodiscard]] bool broken(Mutation mutation);

}  // namespace stitch::rref
