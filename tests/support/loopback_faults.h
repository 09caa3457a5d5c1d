#pragma once

#include <cstdint>
#include <utility>

#include "stitch/transport/faults/faults.h"
#include "stitch/transport/wire/frame.h"

namespace stitch::testing {

// The connections of a program that includes this have judges.
inline const bool kJudged = (transport::Faults::expect_judges(), true);

// While it lives, `judge` sees every message between the workers of this process and decides its
// fate: delivered, delayed, repeated, dropped, or the connection fails. One at a time.
class LoopbackFaults {
 public:
  explicit LoopbackFaults(transport::Faults::Judge judge) {
    transport::Faults::set_judge(std::move(judge));
  }
  ~LoopbackFaults() { transport::Faults::set_judge(nullptr); }
  LoopbackFaults(const LoopbackFaults&) = delete;
  LoopbackFaults& operator=(const LoopbackFaults&) = delete;
};

// The kind of frame that a message carries.
[[nodiscard]] inline std::uint16_t kind_of(const transport::Message& message) {
  return transport::FrameView(message).kind();
}

}  // namespace stitch::testing
