#pragma once

#include <vector>

#include "stitch/base/unique_function.h"
#include "stitch/dist_autograd/protocol/messages.h"

namespace stitch::dist_autograd {

class Pass;

// Work of one pass that comes up on this thread while the thread cannot do it: while it handles a
// message of the pass, or polls for one. The thread does it afterwards, instead of waking another
// one. Lives on the stack of that thread; they nest, and only the innermost collects. Thread
// contract: its own thread only.
class CollectedWork {
 public:
  // Collects until the end of the block, except within run(). Keeps a reference to `pass`.
  explicit CollectedWork(Pass& pass) noexcept;
  // Does what is left.
  ~CollectedWork();
  CollectedWork(const CollectedWork&) = delete;
  CollectedWork& operator=(const CollectedWork&) = delete;

  // Takes `task` if this thread collects work of that pass now; leaves it otherwise.
  [[nodiscard]] static bool take(const Pass& pass, base::UniqueFunction<void()>& task);
  // Whether this thread collects work of the pass that a message names.
  [[nodiscard]] static bool collects(const wire::PassHeader& header) noexcept;
  // Whether it collects work of any pass.
  [[nodiscard]] static bool collects() noexcept;
  // The same, for a message of that pass. REQUIRES: collects(its header).
  static void add(base::UniqueFunction<void()> task);

  // Does what has been collected, as a thread of the pool would: with no worker or context current.
  void run() noexcept;

 private:
  Pass& pass_;
  std::vector<base::UniqueFunction<void()>> tasks_;
  CollectedWork* const outer_;
};

}  // namespace stitch::dist_autograd
