#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "stitch/dist_autograd/executor/plan.h"
#include "stitch/dist_autograd/executor/strand.h"

namespace stitch::dist_autograd::testing {

// A graph cut into parts, one per imagined worker, and passes over it without a network: a cut
// makes a SendNode in one part and a RecvNode for the tensor in the next, and a pass moves
// gradients from strand to strand.
class LocalWorld {
 public:
  explicit LocalWorld(int parts, int threads = 2);
  ~LocalWorld();

  // What `tensor` of part `from` looks like after travelling: the same values, without the graph
  // behind them.
  at::Tensor cut(const at::Tensor& tensor, int from);
  std::vector<at::Tensor> cut(const std::vector<at::Tensor>& tensors, int from);

  struct Outcome {
    std::optional<Error> error;
    std::uint64_t nodes_run = 0;
    std::uint64_t gradients_sent = 0;
    std::vector<LinkId> links_sent;
  };
  struct Request {
    int part = 0;
    std::vector<at::Tensor> roots;
    std::vector<at::Tensor> seeds = {};
    RunFlags flags = {};
    Executor executor = {};  // default: a pool of threads
  };
  // Runs a pass to its end: everything resolved on all parts, or everything stopped after an error.
  Outcome backward(const Request& request);

  GradientStore& gradients(int part) { return *parts_[static_cast<std::size_t>(part)].gradients; }
  at::Tensor gradient(const at::Tensor& leaf, int part = 0) { return gradients(part).find(leaf); }

 private:
  friend class LocalPass;
  struct Part {
    std::vector<NodePtr> sends;
    std::shared_ptr<GradientStore> gradients = std::make_shared<GradientStore>();
  };
  void serve();

  std::vector<Part> parts_;
  std::uint64_t next_link_ = 1;
  base::Mutex mutex_;
  base::CondVar work_;
  std::deque<base::UniqueFunction<void()>> queue_ STITCH_GUARDED_BY(mutex_);
  bool closed_ STITCH_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

// The gradients that the local engine finds for `leaves`, as the reference. Unused ones are
// undefined.
std::vector<at::Tensor> stock_gradients(const std::vector<at::Tensor>& roots,
                                        const std::vector<at::Tensor>& leaves,
                                        const std::vector<at::Tensor>& seeds = {},
                                        bool retain_graph = true, bool create_graph = false);

// Undefined equals undefined; otherwise equal within 1e-12 relative, sparse ones after densifying.
::testing::AssertionResult same_gradient(const at::Tensor& got, const at::Tensor& expected);

}  // namespace stitch::dist_autograd::testing
