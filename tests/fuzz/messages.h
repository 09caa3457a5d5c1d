#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/message.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {

[[nodiscard]] inline base::Bytes body_of(rpc::OutMessage& message) {
  return copy_of(message.frame.body().span().subspan(transport::FrameBuilder::body_offset()));
}
// One that has come from another worker. With a table of tensors it has as many buffers as the
// seeds need, and more; all of zeros, as what is in them is of no interest here (target `tensors`).
[[nodiscard]] inline rpc::InMessage message_with(std::uint16_t kind, Bytes body,
                                                 Bytes tensor_table = {}) {
  constexpr std::size_t kBuffers = 8;
  static std::array<std::byte, 64> zeros{};
  transport::FrameBuilder builder(kind);
  builder.body().append(body.data(), body.size());
  builder.end_body();
  if (!tensor_table.empty()) {
    builder.add_section(rpc::wire::kTensors, tensor_table);
    for (std::size_t i = 0; i < kBuffers; ++i)
      static_cast<void>(builder.add_buffer({{}, zeros.data(), zeros.size(), nullptr}));
  }
  return rpc::InMessage(std::move(builder).finish(), WorkerInfo{"peer", WorkerId(1), 1});
}

}  // namespace stitch::fuzz
