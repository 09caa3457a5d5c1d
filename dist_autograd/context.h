#pragma once

#include <ATen/core/Tensor.h>
#include <concepts>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/dist_autograd/graph/gradient_map.h"
#include "stitch/dist_autograd/graph/ids.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/future/future.h"
#include "stitch/rref/rref.h"

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
  // all workers, and adds the gradients to this context; `.grad` is not changed. Waits for the end
  // on all workers. Throws Error(invalid_argument) for invalid roots or options, before anything
  // runs; else the first error of any worker, which fails the context and all its passes. Warnings
  // of nodes of this worker go to this thread's handler, those of other workers to their own.
  // Anomaly mode of this process counts on all workers.
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
  // Multiplies the gradients of all workers by `factor`: the mean of n passes has 1.0 / n. Waits.
  // While it runs, no pass and no step of the context may. Throws what throw_if_unusable() does;
  // the error of a worker that could not do it fails the context.
  void scale_gradients(double factor) const;
  // Replaces the gradient of a leaf of this worker by a copy of `gradient`; undefined: the leaf has
  // none. Throws Error(invalid_argument) for one of other sizes, dtype or device than the leaf.
  void set_gradient(const at::Tensor& leaf, const at::Tensor& gradient) const;
  // For layers above: replaces that of a leaf by what `how` makes of it (undefined when it has
  // none), which runs under a lock and must not change its argument.
  void change_gradient(const at::Tensor& leaf,
                       const std::function<at::Tensor(const at::Tensor& gradient)>& how) const;
  // Likewise: how many steps optimizers had made of parameters of this worker when the context
  // reached it.
  [[nodiscard]] std::uint64_t steps_before() const noexcept;
  // Likewise: fails the context everywhere, as a pass that fails does.
  void fail(const Error& error) const;
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
// construction to destruction on the constructing thread, and in what started under it), calls
// carry it, and tensors they carry are recorded, unless grad mode is off, which travels, too.
// Contexts nest per thread. Autocast travels with every call; hooks for saved tensors and anomaly
// mode do not. Nodes of backward passes run under the state of a new thread, with the worker of the
// pass current; hooks must be safe to run from several passes concurrently. libtorch's backward()
// in a node is an error: what it recomputes it differentiates with torch::autograd::grad().
// Belongs to the worker that was current when it was made; its end frees what it owns on every
// worker that took part. Thread contract: as ContextHandle; made and destroyed by one thread (or
// one coroutine).
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

namespace stitch {

namespace dist_autograd {

// Runs backward from the tensor that `root` refers to, on its owner. The future completes as that
// of ContextHandle::backward_async(); cancelling it ends the pass. Throws as
// ContextHandle::throw_if_unusable(), and Error(invalid_argument) when options.inputs is not empty.
// REQUIRES: `context` is one of the current worker. Any thread.
[[nodiscard]] Future<void> backward_async(const RRef<at::Tensor>& root,
                                          const ContextHandle& context,
                                          const Options& options = {});

}  // namespace dist_autograd

template <class T>
void RRef<T>::backward(dist_autograd::Context& context) const requires std::same_as<T, at::Tensor> {
  dist_autograd::backward_async(*this, context).get();
}

}  // namespace stitch
