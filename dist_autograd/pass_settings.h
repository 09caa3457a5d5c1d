#pragma once

#include <cstdint>

#include "stitch/dist_autograd/executor/node_run.h"

namespace stitch::dist_autograd {

// What the root's worker decides about a pass. MARK and GRADIENTS carry it as flags, so that either
// may open the pass on another worker. A plain value.
struct PassSettings {
  RunFlags run;
  [[nodiscard]] std::uint8_t to_wire() const;
  // Unknown flags are ignored, so that to_wire() differs from them.
  [[nodiscard]] static PassSettings from_wire(std::uint8_t flags);
};

}  // namespace stitch::dist_autograd
