#include "stitch/dist_autograd/context.h"

#include <ATen/core/grad_mode.h>

#include <stop_token>

#include "stitch/rpc/calls.h"

namespace stitch::dist_autograd {

namespace detail {

// On the owner, under the context of the call. A failed pass is a result: its error keeps its code
// and worker that way.
Future<std::optional<Error>> backward_on_owner(RRef<at::Tensor> root, Options options) {
  try {
    const std::vector<at::Tensor> roots(1, co_await root.to_here_async());
    const Future<void> pass = current_context().backward_async(roots, options);
    // The caller no longer waits for the pass, so it must not add to the context any more.
    const std::stop_callback cancel(current_stop_token(), [&pass] { pass.cancel(); });
    co_await pass;
  } catch (const Error& error) {
    co_return std::optional<Error>(error);
  }
  co_return std::optional<Error>();
}

}  // namespace detail

Future<void> backward_async(const RRef<at::Tensor>& root, const ContextHandle& context,
                            const Options& options) {
  context.throw_if_unusable();  // the owner may not know it yet
  if (!options.inputs.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "backward from an RRef cannot take inputs: they are leaves of the worker that owns "
                "the root; call backward() there");
  }
  const ContextScope scope(context.id());
  const at::AutoGradMode on(true);  // the pass may make a graph
  // The call itself must not time out: only the pass's own limit counts.
  return rpc_async<detail::backward_on_owner>(
             {.to = root.owner(), .timeout = std::chrono::nanoseconds(0)}, root, options)
      .then([](const std::optional<Error>& error) {
        if (error) throw *error;
      });
}

}  // namespace stitch::dist_autograd
