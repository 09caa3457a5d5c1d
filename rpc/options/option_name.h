#pragma once

#include <string>
#include <vector>

namespace stitch::rpc {

// How errors name an option: "num_threads", or "STITCH_NUM_THREADS" where that variable has set it
// in the options that this thread has resolved last. Any thread.
[[nodiscard]] std::string option_name(const std::string& field);
// `variable` has set its field in the options that this thread resolves: STITCH_RANK `rank`; or one
// of a launcher's has set `field`.
void note_set_by_variable(const std::string& variable);
void note_set_by_variable(const std::string& variable, const std::string& field);
// All variables that begin with STITCH_.
[[nodiscard]] std::vector<std::string> known_variables();
// This thread begins to resolve others.
void forget_set_by_variables();

}  // namespace stitch::rpc
