#include "tests/dist_autograd/remote_parts.h"
#include "stitch/rpc/agent/agent.h"

#include <map>
#include <mutex>

namespace stitch::testing {

at::Tensor own_parameter() {
  static std::mutex mutex;
  static std::map<std::uint32_t, at::Tensor> all;
  const auto id = rpc::current_agent()->self().id.value();
  const std::lock_guard lock(mutex);
  at::Tensor& parameter = all[id];
  if (!parameter.defined())
    parameter = (at::arange(1, 4, at::kDouble) + static_cast<double>(10 * id)).requires_grad_();
  return parameter;
}

at::Tensor times_parameter(at::Tensor x) { return x * own_parameter(); }

at::Tensor via(std::vector<std::string> path, at::Tensor x) {
  if (path.empty()) return times_parameter(x);
  const std::string next = path.front();
  path.erase(path.begin());
  return rpc_sync<via>(next, path, times_parameter(x));
}

at::Tensor gradient_on(Worker& worker, const dist_autograd::ContextId& context) {
  const WorkerScope scope(worker);
  try {
    return dist_autograd::find_context(context).gradient(own_parameter());
  } catch (const Error&) {
    return {};
  }
}

std::optional<Error> refusal_on(Worker& worker, const dist_autograd::ContextId& context) {
  const WorkerScope scope(worker);
  try {
    const auto handle = dist_autograd::find_context(context);
    static_cast<void>(handle.gradient(own_parameter()));
    static_cast<void>(handle.gradients());
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

bool refuses(Worker& worker, const dist_autograd::ContextId& context, ErrorCode code,
             const std::string& text) {
  return eventually([&] {
    const auto refusal = refusal_on(worker, context);
    return refusal && refusal->code() == code &&
           std::string(refusal->what()).find(text) != std::string::npos;
  });
}

bool nothing_is_left(Cluster& cluster) {
  return eventually([&] {
    for (int i = 0; i < cluster.size(); ++i) {
      for (const char* what : {"contexts", "passes", "links", "gradients"}) {
        if (count_on(cluster[i], what) != 0) return false;
      }
    }
    return true;
  });
}

}  // namespace stitch::testing
