# Deliberate mistakes in the protocol of membership, for membership_mutation_test.cc, which turns them on one at a time.
include("${PROJECT_SOURCE_DIR}/tests/support/mutate.cmake")

stitch_mutated_copy(rpc/membership/membership_protocol.cc tests/rpc/membership_mutations.h mutated_protocol
  [[    if (&other == but_for || (other.absent && !absent_too)) continue;]]
  [[    if (broken(Mutation::any_worker_decides)) break;
    if (&other == but_for || (other.absent && !absent_too && !broken(Mutation::asks_the_absent))) continue;]]

  [[  if (entry.probing || !entry.suspected() || leaving_) return;]]
  [[  if (entry.probing || !entry.suspected() || (leaving_ && !broken(Mutation::judges_while_it_leaves))) return;]]

  [[    entry.asked.reset();
    return begin_probe(entry, now, effects);]]
  [[    if (broken(Mutation::decides_without_a_probe))
      return declare(entry, self_.info, "it is suspected", now, effects);
    entry.asked.reset();
    return begin_probe(entry, now, effects);]]

  [[judge->unconnected) {]]
  [[judge->unconnected && !broken(Mutation::asks_a_judge_without_a_connection)) {]]

  [[    if (asked == kWitnesses) break;]]
  [[    if (asked == kWitnesses || broken(Mutation::asks_no_witness)) break;]]

  [[    if (!std::exchange(entry->doubted, true)) return;]]
  [[    if (!std::exchange(entry->doubted, true) && !broken(Mutation::believes_one_probe)) return;]]

  [[  if (over() || sender == nullptr || !sender->alive()) return;]]
  [[  if (over() || sender == nullptr || (!sender->alive() && !broken(Mutation::obeys_the_dead)))
    return;]]

  [[    if (about.epoch == self_.info.epoch) fence(notice.text, effects);]]
  [[    if (about.epoch == self_.info.epoch && !broken(Mutation::goes_on_when_declared_dead))
      fence(notice.text, effects);]]

  [[  if (!entry.alive()) return;
  const Error reason]]
  [[  if (!entry.alive() && !broken(Mutation::declares_twice)) return;
  const Error reason]]

  [[        mark_left(*entry, now, effects);
      }]]
  [[        if (!broken(Mutation::takes_a_leaver_for_dead)) mark_left(*entry, now, effects);
      }]]

  [[    if (entry.asked == lost.id) {
      entry.asked.reset();]]
  [[    if (entry.asked == lost.id && !broken(Mutation::asks_only_once)) {
      entry.asked.reset();]]

  [[  if (!entry.unreachable) return false;
  if (!entry.answers_since)]]
  [[  if (!entry.unreachable || broken(Mutation::keeps_whom_it_cannot_reach)) return false;
  if (!entry.answers_since)]]

  [[  const bool cause = paused || lost > linked;]]
  [[  const bool cause = (paused && !broken(Mutation::blames_others_for_its_pause)) ||
                     (lost > linked && !broken(Mutation::blames_others_for_its_losses));]]

  [[(entry.info().id < self_.info.id ? kLowerFirst : kGivesUp)]]
  [[(entry.info().id < self_.info.id && !broken(Mutation::two_judge_each_other) ? kLowerFirst : kGivesUp)]]

  [[  const bool decides = !leaving_ && judge_of(*entry) == self_.info.id;]]
  [[  const bool decides = broken(Mutation::judges_when_another_has_come) ||
                       ((!leaving_ || broken(Mutation::judges_while_it_leaves)) && judge_of(*entry) == self_.info.id);]]

  [[  const bool first = decides && lowest(entry, true) == self_.info.id;]]
  [[  const bool first =
      decides && (broken(Mutation::judges_when_another_has_come) ||
                  lowest(entry, !broken(Mutation::gives_up_for_an_absent_judge)) == self_.info.id);]])

stitch_mutated_copy(rpc/membership/membership_links.cc tests/rpc/membership_mutations.h mutated_links
  [[entry.info().id != decider) return end_absence(entry);]]
  [[(entry.info().id != decider || broken(Mutation::watches_no_judge))) return end_absence(entry);]]

  [[  if (!entry.awaited_since) entry.awaited_since = now;]]
  [[  if (decides && broken(Mutation::judge_waits_to_be_called)) return;
  if (!entry.awaited_since) entry.awaited_since = now;]]

  [[  if (leaving_) return;
  const auto timeout]]
  [[  if (leaving_ && !broken(Mutation::judges_while_it_leaves)) return;
  const auto timeout]]

  [[    entry.absent = true;]]
  [[    if (broken(Mutation::takes_absence_for_death))
      return declare(entry, self_.info, "no connection to it could be made", now, effects);
    entry.absent = true;]]

  [[  if (std::exchange(entry.absent, false)) entry.askers]]
  [[  if (entry.absent && broken(Mutation::stays_absent)) return;
  if (std::exchange(entry.absent, false)) entry.askers]]

  [[  } else if (++entry->mismatches >= kMismatches &&]]
  [[  } else if (!broken(Mutation::sends_no_lists) && ++entry->mismatches >= kMismatches &&]]

  [[    if (entry.suspected() && (entry.asked || due || entry.asked_at == Time{}))]]
  [[    if (entry.suspected() && !broken(Mutation::asks_only_once) &&
        (entry.asked || due || entry.asked_at == Time{}))]])

stitch_mutated_copy(rpc/membership/membership_joins.cc tests/rpc/membership_mutations.h mutated_joins
  [[    joining.pending.insert(id);]]
  [[    if (!broken(Mutation::welcomes_before_all_know)) joining.pending.insert(id);]]

  [[  if (former != nullptr && former->alive() && former->info().epoch < card.info.epoch) {]]
  [[  if (former != nullptr && former->alive() && former->info().epoch < card.info.epoch &&
      !broken(Mutation::admits_a_second_of_a_name)) {]]

  [[    declare(*entry, by,
            life_text(entry->info()) + " is over: it is now epoch " + std::to_string(info.epoch),
            now, effects);]]
  [[    if (!broken(Mutation::forgets_to_end_a_former_life))
      declare(*entry, by,
              life_text(entry->info()) + " is over: it is now epoch " + std::to_string(info.epoch),
              now, effects);]]

  [[  insert(life);
  effects.events.push_back(std::move(news));]]
  [[  insert(life);
  if (broken(Mutation::keeps_quiet_of_the_past) && life.state != LifeState::alive) return;
  effects.events.push_back(std::move(news));]])
