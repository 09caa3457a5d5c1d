#pragma once

#include <cstdint>
#include <utility>

#include "stitch/transport/loopback/loopback_endpoint.h"
#include "stitch/transport/wire/frame.h"

namespace stitch::testing {

// While it lives, `judge` sees every message between the loopback endpoints of this process and
// decides its fate: delivered, delayed, repeated, dropped, or the connection fails. One at a time.
class LoopbackFaults {
 public:
  explicit LoopbackFaults(transport::LoopbackNetwork::Judge judge) {
    transport::LoopbackNetwork::process_wide()->set_judge(std::move(judge));
  }
  ~LoopbackFaults() { transport::LoopbackNetwork::process_wide()->set_judge(nullptr); }
  LoopbackFaults(const LoopbackFaults&) = delete;
  LoopbackFaults& operator=(const LoopbackFaults&) = delete;
};

// The kind of frame that a message carries.
[[nodiscard]] inline std::uint16_t kind_of(const transport::Message& message) {
  return transport::FrameView(message).kind();
}

}  // namespace stitch::testing
