#pragma once

namespace stitch::optim {

// What a step does about a forward pass that saved the old parameter and has not run backward yet.
enum class StalePolicy : unsigned char {
  detect,  // that backward throws ("modified by an inplace operation"): nothing is silently wrong
  allow,   // that backward uses the new values: asynchronous training on shared parameters
};

}  // namespace stitch::optim
