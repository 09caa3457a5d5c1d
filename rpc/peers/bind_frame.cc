#include "stitch/rpc/peers/bind_frame.h"

#include <string_view>

#include "stitch/base/byte_io.h"
#include "stitch/base/printable.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

namespace {
constexpr std::size_t kMaxReason = 400;
}  // namespace

transport::Message Bind::encode() const {
  transport::FrameBuilder frame(wire::kBind);
  base::ByteWriter writer(frame.body());
  writer.write(static_cast<std::uint8_t>(step));
  writer.write(generation);
  writer.write(token);
  for (const std::uint64_t number : received) writer.write(number);
  writer.write_string(std::string_view(reason).substr(0, kMaxReason));
  frame.end_body();
  return std::move(frame).finish();
}

Bind Bind::decode(std::span<const std::byte> body) {
  base::ByteReader reader(body, "bind frame");
  Bind bind;
  const auto step = reader.read<std::uint8_t>();
  if (step < static_cast<std::uint8_t>(Step::offer) || step > static_cast<std::uint8_t>(Step::gone))
    throw Error(ErrorCode::protocol, "bind frame has the unknown step " + std::to_string(step));
  bind.step = static_cast<Step>(step);
  bind.generation = reader.read<std::uint64_t>();
  bind.token = reader.read<std::uint64_t>();
  for (std::uint64_t& number : bind.received) number = reader.read<std::uint64_t>();
  bind.reason = base::printable(reader.read_string().substr(0, kMaxReason));
  return bind;
}

}  // namespace stitch::rpc
