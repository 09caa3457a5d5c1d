#pragma once

#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

// Tensors on the wire. Dense tensors keep their strides and travel as the bytes they cover, never
// their whole storage; expanded dimensions are not materialised; sparse COO tensors travel as
// indices and values; undefined and zero-size tensors take no bytes. requires_grad travels,
// autograd history does not. A dense tensor of at most kSnapshotBytes is copied immediately, so
// the caller may change it; a larger one is sent from its own memory, and sent again from there
// over a connection that replaces a broken one. So it must not be changed until the call completes
// or, in a reply or a one-way request, until the receiver has acknowledged it: later than SendDone,
// which tells that a transport has passed it on.
inline constexpr std::size_t kSnapshotBytes = std::size_t{64} << 10;

// How dtypes are called on the wire. Throw Error(invalid_argument) for one that cannot be sent,
// Error(protocol) for a code that no dtype has.
[[nodiscard]] std::uint8_t wire_dtype(at::ScalarType dtype);
[[nodiscard]] at::ScalarType dtype_of_wire(std::uint8_t code);
inline constexpr std::size_t kMaxWireDims = 64;

// Writes the descriptors and buffers of message.tensors, which are on the CPU. Throws
// Error(invalid_argument) naming the tensor's layout, dtype or device when it cannot be sent.
// REQUIRES: the body is ended.
void encode_tensors(OutMessage& message);
// The same with what stands for them on the CPU: the tensor itself, or a copy whose memory only the
// message keeps. `complete`: copies have their bytes now; else they have them when the message is
// sent.
void encode_copies(OutMessage& message, const std::vector<at::Tensor>& copies, bool complete);

// Fills message.tensors, on the CPU, unless the message has an arrival: then they are complete, or
// its error is thrown. Descriptors are checked against the buffers that arrived, each of which is
// used once; Error(protocol) when they disagree. Large dense tensors use the received memory
// without a copy, so that the time is that of copying the frame and, for sparse and bool tensors,
// of inspecting what arrived.
void decode_tensors(InMessage& message);

// Whether decoding the message (tensors and body) may take longer than a reader thread, which
// serves all connections, should spend on one message: it has to look at more than
// kQuicklyDecodedBytes.
inline constexpr std::size_t kQuicklyDecodedBytes = std::size_t{256} << 10;
[[nodiscard]] bool takes_long_to_decode(const InMessage& message) noexcept;

}  // namespace stitch::rpc
