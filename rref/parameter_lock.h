#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "stitch/base/mutex.h"

namespace stitch::rref {

// The mutex that every optimizer of this process takes while it steps `parameter`, and a checkpoint
// while it reads or replaces it. There is one per parameter, shared by all optimizers and contexts:
// steps of one parameter are serialized, those of different parameters are not. Nodes of backward
// passes must not take it: steps wait for them. It lives as long as its last owner. Thread
// contract: any thread.
[[nodiscard]] std::shared_ptr<base::Mutex> parameter_lock(const at::Tensor& parameter);

}  // namespace stitch::rref
