#pragma once

#include <string>
#include <vector>

#include "diagnose_waits.h"

namespace stitch_run {

// Whether the command line asks for a diagnosis: its first word is --diagnose.
[[nodiscard]] bool asks_for_diagnosis(const std::vector<std::string>& arguments);

// stitch-run --diagnose DIR [--svg FILE | --dot FILE]: reads the dumps of a folder and prints who
// waits for whom, the verdict first; draws the picture. Returns the exit status. Throws UsageError
// for a command line that it does not understand, std::runtime_error for a folder without dumps.
int diagnose(const std::vector<std::string>& arguments);

// What diagnose() prints.
[[nodiscard]] std::string diagnosis_text(const Dumps& dumps);
// The picture for Graphviz: workers, and an arrow to each that is waited for; what all wait for in
// the end stands out.
[[nodiscard]] std::string diagnosis_dot(const Dumps& dumps);

}  // namespace stitch_run
