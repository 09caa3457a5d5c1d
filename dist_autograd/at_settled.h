#pragma once

namespace stitch::dist_autograd {

// What a layer above does when a pass is settled: every node that the pass will ever run has run,
// on every worker, so that all its gradients are complete and nothing is left that could fail but
// the workers themselves. Only then may parameters be stepped: a pass that fails leaves them as
// they are. The root worker knows it one round of messages before the pass has ended. It does not
// know it before the end for a pass with results that the loss does not use; then nothing of this
// is called. Shared by the pass and the layer that made it. Thread contract: one call of
// announce(), followed by one of run(), on the same thread, whichever it is; no lock is held. The
// pass may end, well or not, while run() runs, but not before announce() has returned.
class AtSettled {
 public:
  virtual ~AtSettled() = default;
  // The pass is settled; run() follows.
  virtual void announce() noexcept = 0;
  // `running`: false when the pass has failed by now. Must not wait: the pass may need this thread.
  // Libtorch's state of a new thread; no worker is current.
  virtual void run(bool running) noexcept = 0;
};

}  // namespace stitch::dist_autograd
