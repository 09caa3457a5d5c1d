# Deliberate errors in the lifetime protocol, for mutation_test.cc, which turns them on one at a time. stitch_mutate()
# copies a source file of rref/lifetime/ and replaces text in it: the arguments are pairs of the original text and its
# replacement, which tests broken(Mutation::name). A text that is not found exactly once stops the configuration: the
# mutation has to be changed together with the code.
function(stitch_mutate file output)
  set(source "${PROJECT_SOURCE_DIR}/rref/lifetime/${file}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
  file(READ "${source}" text)
  math(EXPR last "${ARGC} - 1")
  foreach(at RANGE 2 ${last} 2)
    math(EXPR next "${at} + 1")
    set(right "${ARGV${at}}")
    string(FIND "${text}" "${right}" first)
    string(FIND "${text}" "${right}" only REVERSE)
    if(first EQUAL -1 OR NOT first EQUAL only)
      message(FATAL_ERROR "mutation of rref/lifetime/${file}: not found exactly once: ${right}")
    endif()
    string(REPLACE "${right}" "${ARGV${next}}" text "${text}")
  endforeach()
  set(copy "${CMAKE_CURRENT_BINARY_DIR}/mutated/${file}")
  file(CONFIGURE OUTPUT "${copy}" CONTENT "#include \"tests/rref/mutations.h\"\n${text}" @ONLY)
  set(${output} "${copy}" PARENT_SCOPE)
endfunction()

stitch_mutate(holder_table.cc mutated_holder_table
  [[  hold.creditors = std::move(others);]]
  [[  hold.creditors = std::move(others);
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

stitch_mutate(owner_table.cc mutated_owner_table
  [[entry.pins > 0 ||]]
  [[(entry.pins > 0 && !broken(Mutation::pins_keep_no_entry)) ||]]

  [[  entry->holders.insert(creator);]]
  [[  if (!broken(Mutation::creators_hold_nothing)) entry->holders.insert(creator);]])

stitch_mutate(ledger.cc mutated_ledger
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
