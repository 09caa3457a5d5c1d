#pragma once

#include <string>

namespace stitch::rpc {

// How errors name an option: "num_threads", or "STITCH_NUM_THREADS" where that variable has set it
// in the options that this thread has resolved last. Any thread.
[[nodiscard]] std::string option_name(const std::string& field);
// `variable` has set its field in the options that this thread resolves.
void note_set_by_variable(const std::string& variable);
// This thread begins to resolve others.
void forget_set_by_variables();

}  // namespace stitch::rpc
