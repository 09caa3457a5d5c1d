#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

namespace stitch::testing {

// What `run` says of the first of up to `histories` seeds that fails: an error that it throws is a
// failure, too. Empty if there is none.
inline std::string first_failure(int histories,
                                 const std::function<std::string(std::uint64_t seed)>& run) {
  for (int i = 0; i < histories; ++i) {
    try {
      if (auto failure = run(1'000'000 + static_cast<std::uint64_t>(i)); !failure.empty())
        return failure;
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  return {};
}

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
