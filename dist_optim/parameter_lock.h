#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "stitch/base/mutex.h"

namespace stitch::optim {

// The mutex that every optimizer of this process takes while it steps `parameter`: one for each
// parameter, shared by however many optimizers and contexts step it, so steps of one parameter
// follow each other and different parameters do not wait for one another. It lives while somebody
// holds it. Thread contract: any thread.
[[nodiscard]] std::shared_ptr<base::Mutex> parameter_lock(const at::Tensor& parameter);

}  // namespace stitch::optim
