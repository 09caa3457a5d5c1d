#pragma once

#include <string>
#include <string_view>

namespace stitch::rpc {

// The answer to a call of a function that the callee has not registered: an error reply
// `unimplemented` that lists the functions registered there, one per line; the caller, which knows
// the name it asked for, reports the nearest ones. Thread contract: any thread.

// The callee's part: names of registered functions, about 16 KiB at most.
[[nodiscard]] std::string registered_function_names();
// The caller's part: "; near names there: a, b, c" from a received list, or "".
[[nodiscard]] std::string near_function_names(std::string_view wanted, std::string_view names);

}  // namespace stitch::rpc
