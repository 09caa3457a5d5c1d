#pragma once

namespace stitch::rpc {

// The deliberate mistakes that shutdown_mutations.cmake builds into ShutdownProtocol.
enum class Mutation {
  none,
  is_content_with_one_round,
  ignores_who_is_busy,
  does_not_compare_sums,
  compares_sums_after_losses,
  keeps_the_answers_of_the_last_round,
  ends_a_round_at_the_first_answer,
  leaves_itself_out,
  does_not_wait_for_ready,
  waits_for_the_lost,
  does_not_look_for_another_leader,
  takes_an_old_view_for_a_new_one,
  does_not_repeat_ready,
  does_not_repeat_poll,
  does_not_repeat_go,
  does_not_reach_the_silent,
  closes_before_the_others,
  refuses_former_leaders,
  never_gives_up,
  names_all,
  hears_former_lives,
  ignores_the_go_of_former_leaders,
  does_not_notice_joins,
  goes_on_leading,
  waits_for_no_newcomer,
  polls_newcomers_at_once,
  last = polls_newcomers_at_once,
};

// Whether this mutation is turned on.
[[nodiscard]] bool broken(Mutation mutation);

}  // namespace stitch::rpc
