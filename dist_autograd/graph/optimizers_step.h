#pragma once

#include <atomic>

namespace stitch::dist_autograd {

// Whether an optimizer of the layer above has stepped a parameter of this process. Errors say so
// then. Thread contract: any thread.
inline std::atomic<bool> optimizers_step_here{false};

}  // namespace stitch::dist_autograd
