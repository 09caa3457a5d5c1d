#include "stitch/rpc/agent/torch_state.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace stitch::rpc {

namespace {

// The state of a new thread: grad mode on, no guards.
const at::ThreadLocalState& fresh_thread_state() {
  static const at::ThreadLocalState state = [] {
    std::optional<at::ThreadLocalState> fresh;
    std::thread([&fresh] { fresh.emplace(); }).join();
    return *fresh;
  }();
  return state;
}

}  // namespace

bool has_fresh_torch_state() {
  // Equal on all new threads.
  static const auto fresh = [] {
    const at::ThreadLocalStateGuard guard(fresh_thread_state());
    return c10::impl::tls_local_dispatch_key_set();
  }();
  const auto now = c10::impl::tls_local_dispatch_key_set();
  return StreamSet::current() == nullptr && at::GradMode::is_enabled() &&
         !c10::InferenceMode::is_enabled() && now.included_ == fresh.included_ &&
         now.excluded_ == fresh.excluded_;
}

FreshTorchState::FreshTorchState() {
  if (const auto current = StreamSet::current()) [[unlikely]] {
    std::vector<c10::Stream> defaults;
    for (const auto& stream : current->streams())
      defaults.push_back(c10::impl::VirtualGuardImpl(c10::kCUDA).getDefaultStream(stream.device()));
    streams_.emplace(std::make_shared<const StreamSet>(std::move(defaults)));
  }
  guard_.emplace(fresh_thread_state());
}

}  // namespace stitch::rpc
