# Deliberate errors in the lifetime protocol, for mutation_test.cc, which turns them on one at a time.
include("${PROJECT_SOURCE_DIR}/tests/support/mutate.cmake")

stitch_mutated_copy(rref/lifetime/holder_table.cc tests/rref/mutations.h mutated_holder_table
  [[  hold.rare->creditors = std::move(others);]]
  [[  hold.rare->creditors = std::move(others);
  if (broken(Mutation::settles_with_the_registration)) settle(hold, effects);]]

  [[  if (hold.state == State::registered || hold.state == State::lost) {]]
  [[  if (hold.state == State::registered || hold.state == State::lost ||
      broken(Mutation::settles_borrows_at_once)) {]]

  [[  effects.ops.push_back({id.owner, LedgerOp::make_reg(id)});]]
  [[  if (broken(Mutation::settles_before_the_registration)) settle(hold, effects);
  effects.ops.push_back({id.owner, LedgerOp::make_reg(id)});]]

  [[  if (hold.alive()) return;]]
  [[  if (broken(Mutation::pins_keep_no_hold) ? hold.local > 0 : hold.alive()) return;]]

  [[      return;  // the answer decides]]
  [[      if (broken(Mutation::creators_do_not_wait) && hold.state == State::creating) break;
      return;]]

  [[    kept_.insert(id);]]
  [[    if (broken(Mutation::forgets_what_is_kept)) settle(hold, effects);
    kept_.insert(id);]]

  [[  if (hold.pins == 0) settle(hold, effects);]]
  [[  if (hold.pins == 0 || broken(Mutation::settles_what_it_lent_when_lost))
    settle(hold, effects);]]

  [[  if (found->second.told)]]
  [[  if (found->second.told && !broken(Mutation::hides_unsent_creations))]])

stitch_mutated_copy(rref/lifetime/owner_table.cc tests/rref/mutations.h mutated_owner_table
  [[entry.pins > 0 ||]]
  [[(entry.pins > 0 && !broken(Mutation::pins_keep_no_entry)) ||]]

  [[    fresh_holder = entry->holders.insert(creator);]]
  [[    if (!broken(Mutation::creators_hold_nothing))
      fresh_holder = entry->holders.insert(creator);]]

  [[    if (at->second.holders.erase(life)) erase_if_unused(at, effects);]]
  [[    bool erased = at->second.holders.erase(life);
    if (broken(Mutation::drops_the_next_life))
      erased = at->second.holders.erase({life.id, life.epoch + 10}) || erased;
    if (erased) erase_if_unused(at, effects);]])

stitch_mutated_copy(rref/lifetime/sweeps.cc tests/rref/mutations.h mutated_sweeps
  [[    if (sweep.state == State::running && !answered(sweep)) return {};]]
  [[    if (sweep.state == State::running && !answered(sweep) &&
        !broken(Mutation::drops_the_dead_at_once) && !broken(Mutation::sweeps_end_one_by_one))
      return {};]]

  [[    if (sweep.state != State::running) continue;
    sweep.state = State::swept;]]
  [[    if (sweep.state != State::running) continue;
    if (broken(Mutation::sweeps_end_one_by_one) && !answered(sweep)) continue;
    sweep.state = State::swept;]])

stitch_mutated_copy(rref/lifetime/lifetime.cc tests/rref/mutations.h mutated_lifetime
  [[  const bool pinned = carried.pinned && !sweeps_.over(sender);]]
  [[  const bool pinned = carried.pinned &&
                      (!sweeps_.over(sender) || broken(Mutation::borrows_from_the_dead));]]

  [[  if (op.kind != LedgerOp::Kind::unmade && owners_.deleted(op.id) && sweeps_.any_ended()) {]]
  [[  if (op.kind != LedgerOp::Kind::unmade && owners_.deleted(op.id) && sweeps_.any_ended() &&
      !broken(Mutation::refuses_late_registrations)) {]]

  [[  if (gone_.contains(peer)) return {};]]
  [[  if (gone_.contains(peer) && !broken(Mutation::applies_ledgers_of_the_dead)) return {};]])

stitch_mutated_copy(rref/lifetime/lifetime_ends.cc tests/rref/mutations.h mutated_lifetime_ends
  [[  unknown_creators_.insert(creator);]]
  [[  if (broken(Mutation::refuses_unknown_creators))
    throw Error(ErrorCode::protocol, to_string(id) + " names an unknown creator");
  unknown_creators_.insert(creator);]]

  [[  for (const WorkerLife& receiver : receivers) void_pins(receiver, over, effects);]]
  [[  for (const WorkerLife& receiver : receivers) {
    if (!broken(Mutation::keeps_pins_of_the_dead)) void_pins(receiver, over, effects);
  }
  if (broken(Mutation::drops_pins_towards_the_dead_at_once)) {
    std::set<WorkerLife> of;
    if (peers_.contains(over)) {
      for (const auto& [token, id] : peers_[over].tokens) of.insert(id.owner);
    }
    for (const WorkerLife& owner : of) void_pins(over, owner, effects);
  }]]

  [[  holders_.register_borrowed_from(over, effects);]]
  [[  if (broken(Mutation::is_clean_before_registering)) answer_early(over, effects);
  if (!broken(Mutation::is_clean_without_registering))
    holders_.register_borrowed_from(over, effects);]]

  [[    for (const WorkerLife& owner : owners)]]
  [[    if (broken(Mutation::asks_no_owner)) owners.clear();
    for (const WorkerLife& owner : owners)]]

  [[  if (owners_.lent() || sweeps_.running() || sweeps_.wanted()) start_sweeps(effects);]]
  [[  if ((owners_.lent() || sweeps_.running() || sweeps_.wanted()) &&
      !(sweeps_.running() && broken(Mutation::ignores_deaths_during_sweeps))) {
    start_sweeps(effects);
  } else if (broken(Mutation::believes_that_unlent_is_swept)) {
    (void)sweeps_.start({});
  }]]

  [[      if (!world_.contains) {
        end_life(op.life, gone_error(op.life), effects);]]
  [[      if (!world_.contains || broken(Mutation::ends_a_life_at_the_word_of_a_peer)) {
        if (broken(Mutation::is_clean_before_registering))
          effects.ops.push_back({peer, LedgerOp::make_clean(op.life)});
        end_life(op.life, gone_error(op.life), effects);]]

  [[      answer_early(each, effects);]]
  [[      if (!broken(Mutation::never_answers_about_passed_lives)) answer_early(each, effects);]]

  [[      void_pins(op.life, peer, effects);]]
  [[      if (!broken(Mutation::keeps_pins_towards_the_swept)) void_pins(op.life, peer, effects);]])

stitch_mutated_copy(rref/lifetime/ledger.cc tests/rref/mutations.h mutated_ledger
  [[    if (number < expected_) {]]
  [[    if (number < expected_ && !broken(Mutation::takes_in_repetitions)) {]]

  [[    } else if (number > expected_) {]]
  [[    } else if (number > expected_ && !broken(Mutation::takes_in_what_is_early)) {]]

  [[  if (unsent_drops_.erase(id) == 0) return false;]]
  [[  if (broken(Mutation::takes_back_sent_drops) &&
      std::any_of(sent_.begin(), sent_.end(), [&](const LedgerOp& op) {
        return op.kind == LedgerOp::Kind::drop && op.id == id;
      })) {
    return true;
  }
  if (unsent_drops_.erase(id) == 0) return false;]])
