#include "stitch/dist_autograd/protocol/carried_autocast.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>

#include "stitch/base/error.h"
#include "stitch/dist_autograd/protocol/messages.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::dist_autograd {

namespace {

// A dtype's code is its position here, from 1 on: append only.
constexpr std::array kDtypes{c10::kHalf, c10::kBFloat16, c10::kFloat, c10::kDouble};

std::byte encoded(const std::optional<c10::ScalarType>& dtype) {
  if (!dtype) return std::byte{0};
  const auto* const found = std::find(kDtypes.begin(), kDtypes.end(), *dtype);
  if (found == kDtypes.end()) {
    throw Error(ErrorCode::invalid_argument, std::string("autocast to ") + c10::toString(*dtype) +
                                                 " cannot travel with a call: only to Half, "
                                                 "BFloat16, Float and Double");
  }
  return static_cast<std::byte>(1 + std::distance(kDtypes.begin(), found));
}

std::optional<c10::ScalarType> decoded(std::byte code) {
  const auto number = std::to_integer<std::size_t>(code);
  if (number == 0) return std::nullopt;
  if (number > kDtypes.size()) {
    throw Error(ErrorCode::protocol,
                "autocast section names dtype " + std::to_string(number) + ", which is unknown");
  }
  return kDtypes[number - 1];
}

}  // namespace

void add_autocast(rpc::OutMessage& request) {
  const rpc::Autocast here = rpc::Autocast::current();
  if (!here.on()) return;  // on for another kind of device
  const std::array<std::byte, 2> bytes{encoded(here.cpu), encoded(here.cuda)};
  request.frame.add_section(wire::kAutocastSection, bytes);
}

std::shared_ptr<const rpc::Autocast> autocast_of(const rpc::InMessage& request) {
  const auto* const section = request.view.section(wire::kAutocastSection);
  if (section == nullptr) return nullptr;
  if (section->bytes.size() != 2)
    throw Error(
        ErrorCode::protocol,
        "autocast section has " + std::to_string(section->bytes.size()) + " bytes instead of 2");
  const rpc::Autocast there{decoded(section->bytes[0]), decoded(section->bytes[1])};
  // The caller may have a newer version of torch. To enter this autocast must not fail later, when
  // it is entered again and again.
  static_cast<void>(rpc::AutocastScope(there));
  return std::make_shared<const rpc::Autocast>(there);
}

}  // namespace stitch::dist_autograd
