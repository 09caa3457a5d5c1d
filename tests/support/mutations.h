#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace stitch::testing {

// Checks a simulation with the deliberate mistakes of `Mutation`, which `turned_on` selects and
// `header` numbers from 1 to `last`. `found_within(n)` says what up to n histories find wrong,
// empty if nothing: so it must be for `clean` histories without a mistake, and must not be for
// `each` with any one of them. Leaves none turned on.
template <class Mutation>
void expect_all_found(Mutation& turned_on, const char* header, int clean, int each,
                      const std::function<std::string(int)>& found_within) {
  turned_on = Mutation::none;
  EXPECT_EQ(found_within(clean), "") << "without a mistake";
  for (int number = 1; number <= static_cast<int>(Mutation::last); ++number) {
    turned_on = static_cast<Mutation>(number);
    EXPECT_NE(found_within(each), "") << "mutation " << number << " of " << header;
  }
  turned_on = Mutation::none;
}

}  // namespace stitch::testing
