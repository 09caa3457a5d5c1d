#pragma once

namespace stitch::dist_autograd {

// The deliberate mistakes that mutations.cmake builds into the protocol of a pass.
enum class Mutation {
  none,
  acknowledges_every_mark,     // immediately, so that no worker has a parent
  ignores_its_own_deficit,     // when it answers its parent
  answers_before_it_is_quiet,  // its parent, while gradients flow
  forgets_participants,        // named in ACKs
  forgets_participants_of_the_marking,
  kills_what_has_not_come,  // marked or not
  kills_before_marking_has_ended,
  does_not_wait_for_writes,    // before DONE
  does_not_wait_for_done,      // at the root
  does_not_close_the_marking,  // on workers other than the root
  does_not_send_quiet,
  needs_no_marks,  // when QUIET comes, though SendNodes wait
  marks_nothing_when_quiet,
  does_not_take_done_as_an_answer,        // to QUIET
  does_not_count_gradients,               // in the deficit
  takes_gradients_as_processed,           // when they arrive, instead of when the strand has run
  answers_with_gradients_unacknowledged,  // its parent, while others owe it an ACK
  answers_with_gradients_before_it_is_quiet,
  acknowledges_gradients_that_answer,
  forgets_acks_that_ride,    // on GRADIENTS
  forgets_what_others_miss,  // of their gradients, so that all seems settled
  tells_twice_what_it_misses,
  forgets_what_it_owes_its_parent,  // besides the answer
  reports_no_unused_links,          // fast
  leaves_partial_sums_readable,     // fast: where links were unused, until the root tells
  aborts_without_telling_marked_peers,
  aborts_without_telling_participants,
  aborts_without_telling_the_root,
  ignores_the_loss_of_participants,
  does_not_look_for_early_losses,
  delivers_after_the_end,
  goes_on_after_a_failure,
  closes_the_marking_before_it_began,  // at the root; or ends the gradients
  fails_for_any_loss,                  // also of workers that take no part
  ignores_the_loss_of_peers,
  ignores_the_loss_of_the_root,
  last = ignores_the_loss_of_the_root,
};

// Whether this is the one that is turned on.
[[nodiscard]] bool broken(Mutation mutation);

}  // namespace stitch::dist_autograd
