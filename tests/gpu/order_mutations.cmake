# Deliberate errors in the agreed order of launches, for order_mutation_test.cc, which turns them on one at a time.
include("${PROJECT_SOURCE_DIR}/tests/support/mutate.cmake")

stitch_mutated_copy(transport/gpu/transfer_order.cc tests/gpu/order_mutations.h mutated_transfer_order
  [[  clock_ = std::max(clock_, clock) + 1;
  const Key key{clock_, state->source, number};]]
  [[  const std::uint64_t clock_before = clock_;
  clock_ = std::max(clock_, clock) + 1;
  if (broken(OrderMutation::destination_takes_the_clock_of_the_source)) clock_ = clock + 1;
  const Key key{clock_, state->source, number};
  if (broken(OrderMutation::destination_forgets_its_clock)) clock_ = clock_before;]]

  [[  clock_ = std::max(clock_, clock);]]
  [[  if (!broken(OrderMutation::source_ignores_the_clock_of_the_destination)) clock_ = std::max(clock_, clock);]]

  [[  key->second.clock = clock;]]
  [[  if (!broken(OrderMutation::source_keeps_its_tentative_key)) key->second.clock = clock;]]

  [[  const auto first = pending_.begin();
  if (!first->second.final) return std::nullopt;]]
  [[  auto first = pending_.begin();
  if (broken(OrderMutation::tentative_entries_hold_nothing_back)) {
    while (first != pending_.end() && !first->second.final) ++first;
    if (first == pending_.end()) return std::nullopt;
  }
  if (broken(OrderMutation::orders_equal_clocks_by_pair)) {
    for (auto at = first; at != pending_.end(); ++at) {
      if (at->first.key.clock == first->first.key.clock && at->first.pair < first->first.pair) first = at;
    }
  }
  if (!first->second.final && !broken(OrderMutation::launches_what_is_tentative)) return std::nullopt;]]

  [[    pending_.erase({key, pair});]]
  [[    if (!broken(OrderMutation::broken_pairs_stay_in_the_order)) pending_.erase({key, pair});]]

  [[  --launched_;]]
  [[  if (!broken(OrderMutation::finished_launches_count)) --launched_;]])
