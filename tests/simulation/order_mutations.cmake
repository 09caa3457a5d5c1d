# Deliberate mistakes in the agreed order of launches.

stitch_mutated_copy(order transport/gpu/transfer_order.cc
  [[  clock_ = std::max(clock_, clock) + 1;
  const Key key{clock_, state->source, number};]]
    [[  const std::uint64_t clock_before = clock_;
  clock_ = std::max(clock_, clock) + 1;
  if (mistake("destination_takes_the_clock_of_the_source")) clock_ = clock + 1;
  const Key key{clock_, state->source, number};
  if (mistake("destination_forgets_its_clock")) clock_ = clock_before;]]  # destination_takes_the_clock_of_the_source: instead of one above its own; destination_forgets_its_clock: after it has answered
  [[  clock_ = std::max(clock_, clock);]]
    [[  if (!mistake("source_ignores_the_clock_of_the_destination")) clock_ = std::max(clock_, clock);]]
  [[  key->second.clock = clock;]] [[  if (!mistake("source_keeps_its_tentative_key")) key->second.clock = clock;]]
  [[  const auto first = pending_.begin();
  if (!first->second.final) return std::nullopt;]]
    [[  auto first = pending_.begin();
  if (mistake("tentative_entries_hold_nothing_back")) {
    while (first != pending_.end() && !first->second.final) ++first;
    if (first == pending_.end()) return std::nullopt;
  }
  if (mistake("orders_equal_clocks_by_pair")) {
    for (auto at = first; at != pending_.end(); ++at) {
      if (at->first.key.clock == first->first.key.clock && at->first.pair < first->first.pair) first = at;
    }
  }
  if (!first->second.final && !mistake("launches_what_is_tentative")) return std::nullopt;]]  # a number that only this device knows
  [[    pending_.erase({key, pair});]] [[    if (!mistake("broken_pairs_stay_in_the_order")) pending_.erase({key, pair});]]
  [[  --launched_;]] [[  if (!mistake("finished_launches_count")) --launched_;]])
