#pragma once

#include <string>
#include <vector>

namespace stitch::rref::sweep_scenarios {

// Histories of four workers and one object that random walks seldom meet.
// Each returns its failure; empty if there is none.
[[nodiscard]] std::string two_workers_of_a_chain_die();
[[nodiscard]] std::string a_lender_loses_the_owner();
[[nodiscard]] std::string a_borrower_dies_before_the_creation();
[[nodiscard]] std::string a_message_of_the_dead_arrives_late();
[[nodiscard]] std::string an_earlier_life_is_swept();
[[nodiscard]] std::string a_borrower_is_unknown_to_the_owner();
[[nodiscard]] std::string a_borrower_of_one_unknown_to_the_owner();
[[nodiscard]] std::string a_creator_is_unknown_to_the_owner();
[[nodiscard]] std::string a_life_is_said_to_be_over_before_it_joins();
[[nodiscard]] std::string a_life_that_never_joins_is_asked_about();
using Scenario = std::string (*)();
[[nodiscard]] const std::vector<Scenario>& all();

}  // namespace stitch::rref::sweep_scenarios
