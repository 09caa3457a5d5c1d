#pragma once

#include <cstdint>
#include <optional>
#include <string>

// The options of the parameter_server example.
struct CommandLine {
  std::string data = "/usr/share/datasets/fashion-mnist";
  std::string device = "cpu";
  std::string out = "loss.svg";
  std::string optimizer = "adam";
  double learning_rate = 0;
  std::int64_t hidden = 128;
  std::int64_t batch = 64;
  int epochs = 3;
  std::optional<int> workers;  // trainers; only checked: the launcher decides
  bool help = false;
};

// Throws std::invalid_argument naming the option and what it takes.
[[nodiscard]] CommandLine parse_command_line(int argc, char** argv);
[[nodiscard]] std::string help_text();
