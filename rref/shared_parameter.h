#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <shared_mutex>

#include "stitch/base/mutex.h"

namespace stitch::rref {

// The state of a parameter that the optimizers and checkpoints of this process share. Lives as long
// as its last owner. Thread contract: any thread.
struct SharedParameter {
  base::Mutex mutex;                 // parameter_lock()
  std::shared_mutex readers;         // nodes of backward passes; after `mutex`
  std::atomic<bool> detects{false};  // some optimizer keeps steps off them
  // The clock of steps (optimizer_steps) after the last ones.
  std::deque<std::uint64_t> steps STITCH_GUARDED_BY(mutex);
  at::Tensor master STITCH_GUARDED_BY(mutex);  // its copy in fp32; undefined: none
  // Of the parameter, when the master was last its own.
  std::uint32_t version STITCH_GUARDED_BY(mutex) = 0;
  const void* memory STITCH_GUARDED_BY(mutex) = nullptr;
};

// That of a parameter.
[[nodiscard]] std::shared_ptr<SharedParameter> shared_parameter(const at::Tensor& parameter);
// The same; null when it has none.
[[nodiscard]] std::shared_ptr<SharedParameter> find_shared_parameter(const at::Tensor& parameter);

}  // namespace stitch::rref
