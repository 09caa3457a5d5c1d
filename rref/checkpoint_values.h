#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace stitch {

// Values of a program in a checkpoint, beside its tensors.
using CheckpointValue = std::variant<bool, std::int64_t, double, std::string, std::vector<double>>;
using CheckpointValues = std::map<std::string, CheckpointValue>;

}  // namespace stitch
