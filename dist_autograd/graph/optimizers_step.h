#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <shared_mutex>

namespace stitch::dist_autograd {

// Whether an optimizer of the layer above has stepped a parameter of this process. Errors say so
// then. Thread contract: any thread.
inline std::atomic<bool> optimizers_step_here{false};
// How many steps of single parameters there have been in this process.
inline std::atomic<std::uint64_t> optimizer_steps{0};
// The mutex of a leaf that is shared by nodes which may have saved the leaf, while they run: a
// step, which takes it alone and no other one beside it, does not come between such a node's
// reading and its use. Null where no optimizer steps the leaf, or all allow that. Set by that
// layer.
inline std::atomic<std::shared_ptr<std::shared_mutex> (*)(const at::Tensor& leaf)> mutex_of_leaf{
    nullptr};

}  // namespace stitch::dist_autograd
