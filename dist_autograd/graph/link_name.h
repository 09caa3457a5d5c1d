#pragma once

#include <cstdint>
#include <string>

namespace stitch::dist_autograd {

// Which message made a link, as error texts name it. The text is made when one is needed: few links
// ever get into one, and every recorded message has a link on both sides.
struct LinkName {
  enum class Part : std::uint8_t {
    call,      // a message of a call, at its sender
    argument,  // the arguments of a call, at the callee
    result,    // the result of a call, at the caller
  };
  Part part = Part::result;
  std::uint8_t gradients = 0;  // how many times: "gradient of"
  std::uint64_t function = 0;  // the wire id of the call's function
  std::string callee{};        // its worker's name, for Part::call

  // The name of the link over the gradients that pass over this one.
  [[nodiscard]] LinkName of_gradient() const;
  [[nodiscard]] std::string text() const;
};

}  // namespace stitch::dist_autograd
