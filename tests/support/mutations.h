#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>

namespace stitch::testing {

// Checks a simulation with the deliberate mistakes of `Mutation`, which `turned_on` selects and
// `header` numbers from 1 to `last`. `history(i)` says what the i-th history finds wrong, empty if
// nothing; what it throws is a failure, too. The first `clean` must find nothing without a mistake.
// With each mistake, one of the first `each` must find something, and the same history nothing
// without it. Leaves none turned on.
template <class Mutation>
void expect_all_found(Mutation& turned_on, const char* header, int clean, int each,
                      const std::function<std::string(int)>& history) {
  const auto outcome = [&](int number) -> std::string {
    try {
      return history(number);
    } catch (const std::exception& error) {
      return std::string("it throws: ") + error.what();
    }
  };
  turned_on = Mutation::none;
  for (int i = 0; i < clean; ++i)
    ASSERT_EQ(outcome(i), "") << "history " << i << " without a mistake";
  for (int number = 1; number <= static_cast<int>(Mutation::last); ++number) {
    turned_on = static_cast<Mutation>(number);
    int found = 0;
    while (found < each && outcome(found).empty()) ++found;
    turned_on = Mutation::none;
    if (found == each) {
      ADD_FAILURE() << "mutation " << number << " of " << header << " is not found";
    } else if (found >= clean) {
      EXPECT_EQ(outcome(found), "") << "history " << found << " without mutation " << number;
    }
  }
}

}  // namespace stitch::testing
