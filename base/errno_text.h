#pragma once

#include <string>

namespace stitch::base {

// What the system says about an errno. Where it means that a limit is reached (descriptors, maps,
// memory): which one, what it is set to, how much a worker takes, and how it is raised. Thread
// contract: any thread.
[[nodiscard]] std::string errno_text(int error);

}  // namespace stitch::base
