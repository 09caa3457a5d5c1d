# Deliberate mistakes in graceful shutdown, for shutdown_mutation_test.cc, which turns them on one at a time.
include("${PROJECT_SOURCE_DIR}/tests/support/mutate.cmake")

stitch_mutated_copy(rpc/agent/shutdown_protocol.cc tests/rpc/shutdown_mutations.h mutated_shutdown
  [[  if (ready_sent_.contains(from)) return false;]]
  [[  if (ready_sent_.contains(from) && !broken(Mutation::refuses_former_leaders)) return false;]]

  [[  chosen_at_ = view.losses;]]
  [[  chosen_at_ = broken(Mutation::takes_an_old_view_for_a_new_one) ? losses_ : view.losses;]]

  [[      if (!answered_ && losses_ != chosen_at_) {]]
  [[      if (!answered_ && losses_ != chosen_at_ &&
          !broken(Mutation::does_not_look_for_another_leader)) {]]

  [[    repeat_at_ = now + kRepeatInterval;
  }]]
  [[    repeat_at_ = now + kRepeatInterval;
    if (broken(Mutation::does_not_repeat_ready)) repeat_at_ = Time::max();
  }]]

  [[  if (losses_ != chosen_at_) {
    next_ = now;]]
  [[  if (losses_ != chosen_at_ && !broken(Mutation::does_not_look_for_another_leader)) {
    next_ = now;]]

  [[                        std::inserter(others_, others_.begin()));]]
  [[                        std::inserter(others_, others_.begin()));
  if (broken(Mutation::waits_for_the_lost)) others_ = led_;]]

  [[[this](WorkerId id) { return ready_.contains(id); }]]
  [[[this](WorkerId id) {
              return ready_.contains(id) || broken(Mutation::does_not_wait_for_ready);
            }]]

  [[{ effects.reach.push_back(id); })) {]]
  [[{
              if (!broken(Mutation::does_not_reach_the_silent)) effects.reach.push_back(id);
            })) {]]

  [[    if (now >= deadline_) {
      return end(busy_.empty()]]
  [[    if (now >= deadline_ && !broken(Mutation::never_gives_up)) {
      return end(busy_.empty()]]

  [[(WorkerId id) { effects.sends.push_back({id, {Step::poll, round_}}); };]]
  [[(WorkerId id) {
      if (!broken(Mutation::does_not_repeat_poll))
        effects.sends.push_back({id, {Step::poll, round_}});
    };]]

  [[    const auto answered = [this](WorkerId id) { return statuses_.contains(id); };]]
  [[    const auto answered = [this](WorkerId id) {
      return statuses_.contains(id) ||
             (broken(Mutation::ends_a_round_at_the_first_answer) && !statuses_.empty());
    };]]

  [[(WorkerId id) { effects.sends.push_back({id, {Step::go}}); };]]
  [[(WorkerId id) {
      if (!broken(Mutation::does_not_repeat_go)) effects.sends.push_back({id, {Step::go}});
    };]]

  [[    if (all(now, kForGone, gone, go) ||]]
  [[    if (broken(Mutation::closes_before_the_others) || all(now, kForGone, gone, go) ||]]

  [[  statuses_.clear();]]
  [[  if (!broken(Mutation::keeps_the_answers_of_the_last_round)) statuses_.clear();]]

  [[  statuses.insert_or_assign(self_.id, own);]]
  [[  if (!broken(Mutation::leaves_itself_out)) statuses.insert_or_assign(self_.id, own);]]

  [[    if (status.busy != 0) busy_]]
  [[    if (status.busy != 0 && !broken(Mutation::ignores_who_is_busy)) busy_]]

  [[  const bool balanced = sum.sent == sum.received || lost;]]
  [[  const bool balanced = sum.sent == sum.received ||
                        (lost && !broken(Mutation::compares_sums_after_losses)) ||
                        broken(Mutation::does_not_compare_sums);]]

  [[ && statuses == previous_) {]]
  [[ && (statuses == previous_ || broken(Mutation::is_content_with_one_round))) {]]

  [[  for (const auto id : missing) names.]]
  [[  for (const auto id : broken(Mutation::names_all) ? led_ : missing) names.]])
