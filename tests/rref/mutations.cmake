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
    kept_.insert(id);]])

stitch_mutated_copy(rref/lifetime/owner_table.cc tests/rref/mutations.h mutated_owner_table
  [[entry.pins > 0 ||]]
  [[(entry.pins > 0 && !broken(Mutation::pins_keep_no_entry)) ||]]

  [[  entry->holders.insert(creator);]]
  [[  if (!broken(Mutation::creators_hold_nothing)) entry->holders.insert(creator);]])

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
