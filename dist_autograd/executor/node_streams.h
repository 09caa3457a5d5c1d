#pragma once

#include <c10/core/StreamGuard.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "stitch/dist_autograd/graph/compat.h"
#include "stitch/dist_autograd/graph/device_order.h"

namespace stitch::dist_autograd {

// The stream on which a node works with its gradients on `device`: that on which forward made the
// first of the tensors there that they belong to. None where it has none there.
[[nodiscard]] std::optional<c10::Stream> node_stream(const Node& node, c10::Device device);

// Makes the streams of a node current on this thread for a block, one for each device that it has
// gradients on; the first of these is the current device. For a node of the CPU it does nothing.
class NodeStreams {
 public:
  explicit NodeStreams(const Node& node);
  ~NodeStreams() { leave(); }
  NodeStreams(const NodeStreams&) = delete;
  NodeStreams& operator=(const NodeStreams&) = delete;

  [[nodiscard]] const std::vector<c10::Stream>& streams() const noexcept { return streams_; }
  // Ends the block. What the node has made is then ordered before what this thread's own streams
  // do with `made` from now on.
  void leave_with(const variable_list& made);

 private:
  void leave() noexcept;

  std::vector<c10::Stream> streams_;
  std::vector<c10::Stream> outer_;  // of all but the first
  c10::OptionalStreamGuard first_;
};

// An input of a node that waits on a device.
struct ReadyInput {
  std::uint32_t input;
  ReadyPoint ready;
  bool sum = false;  // of several, made here
};
// Has this thread's current streams, those of the node, wait for its inputs.
void wait_for(const std::vector<ReadyInput>& points, const variable_list& inputs);

// Gradients on devices that wait in the inputs of the nodes of a pass: each input has a point at
// which it is ready, and the node that gets it waits for that alone. Thread contract: for each
// node, one thread at a time.
class DeviceInputs {
 public:
  DeviceInputs() = default;
  explicit DeviceInputs(std::size_t nodes) : nodes_(nodes) {}
  // Adds `gradient`, which is on a device and made by what this thread's current stream there has
  // now, to `slot`, an input of `node`. They are added on the stream of the node.
  void add(const Node& node, std::uint32_t index, std::uint32_t input, at::Tensor& slot,
           at::Tensor gradient);
  // Those of a node that is to run.
  [[nodiscard]] std::vector<ReadyInput> take(std::uint32_t index);

 private:
  std::vector<std::vector<ReadyInput>> nodes_;
};

}  // namespace stitch::dist_autograd
