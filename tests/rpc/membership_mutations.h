#pragma once

namespace stitch::rpc {

// The deliberate mistakes that membership_mutations.cmake builds into the protocol.
enum class Mutation {
  none,
  any_worker_decides,
  decides_without_a_probe,
  obeys_the_dead,
  goes_on_when_declared_dead,
  welcomes_before_all_know,
  declares_twice,
  takes_a_leaver_for_dead,
  admits_a_second_of_a_name,
  sends_no_lists,
  asks_only_once,
  forgets_to_end_a_former_life,
  keeps_whom_it_cannot_reach,
  blames_others_for_its_pause,
  blames_others_for_its_losses,
  two_judge_each_other,
  judges_when_another_has_come,
  keeps_quiet_of_the_past,
  asks_the_absent,
  gives_up_for_an_absent_judge,
  judges_while_it_leaves,
  watches_no_judge,
  judge_waits_to_be_called,
  takes_absence_for_death,
  stays_absent,
  asks_a_judge_without_a_connection,
  believes_one_probe,
  asks_no_witness,
  last = asks_no_witness,
};

// Whether this mutation is turned on.
[[nodiscard]] bool broken(Mutation mutation);

}  // namespace stitch::rpc
