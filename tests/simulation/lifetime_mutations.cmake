# Deliberate mistakes in the lifetime protocol.

stitch_mutated_copy(lifetime rref/lifetime/holder_table.cc
  [[  hold.rare->creditors = std::move(others);]] [[@ if (mistake("settles_with_the_registration")) settle(hold, effects);]]  # its creditors, instead of at its acknowledgement
  [[  if (hold.state == State::registered || hold.state == State::lost) {]]
    [[  if (hold.state == State::registered || hold.state == State::lost || mistake("settles_borrows_at_once")) {]]  # when they arrive
  [[  effects.ops.push_back({id.owner, LedgerOp::make_reg(id)});]]
    [[  if (mistake("settles_before_the_registration")) settle(hold, effects); @]]  # the tokens of the owner
  [[  if (hold.alive()) return;]] [[  if (mistake("pins_keep_no_hold") ? hold.local > 0 : hold.alive()) return;]]
  [[      return;  // the answer decides]]
    [[      if (mistake("creators_do_not_wait") && hold.state == State::creating) break; return;]]  # for the answer, when they drop their last reference
  [[    kept_.insert(id);]] [[    if (mistake("forgets_what_is_kept")) settle(hold, effects); @]]  # settles a borrow that outlives its message before its registration
  [[  if (hold.pins == 0) settle(hold, effects);]]
    [[  if (hold.pins == 0 || mistake("settles_what_it_lent_when_lost")) settle(hold, effects);]]  # when it cannot reach the owner
  [[  if (found->second.told)]] [[  if (found->second.told && !mistake("hides_unsent_creations"))]])  # from the owner

stitch_mutated_copy(lifetime rref/lifetime/owner_table.cc
  [[entry.pins > 0 ||]] [[(entry.pins > 0 && !mistake("pins_keep_no_entry")) ||]]
  [[  entry.holders.insert(creator);]] [[  if (!mistake("creators_hold_nothing")) @]]  # in the owner's table
  [[    if (at->second.holders.erase(life)) erase_if_unused(at, effects);]]
    [[    bool erased = at->second.holders.erase(life);
    if (mistake("drops_the_next_life"))
      erased = at->second.holders.erase({life.id, life.epoch + 10}) || erased;
    if (erased) erase_if_unused(at, effects);]])  # when an earlier one is swept

stitch_mutated_copy(lifetime rref/lifetime/sweeps.cc
  [[    if (sweep.state == State::running && !answered(sweep)) return {};]]
    [[    if (sweep.state == State::running && !answered(sweep) &&
        !mistake("drops_the_dead_at_once") && !mistake("sweeps_end_one_by_one"))
      return {};]]  # drops_the_dead_at_once: instead of once all others are clean; sweeps_end_one_by_one: although several run
  [[    sweep.state = State::swept;]] [[    if (mistake("sweeps_end_one_by_one") && !answered(sweep)) continue; @]])

stitch_mutated_copy(lifetime rref/lifetime/lifetime.cc
  [[  const bool pinned = carried.pinned && !sweeps_.over(sender);]]
    [[  const bool pinned = carried.pinned && (!sweeps_.over(sender) || mistake("borrows_from_the_dead"));]]  # from a message that is handled too late
  [[      effects.ops.push_back({peer, !why_never(op.id) && owners_.add_holder(op.id, peer)]]
    [[      if (mistake("refuses_late_registrations") && owners_.deleted(op.id)) refuse("registers what was deleted");
      if (mistake("refuses_unknown_creators") && world_.contains && !world_.contains(op.id.creator)) refuse("names an unknown creator");
@]]  # of those that a sweep did not know; of those of whom it will hear
  [[  if (gone_.contains(peer)) return {};]]
    [[  if (gone_.contains(peer) && !mistake("applies_ledgers_of_the_dead")) return {};]]
  [[  for (const WorkerLife& receiver : receivers) void_pins(receiver, over, effects);]]
    [[  for (const WorkerLife& receiver : receivers) {
    if (!mistake("keeps_pins_of_the_dead")) void_pins(receiver, over, effects);
  }
  if (mistake("drops_pins_towards_the_dead_at_once")) {
    std::set<WorkerLife> of;
    if (peers_.contains(over)) {
      for (const auto& [token, id] : peers_[over].tokens) of.insert(id.owner);
    }
    for (const WorkerLife& owner : of) void_pins(over, owner, effects);
  }]]  # in messages about the objects of the dead
  [[  holders_.register_borrowed_from(over, effects);]]
    [[  if (mistake("is_clean_before_registering")) answer_early(over, effects); if (!mistake("is_clean_without_registering")) @]]  # what it borrowed from the dead
  [[    for (const WorkerLife& owner : owners)]] [[    if (mistake("asks_no_owner")) owners.clear(); @]]  # to sweep a worker that it has pins towards
  [[  if (owners_.lent() || sweeps_.running() || sweeps_.wanted()) start_sweeps(effects);]]
    [[  if ((owners_.lent() || sweeps_.running() || sweeps_.wanted()) &&
      !(sweeps_.running() && mistake("ignores_deaths_during_sweeps"))) {
    start_sweeps(effects);
  } else if (mistake("believes_that_unlent_is_swept")) {
    (void)sweeps_.start({});
  }]]  # ignores_deaths_during_sweeps: of workers that have been asked; believes_that_unlent_is_swept: a death while no object was lent
  [[      if (!world_.contains) {]]
    [[      if (!world_.contains || mistake("ends_a_life_at_the_word_of_a_peer")) {
        if (mistake("is_clean_before_registering"))
          effects.ops.push_back({peer, LedgerOp::make_clean(op.life)});]]
  [[      answer_early(each, effects);]]
    [[      if (!mistake("never_answers_about_passed_lives")) answer_early(each, effects);]]  # of whom it will not hear
  [[      void_pins(op.life, peer, effects);]]
    [[      if (!mistake("keeps_pins_towards_the_swept")) void_pins(op.life, peer, effects);]])

stitch_mutated_copy(lifetime rref/lifetime/ledger.cc
  [[  unsent_.push_back(op);]]
    [[  if (mistake("sends_settlements_first") && op.kind == LedgerOp::Kind::settle) { unsent_.push_front(op); return; }
  if (mistake("sends_registrations_last") && op.kind == LedgerOp::Kind::clean) { unsent_.push_front(op); return; }
@]])  # sends_settlements_first: before the REG that they follow; sends_registrations_last: behind CLEAN
