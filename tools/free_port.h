#pragma once

namespace stitch_run {

// A TCP port of 127.0.0.1 that is free at the time of the call; another process may take it before
// it is used. Throws std::system_error.
[[nodiscard]] int find_free_port();

}  // namespace stitch_run
