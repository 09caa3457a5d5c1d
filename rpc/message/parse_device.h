#pragma once

#include <c10/core/Device.h>

#include <string>

namespace stitch::rpc {

// "cpu", "cuda:1"; "cuda" is cuda:0. Throws Error(invalid_argument) for any other text. Any thread.
[[nodiscard]] c10::Device parse_device(const std::string& text);

}  // namespace stitch::rpc
