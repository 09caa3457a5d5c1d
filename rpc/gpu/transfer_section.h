#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "stitch/base/bytes.h"

namespace stitch::rpc {

// What a message says of the tensors whose bytes do not travel in it but by transfers between
// devices (wire::kTransfers). A value. decode() throws Error(protocol) for what makes no sense.
struct TransferSection {
  struct Transfer {
    std::uint64_t id = 0;     // of its source
    std::uint64_t bytes = 0;  // not 0
    c10::Device to = c10::Device(c10::kCUDA, 0);
  };
  struct Tensor {
    std::uint32_t tensor = 0;  // of the message, ascending
    at::ScalarType dtype = at::kFloat;
    bool requires_grad = false;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;  // in elements; 0 for an expanded dimension
    std::uint32_t transfer = 0;
    // In the bytes of the transfer; those of one transfer ascend and do not overlap.
    std::uint64_t offset = 0;
  };
  // A message takes no more of them along: its receiver asks for each on the thread that reads.
  static constexpr std::size_t kMaxTransfers = std::size_t{1} << 16;
  std::vector<Transfer> transfers;
  std::vector<Tensor> tensors;

  // Of all transfers; the largest number where that overflows.
  [[nodiscard]] std::size_t bytes() const noexcept;

  [[nodiscard]] base::Bytes encode() const;
  [[nodiscard]] static TransferSection decode(std::span<const std::byte> bytes);
};

}  // namespace stitch::rpc
