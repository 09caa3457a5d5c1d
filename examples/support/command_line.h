#pragma once

#include <optional>
#include <string>

#include "training_server.h"

// The options of the parameter_server example.
struct CommandLine {
  TrainingPlan plan;
  std::int64_t hidden = 128;
  std::string out = "loss.svg";
  bool resume = false;
  std::optional<int> workers;  // trainers; only checked: the launcher decides
};

// Prints the help and ends the process where it is asked for. Throws std::invalid_argument that
// names the option and what it takes.
[[nodiscard]] CommandLine parse_command_line(int argc, char** argv);
