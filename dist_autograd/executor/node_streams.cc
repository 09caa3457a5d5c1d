#include "stitch/dist_autograd/executor/node_streams.h"

#include <algorithm>
#include <utility>

namespace stitch::dist_autograd {

std::optional<c10::Stream> node_stream(const Node& node, c10::Device device) {
  for (std::uint32_t i = 0; i < node.num_inputs(); ++i) {
    const auto& metadata = node.input_metadata(i);
    if (metadata.device() == device) return metadata.stream();
  }
  return std::nullopt;
}

NodeStreams::NodeStreams(const Node& node) {
  for (std::uint32_t i = 0; i < node.num_inputs(); ++i) {
    const auto& metadata = node.input_metadata(i);
    const c10::Device device = metadata.device();
    if (!is_queued(device)) continue;
    const bool known = std::any_of(streams_.begin(), streams_.end(),
                                   [&](const auto& each) { return each.device() == device; });
    if (!known) streams_.push_back(metadata.stream());
  }
  if (streams_.empty()) return;
  outer_.reserve(streams_.size() - 1);
  first_.reset_stream(streams_.front());
  for (std::size_t i = 1; i < streams_.size(); ++i) {
    const c10::impl::VirtualGuardImpl device(streams_[i].device_type());
    outer_.push_back(device.exchangeStream(streams_[i]));
  }
}

void NodeStreams::leave() noexcept {
  for (const c10::Stream& stream : outer_)
    c10::impl::VirtualGuardImpl(stream.device_type()).exchangeStream(stream);
  outer_.clear();
  first_.reset();
}

void NodeStreams::leave_with(const variable_list& made) {
  std::vector<std::pair<const at::Tensor*, c10::Stream>> producers;
  for (const at::Tensor& each : made) {
    if (each.defined() && is_on_device(each))
      producers.emplace_back(&each, current_stream(each.device()));
  }
  leave();
  for (const auto& [tensor, producer] : producers) {
    const c10::Stream own = current_stream(producer.device());
    order_streams(producer, own);
    keep_for(*tensor, own);
  }
}

// The order that libtorch's engine keeps since 2.8: earlier ones had the stream of the consumer
// wait as soon as a gradient was there, and with it all that this stream had to do for others.
void DeviceInputs::add(const Node& node, std::uint32_t index, std::uint32_t input, at::Tensor& slot,
                       at::Tensor gradient) {
  const c10::Stream producer = current_stream(gradient.device());
  const auto consumer = node_stream(node, gradient.device());
  std::vector<ReadyInput>& inputs = nodes_[index];
  const auto before = std::find_if(inputs.begin(), inputs.end(),
                                   [&](const ReadyInput& each) { return each.input == input; });
  ReadyPoint ready(producer);
  if (before == inputs.end()) {
    accumulate(slot, std::move(gradient));
  } else {
    ready = ReadyPoint(consumer.value_or(producer));
    order_streams(producer, ready.stream());
    before->ready.wait_on(ready.stream());
    keep_for(gradient, ready.stream());
    keep_for(slot, ready.stream());
    const c10::StreamGuard adding(ready.stream());
    // A gradient may have gone to several nodes, and a stream may be reading it for one that has
    // let go of it: only sums made here are added to in place.
    const at::Tensor not_in_place = before->sum ? at::Tensor() : slot;
    const at::Tensor as_it_came = gradient;
    accumulate(slot, std::move(gradient));
  }
  // The node will run under `consumer`, which orders the rest by itself.
  if (ready.stream() != consumer) ready.record();
  if (before == inputs.end()) {
    inputs.push_back({input, std::move(ready)});
  } else {
    before->ready = std::move(ready);
    before->sum = true;
  }
}

std::vector<ReadyInput> DeviceInputs::take(std::uint32_t index) {
  if (nodes_.empty()) return {};
  return std::exchange(nodes_[index], {});
}

void wait_for(const std::vector<ReadyInput>& points, const variable_list& inputs) {
  for (const ReadyInput& each : points) {
    const at::Tensor& gradient = inputs[each.input];
    const c10::Stream user = current_stream(gradient.device());
    each.ready.wait_on(user);
    keep_for(gradient, user);
  }
}

}  // namespace stitch::dist_autograd
