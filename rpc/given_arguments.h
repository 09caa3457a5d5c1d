#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "stitch/rpc/function_runner.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

// The arguments of an incoming request that are not in its body: a layer above attaches this before
// the request can be answered, and fills it in before the function runs. Thread contract: as
// InMessage.
class GivenArguments final : public Attachment {
 public:
  void set(std::vector<GivenArgument> arguments) { arguments_ = std::move(arguments); }
  // Null: that one is in the body.
  [[nodiscard]] GivenArgument* find(std::size_t position) noexcept {
    for (GivenArgument& each : arguments_) {
      if (each.position == position) return &each;
    }
    return nullptr;
  }

 private:
  std::vector<GivenArgument> arguments_;
};

}  // namespace stitch::rpc
