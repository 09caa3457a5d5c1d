# Deliberate mistakes in graceful shutdown.

stitch_mutated_copy(shutdown rpc/agent/shutdown_protocol.cc
  [[  if (ready_sent_.contains(from.id)) return;]]
    [[  if (ready_sent_.contains(from.id) && !(mistake("refuses_former_leaders") && leader_ != from.id)) return;]]
  [[  if (is_over(from)) return effects;]] [[  if (is_over(from) && !mistake("hears_former_lives")) return effects;]]
  [[      check_leads(from, "go");]]
    [[@ if (mistake("ignores_the_go_of_former_leaders") && leader_ != from.id) return effects;]]
  [[  ++changes_;
  if (phase_ == Phase::closing || phase_ == Phase::ended || answered_) return;]] [[  if (mistake("does_not_notice_joins")) return;
@]]
  [[  if (polled_) all_are_ready(now);]] [[  if (polled_ || mistake("counts_the_wait_to_the_end")) all_are_ready(now);]]
  [[      all_are_ready(now);
      begin_round]] [[      if (!mistake("gives_the_end_no_limit")) all_are_ready(now);
      begin_round]]
  [[  others_.erase(peer.id);]] [[  if (!mistake("waits_for_the_lost")) others_.erase(peer.id);]]
  [[  chosen_at_ = view.changes;]] [[  chosen_at_ = mistake("takes_an_old_view_for_a_new_one") ? changes_ : view.changes;]]
  [[      if (!answered_ && changes_ != chosen_at_) {]]
    [[      if (!answered_ && changes_ != chosen_at_ && !mistake("does_not_look_for_another_leader")) {]]
  [[    repeat_at_ = now + kRepeatInterval;]] [[@ if (mistake("does_not_repeat_ready")) repeat_at_ = Time::max();]]
  [[  if (changes_ != chosen_at_) {]] [[  if (changes_ != chosen_at_ && !mistake("does_not_look_for_another_leader")) {]]
  [[{ return !view.live.contains(id); });]] [[{ return !view.live.contains(id) && !mistake("waits_for_the_lost"); });]]
  [[    if (*view.live.begin() < self_.id) return]]
    [[    if (*view.live.begin() < self_.id && !mistake("goes_on_leading")) return]]
  [[    others_ = view.live;]]
    [[    if (mistake("waits_for_the_lost")) {
      others_.insert(view.live.begin(), view.live.end());
    } else if (mistake("waits_for_no_newcomer") && !others_.empty()) {
      std::erase_if(others_, [&](WorkerId id) { return !view.live.contains(id); });
    } else {
  @
    }]]
  [[    if (phase_ != Phase::gathering &&]] [[    if (!mistake("polls_newcomers_at_once") && phase_ != Phase::gathering &&]]
  [[[this](WorkerId id) { return ready_.contains(id); }]]
    [[[this](WorkerId id) { return ready_.contains(id) || mistake("does_not_wait_for_ready"); }]]
  [[{ effects.reach.push_back(id); })) {]] [[{ if (!mistake("does_not_reach_the_silent")) effects.reach.push_back(id); })) {]]
  [[    if (now >= deadline()) {]] [[    if (now >= deadline() && !mistake("never_gives_up")) {]]
  [[(WorkerId id) { effects.sends.push_back({id, {Step::poll, round_}}); };]]
    [[(WorkerId id) { if (!mistake("does_not_repeat_poll")) effects.sends.push_back({id, {Step::poll, round_}}); };]]
  [[    const auto answered = [this](WorkerId id) { return statuses_.contains(id); };]]
    [[    const auto answered = [this](WorkerId id) {
      return statuses_.contains(id) ||
             (mistake("ends_a_round_at_the_first_answer") && !statuses_.empty());
    };]]
  [[(WorkerId id) { effects.sends.push_back({id, {Step::go}}); };]]
    [[(WorkerId id) { if (!mistake("does_not_repeat_go")) effects.sends.push_back({id, {Step::go}}); };]]
  [[    if (all(now, kForGone, gone, go) ||]] [[    if (mistake("closes_before_the_others") || all(now, kForGone, gone, go) ||]]
  [[  statuses_.clear();]] [[  if (!mistake("keeps_the_answers_of_the_last_round")) statuses_.clear();]]
  [[  statuses.insert_or_assign(self_.id, own);]]
    [[  if (!mistake("leaves_itself_out")) statuses.insert_or_assign(self_.id, own);]]
  [[    if (status.busy != 0) busy_]] [[    if (status.busy != 0 && !mistake("ignores_who_is_busy")) busy_]]
  [[  const bool balanced = sum.sent == sum.received || lost;]]
    [[  const bool balanced = sum.sent == sum.received ||
                        (lost && !mistake("compares_sums_after_losses")) ||
                        mistake("does_not_compare_sums");]]
  [[ && statuses == previous_) {]] [[ && (statuses == previous_ || mistake("is_content_with_one_round"))) {]]
  [[  for (const auto id : missing) names.]] [[  for (const auto id : mistake("names_all") ? others_ : missing) names.]])
