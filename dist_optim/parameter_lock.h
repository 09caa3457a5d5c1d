#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "stitch/base/mutex.h"

namespace stitch::optim {

// rref::parameter_lock().
[[nodiscard]] std::shared_ptr<base::Mutex> parameter_lock(const at::Tensor& parameter);

// What a step does about a forward pass that saved the old parameter and has not run backward yet.
enum class StalePolicy : unsigned char {
  detect,  // that backward throws ("modified by an inplace operation"). A step waits for nodes that
           // have read the parameter and still compute with it
  allow,   // that backward uses the new values: asynchronous training on shared parameters
};

}  // namespace stitch::optim
