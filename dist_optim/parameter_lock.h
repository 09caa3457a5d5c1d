#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "stitch/base/mutex.h"

namespace stitch::optim {

// The mutex that every optimizer of this process takes while it steps `parameter`. There is one per
// parameter, shared by all optimizers and contexts: steps of one parameter are serialized, those of
// different parameters are not. Nodes of backward passes must not take it: steps wait for them. It
// lives as long as its last owner. Thread contract: any thread.
[[nodiscard]] std::shared_ptr<base::Mutex> parameter_lock(const at::Tensor& parameter);

// What a step does about a forward pass that saved the old parameter and has not run backward yet.
enum class StalePolicy : unsigned char {
  detect,  // that backward throws ("modified by an inplace operation"). A step waits for nodes that
           // have read the parameter and still compute with it
  allow,   // that backward uses the new values: asynchronous training on shared parameters
};

}  // namespace stitch::optim
