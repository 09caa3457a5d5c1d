#include "stitch/dist_autograd/pass_settings.h"

#include "stitch/dist_autograd/messages.h"

namespace stitch::dist_autograd {

std::uint8_t PassSettings::to_wire() const {
  using Header = wire::PassHeader;
  return static_cast<std::uint8_t>(
      (run.retain_graph ? Header::kRetainGraph : 0) |
      (run.create_graph ? Header::kCreateGraph : 0) | (run.anomaly ? Header::kAnomaly : 0) |
      (run.only_inputs ? Header::kOnlyInputs : 0) | (run.allow_nan ? Header::kAllowNaN : 0));
}

PassSettings PassSettings::from_wire(std::uint8_t flags) {
  using Header = wire::PassHeader;
  return {{(flags & Header::kRetainGraph) != 0, (flags & Header::kCreateGraph) != 0,
           (flags & Header::kAnomaly) != 0, (flags & Header::kOnlyInputs) != 0,
           (flags & Header::kAllowNaN) != 0}};
}

}  // namespace stitch::dist_autograd
