#pragma once

#include <array>
#include <cstddef>
#include <unordered_map>
#include <unordered_set>

#include "stitch/base/mutex.h"
#include "stitch/dist_autograd/graph/device_order.h"
#include "stitch/dist_autograd/graph/gradient_map.h"

namespace stitch::dist_autograd {

// The gradients of one context on one worker: what `.grad` is for a local backward. Passes add,
// readers take snapshots. On devices, both work on their thread's current streams: each addition
// and each reader waits there for the addition before it, and for nothing else. Thread contract:
// any thread; each of 16 shards has its own mutex, held during one addition. Lock order: innermost.
class GradientStore {
 public:
  // Adds `grad` to the gradient of `variable` by the rules of AccumulateGrad under the current grad
  // mode. With grad mode off, takes `grad` over instead of copying when nothing else can see its
  // memory. `references`: how many handles the caller knowingly holds on `grad`, this one included.
  void accumulate(const at::Tensor& variable, at::Tensor&& grad, std::size_t references = 1);

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
