#pragma once

namespace stitch::transport::gpu {

// The deliberate errors that order_mutations.cmake builds into the agreed order.
enum class OrderMutation {
  none,
  destination_takes_the_clock_of_the_source,  // instead of one above its own
  destination_forgets_its_clock,              // after it has answered
  source_ignores_the_clock_of_the_destination,
  source_keeps_its_tentative_key,
  launches_what_is_tentative,
  tentative_entries_hold_nothing_back,
  broken_pairs_stay_in_the_order,
  finished_launches_count,
  orders_equal_clocks_by_pair,  // a number that only this device knows
  last = orders_equal_clocks_by_pair,
};

// Whether this mutation is turned on.
[[nodiscard]] bool broken(OrderMutation mutation);

}  // namespace stitch::transport::gpu
