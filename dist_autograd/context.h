#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/dist_autograd/graph/gradient_map.h"
#include "stitch/dist_autograd/graph/ids.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/future/future.h"

namespace stitch::rpc {
class Agent;
}  // namespace stitch::rpc

namespace stitch::dist_autograd {

class AtSettled;

class ContextState;

// Of a backward pass.
struct Options {
  bool retain_graph = false;  // keep what the graph saved, for another backward over it
  std::vector<at::Tensor>
      grads{};  // gradients of the roots; undefined or left out: 1 for a root of one element
  bool create_graph = false;            // gradients can be differentiated again
  std::chrono::nanoseconds timeout{0};  // for the whole pass; 0: none
  // Leaves of this worker: only they get gradients, no other leaf here and none on other workers.
  // Nodes that lead neither to them nor to another worker do not run. Empty: all leaves.
  std::vector<at::Tensor> inputs{};
  // All but `inputs`, which mean something only on their own worker.
  template <class Archive>
  void serialize(Archive& archive) {
    archive(retain_graph, grads, create_graph, timeout);
  }
};

// A context as seen from one worker, without owning it. Copyable; may outlive the context, then
// everything throws Error(cancelled). Once a pass of the context has failed, everything except id()
// and graph_dot() throws the error that failed it, on every worker of the context: leaves add to
// the context as they run, so a failed pass leaves partial sums. Thread contract: any thread.
class ContextHandle {
 public:
  // For the layers above; others get one from current_context() or find_context().
  ContextHandle(std::shared_ptr<rpc::Agent> agent, std::shared_ptr<ContextState> state)
      : agent_(std::move(agent)), state_(std::move(state)) {}

  // Sendable; context_scope() and find_context() take it.
  [[nodiscard]] const ContextId& id() const noexcept;
  // Differentiates `roots` (tensors of this worker) with respect to every leaf they depend on, on
  // all workers, and adds the gradients to this context. Waits until that has ended on all workers.
  // Throws Error(invalid_argument) for invalid roots or options, before anything runs;
  // else the first error of any worker, and then the context has failed: make a new one and run
  // forward again. `.grad` is not changed. Several passes may run at the same time; when one
  // fails, so do the others. Warnings of libtorch (TORCH_WARN) that nodes of this worker raise are
  // given to this thread's handler before this returns or throws, in order; those of other workers
  // go to their processes' own handlers, not to this worker. In libtorch's anomaly mode NaN that a
  // node returns is an error (unless the mode allows it), and the worker of a node that fails warns
  // with the stack of the forward that made it. The mode of this process counts, on all workers,
  // but that stack is known only where it was on in the node's own process during forward.
  void backward(std::vector<at::Tensor> roots, const Options& options = {}) const;
  // The same without waiting. Cancelling the future ends the pass; the context has failed then.
  // Warnings go to the process's own handler on every worker.
  [[nodiscard]] Future<void> backward_async(std::vector<at::Tensor> roots,
                                            const Options& options = {}) const;
  // backward() for layers above: with what to do as soon as the gradients are complete on all
  // workers, while the pass is still being ended.
  void backward(std::vector<at::Tensor> roots, const Options& options,
                std::shared_ptr<AtSettled> at_settled) const;
  // Likewise backward_async().
  [[nodiscard]] Future<void> backward_async(std::vector<at::Tensor> roots, const Options& options,
                                            std::shared_ptr<AtSettled> at_settled) const;
  // Copies of the gradients of this worker's leaves so far: later passes do not change them, and
  // what they are changed to changes no step.
  [[nodiscard]] GradientMap gradients() const;
  // That of one leaf, undefined when it has none.
  [[nodiscard]] at::Tensor gradient(const at::Tensor& leaf) const;
  // The same without a copy, for layers above, which must not change it.
  [[nodiscard]] at::Tensor stored_gradient(const at::Tensor& leaf) const;
  // The graph of all workers as Graphviz: the graph behind all sent tensors and `roots`, a colour
  // per worker, joined at the links, with the bytes and the times of the pass that ended last on
  // this worker (where none has, on another); what that pass did not use is grey. Waits.
  [[nodiscard]] std::string graph_dot(const std::vector<at::Tensor>& roots = {}) const;
  // Throws Error(cancelled) when the context has ended, and its error when a pass of it has failed.
  void throw_if_unusable() const;

 protected:
  std::shared_ptr<rpc::Agent> agent_;
  std::shared_ptr<ContextState> state_;
};

// The scope of one iteration of distributed training. While it is current on a thread (from
// construction to destruction on the constructing thread, and in the handlers, continuations and
// coroutines that started under it), calls carry it, and tensors they carry are recorded. Calls
// made with grad mode off carry it, too, and record nothing; they run with grad mode off, and what
// they return does not require grad. Contexts nest per thread; the innermost that has not ended is
// current. Autocast travels with every call, in a context or not: a handler, its continuations and
// the calls it makes run under the autocast of the caller (on or off, and the dtype, for the CPU
// and for CUDA), without libtorch's cache of casts. Hooks for saved tensors do not travel: they are
// code of one process. Neither does anomaly mode, which libtorch has on or off for a whole process:
// turn it on in each, before forward, to see where the nodes made there come from. With backward
// passes nothing of this travels but anomaly mode (ContextHandle::backward()): nodes run under the
// state of a new thread on all workers, so that a backward called under autocast runs outside of
// it. Hooks must be safe to run from several passes concurrently. The worker of a pass is current
// in its nodes and hooks. libtorch's backward() in one of them is an error: what a node recomputes
// (checkpointing) it differentiates with torch::autograd::grad(), and returns the gradients of
// parameters as those of its inputs. Belongs to the worker that
// was current when it was made. Its end frees what it owns on every worker that took part. Thread
// contract: as ContextHandle; made and destroyed by one thread (or one coroutine).
class Context : public ContextHandle {
 public:
  // Throws Error(invalid_argument) when no worker is current, Error(shutting_down) when it has shut
  // down.
  Context();
  // Backward passes that still run end with `cancelled`; waits for the node that is running here.
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

 private:
  explicit Context(std::shared_ptr<rpc::Agent> agent);
  std::shared_ptr<const void> outer_;
};

// Makes a context that this worker takes part in current on this thread for a block: for threads
// that the program starts itself.
class [[nodiscard]] ContextScope {
 public:
  // As context_scope(), which see.
  explicit ContextScope(const ContextId& id);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  std::shared_ptr<const void> outer_;
};
// Throws Error(invalid_argument) when the context is unknown to the current worker,
// Error(cancelled) when it has ended.
[[nodiscard]] inline ContextScope context_scope(const ContextId& id) { return ContextScope(id); }

// The context that is current on this thread. Throws Error(invalid_argument) when there is none,
// Error(cancelled) when it has ended (for example in a continuation that started under it).
[[nodiscard]] ContextHandle current_context();
// True when a context is current on this thread and has not ended.
[[nodiscard]] bool has_current_context() noexcept;
// A context that the current worker takes part in. Throws Error(invalid_argument) when it does not,
// Error(cancelled) when it has ended.
[[nodiscard]] ContextHandle find_context(const ContextId& id);
// The same for layers that use the gradients of a context: none when it never reached this worker.
// Throws Error(cancelled) when it has ended, and its error when a pass of it has failed.
[[nodiscard]] std::optional<ContextHandle> find_usable_context(const ContextId& id);

// As ContextHandle::backward_async on the current worker, which must take part in the context. For
// layers that start a pass where a tensor lives.
[[nodiscard]] Future<void> backward_async(const ContextId& context, std::vector<at::Tensor> roots,
                                          const Options& options = {});

namespace detail {
// Makes every agent take part in distributed autograd, also when the program uses nothing else of
// it.
int register_engine();
inline const int kEngineExtension = register_engine();
}  // namespace detail

}  // namespace stitch::dist_autograd
