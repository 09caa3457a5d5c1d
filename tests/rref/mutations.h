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
  // What is done when workers die.
  drops_the_dead_at_once,        // instead of once all others are clean
  is_clean_without_registering,  // what it borrowed from the dead
  is_clean_before_registering,
  drops_pins_towards_the_dead_at_once,
  sweeps_end_one_by_one,           // although several run
  ignores_deaths_during_sweeps,    // of workers that have been asked
  believes_that_unlent_is_swept,   // a death while no object was lent
  borrows_from_the_dead,           // from a message that is handled too late
  settles_what_it_lent_when_lost,  // when it cannot reach the owner
  asks_no_owner,                   // to sweep a worker that it has pins towards
  keeps_pins_towards_the_swept,
  keeps_pins_of_the_dead,  // in messages about the objects of the dead
  drops_the_next_life,     // when an earlier one is swept
  applies_ledgers_of_the_dead,
  hides_unsent_creations,      // from the owner
  refuses_late_registrations,  // of those that a sweep did not know
  refuses_unknown_creators,    // of whom it will hear
  ends_a_life_at_the_word_of_a_peer,
  never_answers_about_passed_lives,  // of whom it will not hear
  last = never_answers_about_passed_lives,
};

// Whether this mutation is turned on.
[[nodiscard]] bool broken(Mutation mutation);

}  // namespace stitch::rref
