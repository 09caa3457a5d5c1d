#pragma once

#include <optional>
#include <string>

#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

// Tensors on the wire. A dense tensor of at most kSnapshotBytes is copied immediately, so the
// caller may change it; a larger one is sent from its own memory, and sent again from there over a
// connection that replaces a broken one. So it must not be changed until the call completes or, in
// a reply or a one-way request, until the receiver has acknowledged it: later than SendDone, which
// tells that a transport has passed it on.
//
// The properties of a tensor (those of c10::TensorImpl), and what becomes of each:
//   dtype                     kept; quantized and bit types are refused
//   sizes                     kept; at most kMaxWireDims
//   strides                   a dense tensor keeps the order of its dimensions in memory
//                             (channels_last stays), gaps are not sent; an expanded dimension is
//                             sent once and is expanded again
//   storage, its offset       the bytes that the tensor covers, never the whole storage; tensors
//                             that share memory arrive apart; pinned memory does not stay pinned
//   layout                    dense and sparse COO (is_coalesced() stays); any other is refused
//   device                    CPU and CUDA, by device map or on(); any other is refused
//   requires_grad             kept
//   grad_fn, grad, hooks      stay here: they are this process's graph. In a Context a call records
//                             the link to it
//   conj, neg, zero bits      the values are kept: they are computed, and the bits cleared
//   wrapped number            kept on the CPU (a number in the promotion of types)
//   inference tensor          arrives as an ordinary one
//   names of dimensions       refused
//   tangent (forward mode)    refused
//   wrappers (vmap, functorch, functionalize, nested, Python subclasses)  refused
//   undefined                 stays undefined
inline constexpr std::size_t kSnapshotBytes = std::size_t{64} << 10;

// How dtypes are called on the wire. Throw Error(invalid_argument) for one that cannot be sent,
// Error(protocol) for a code that no dtype has.
[[nodiscard]] std::uint8_t wire_dtype(at::ScalarType dtype);
[[nodiscard]] at::ScalarType dtype_of_wire(std::uint8_t code);
inline constexpr std::size_t kMaxWireDims = 64;

// Bytes from the first to behind the last element; nullopt when that, or the number of elements,
// overflows.
[[nodiscard]] std::optional<std::size_t> spanned_bytes(at::IntArrayRef sizes,
                                                       at::IntArrayRef strides, std::size_t item);
// Whether a tensor has more elements than it spans, which no sender makes: an operation on it would
// take more memory than has arrived. Dimensions of stride 0, which expand() makes, do not count.
// REQUIRES: spanned_bytes() is known and not 0.
[[nodiscard]] bool overlaps(at::IntArrayRef sizes, at::IntArrayRef strides);

// Throws Error(invalid_argument), naming the property, for a tensor that has one that is refused
// above, or less memory than it needs.
void expect_sendable(const at::Tensor& tensor);
// "its storage has 0 of 400 bytes", of a dense tensor whose storage is too short or was freed.
[[nodiscard]] std::optional<std::string> missing_memory(const at::Tensor& tensor);

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
