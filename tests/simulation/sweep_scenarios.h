#pragma once

#include <string>
#include <vector>

namespace stitch::rref::sweep_scenarios {

// Histories of four workers and one object that random walks seldom meet.
// Each returns its failure; empty if there is none.
using Scenario = std::string (*)();
[[nodiscard]] const std::vector<Scenario>& all();

}  // namespace stitch::rref::sweep_scenarios
