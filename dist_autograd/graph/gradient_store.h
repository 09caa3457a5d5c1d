#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <unordered_map>
#include <unordered_set>

#include "stitch/base/mutex.h"
#include "stitch/dist_autograd/graph/device_order.h"
#include "stitch/dist_autograd/graph/gradient_map.h"

namespace stitch::dist_autograd {

// The gradients of one context on one worker: what `.grad` is for a local backward. Passes add,
// readers take snapshots. On devices, both work on their thread's current streams: each addition
// and each reader waits there for the addition before it, and for nothing else. Thread contract:
// any thread; each of 16 shards has its own mutex, held during one addition
// or change. Lock order: innermost.
class GradientStore {
 public:
  // Adds `grad` to the gradient of `variable` by the rules of AccumulateGrad under the current grad
  // mode. With grad mode off, takes `grad` over instead of copying when nothing else can see its
  // memory. `references`: how many handles the caller knowingly holds on `grad`, this one included.
  void accumulate(const at::Tensor& variable, at::Tensor&& grad, std::size_t references = 1);

  // What replaces a gradient; it is given the one there is, undefined when there is none, and must
  // not change it. An undefined result drops it.
  using Change = std::function<at::Tensor(const at::Tensor& gradient)>;
  // Replaces the gradient of `variable`, or all there are. As an addition on devices.
  void change(const at::Tensor& variable, const Change& how);
  void change_all(const Change& how);

  // The gradient so far, or an undefined tensor. A tensor that was returned is never changed
  // afterwards.
  [[nodiscard]] at::Tensor find(const at::Tensor& variable) const;
  [[nodiscard]] GradientMap snapshot() const;
  [[nodiscard]] std::size_t size() const;
  // Drops everything: gradients made with create_graph hold graphs, which hold nodes.
  void clear();

 private:
  // Of a sum on a device.
  struct OnDevice {
    ReadyPoint ready;
    // A stream may be reading it for who has let go of it: a reader, or another node that got the
    // gradient. Then it is added to out of place.
    bool shared = false;
  };
  struct Shard {
    mutable base::Mutex mutex;
    GradientMap gradients STITCH_GUARDED_BY(mutex);
    // By the variable, which `gradients` keeps.
    std::unordered_map<const c10::TensorImpl*, OnDevice> on_devices STITCH_GUARDED_BY(mutex);
  };
  static at::Tensor changed(Shard& shard, const at::Tensor& variable, const at::Tensor& kept,
                            const Change& how) STITCH_REQUIRES(shard.mutex);
  // Has the current stream of the reader's thread wait for `gradient`, the sum of `variable`.
  static void hand_to_reader(Shard& shard, const at::Tensor& variable, const at::Tensor& gradient)
      STITCH_REQUIRES(shard.mutex);
  [[nodiscard]] Shard& shard_of(const at::Tensor& variable) const {
    return shards_[(TensorHash{}(variable) >> 6) % kShards];
  }

  static constexpr std::size_t kShards = 16;
  mutable std::array<Shard, kShards> shards_;
};

// Leaves, by their TensorImpl.
using LeafSet = std::unordered_set<const c10::TensorImpl*>;

}  // namespace stitch::dist_autograd
