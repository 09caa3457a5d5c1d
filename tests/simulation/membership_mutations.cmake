# Deliberate mistakes in the protocol of membership.

stitch_mutated_copy(membership rpc/membership/membership_protocol.cc
  [[    if (&other == but_for || (other.absent && !absent_too)) continue;]]
    [[    if (mistake("any_worker_decides")) break;
    if (&other == but_for || (other.absent && !absent_too && !mistake("asks_the_absent"))) continue;]]
  [[  if (entry.probing || !entry.suspected() || leaving_) return;]]
    [[  if (entry.probing || !entry.suspected() || (leaving_ && !mistake("judges_while_it_leaves"))) return;]]
  [[    entry.asked.reset();
    return begin_probe(entry, now, effects);]]
    [[    if (mistake("decides_without_a_probe")) return declare(entry, self_.info, "it is suspected", now, effects); @]]
  [[judge->unconnected) {]] [[judge->unconnected && !mistake("asks_a_judge_without_a_connection")) {]]
  [[    if (asked == kWitnesses) break;]] [[    if (asked == kWitnesses || mistake("asks_no_witness")) break;]]
  [[    if (!std::exchange(entry->doubted, true)) return;]]
    [[    if (!std::exchange(entry->doubted, true) && !mistake("believes_one_probe")) return;]]
  [[  if (over() || sender == nullptr || !sender->alive()) return;]]
    [[  if (over() || sender == nullptr || (!sender->alive() && !mistake("obeys_the_dead"))) return;]]
  [[    if (about.epoch == self_.info.epoch) fence(notice.text, effects);]]
    [[    if (about.epoch == self_.info.epoch && !mistake("goes_on_when_declared_dead")) fence(notice.text, effects);]]
  [[  if (!entry.alive()) return;
  const Error reason]]
    [[  if (!entry.alive() && !mistake("declares_twice")) return; const Error reason]]
  [[      if (notice.about == from) mark_left]]
    [[      if (notice.about == from && !mistake("takes_a_leaver_for_dead")) mark_left]]
  [[    if (entry.asked == lost.id) {]] [[    if (entry.asked == lost.id && !mistake("asks_only_once")) {]]
  [[  if (!entry.unreachable) return false;]]
    [[  if (!entry.unreachable || mistake("keeps_whom_it_cannot_reach")) return false;]]
  [[  const bool cause = paused || lost > linked;]]
    [[  const bool cause = (paused && !mistake("blames_others_for_its_pause")) ||
                     (lost > linked && !mistake("blames_others_for_its_losses"));]]
  [[(entry.info().id < self_.info.id ? kLowerFirst : kGivesUp)]]
    [[(entry.info().id < self_.info.id && !mistake("two_judge_each_other") ? kLowerFirst : kGivesUp)]]
  [[  const bool decides = !leaving_ && judge_of(*entry) == self_.info.id;]]
    [[  const bool decides = mistake("judges_when_another_has_come") ||
                       ((!leaving_ || mistake("judges_while_it_leaves")) && judge_of(*entry) == self_.info.id);]]
  [[  const bool first = decides && lowest(entry, true) == self_.info.id;]]
    [[  const bool first =
      decides && (mistake("judges_when_another_has_come") ||
                  lowest(entry, !mistake("gives_up_for_an_absent_judge")) == self_.info.id);]]
  [[entry.info().id != decider) return end_absence(entry);]]
    [[(entry.info().id != decider || mistake("watches_no_judge"))) return end_absence(entry);]]
  [[  if (!entry.awaited_since) entry.awaited_since = now;]] [[  if (decides && mistake("judge_waits_to_be_called")) return; @]]
  [[  if (leaving_) return;]] [[  if (leaving_ && !mistake("judges_while_it_leaves")) return;]]
  [[    entry.absent = true;]]
    [[    if (mistake("takes_absence_for_death"))
      return declare(entry, self_.info, "no connection to it could be made", now, effects);
@]]
  [[  if (std::exchange(entry.absent, false)) entry.askers]] [[  if (entry.absent && mistake("stays_absent")) return; @]]
  [[  } else if (++entry->mismatches >= kMismatches &&]]
    [[  } else if (!mistake("sends_no_lists") && ++entry->mismatches >= kMismatches &&]]
  [[    if (entry.suspected() && (entry.asked || due || entry.asked_at == Time{}))]]
    [[    if (entry.suspected() && !mistake("asks_only_once") && (entry.asked || due || entry.asked_at == Time{}))]]
  [[    joining.pending.insert(id);]] [[    if (!mistake("welcomes_before_all_know")) joining.pending.insert(id);]]
  [[  if (former != nullptr && former->alive() && former->info().epoch < card.info.epoch) {]]
    [[  if (former != nullptr && former->alive() && former->info().epoch < card.info.epoch && !mistake("admits_a_second_of_a_name")) {]]
  [[    declare(*entry, by,
            life_text(entry->info()) + " is over: it is now epoch " + std::to_string(info.epoch),
            now, effects);]]
    [[    if (!mistake("forgets_to_end_a_former_life"))
      declare(*entry, by,
              life_text(entry->info()) + " is over: it is now epoch " + std::to_string(info.epoch),
              now, effects);]]
  [[  effects.events.push_back(std::move(news));]]
    [[  if (mistake("keeps_quiet_of_the_past") && life.state != LifeState::alive) return; @]])
