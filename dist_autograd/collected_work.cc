#include "stitch/dist_autograd/collected_work.h"

#include <optional>
#include <utility>

#include "stitch/base/callback_scope.h"
#include "stitch/dist_autograd/pass.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/future/thread_pool.h"

namespace stitch::dist_autograd {

namespace {

constinit thread_local CollectedWork* collecting = nullptr;  // null also within run()

}  // namespace

CollectedWork::CollectedWork(Pass& pass) noexcept
    : pass_(pass), outer_(std::exchange(collecting, this)) {}

CollectedWork::~CollectedWork() {
  run();
  collecting = outer_;
}

bool CollectedWork::take(const Pass& pass, base::UniqueFunction<void()>& task) {
  if (collecting == nullptr || &collecting->pass_ != &pass) return false;
  add(std::move(task));
  return true;
}

bool CollectedWork::collects() noexcept { return collecting != nullptr; }

bool CollectedWork::collects(const wire::PassHeader& header) noexcept {
  return collecting != nullptr && collecting->pass_.is(header);
}

void CollectedWork::add(base::UniqueFunction<void()> task) {
  collecting->tasks_.push_back(std::move(task));
  collecting->pass_.wake_driver();
}

void CollectedWork::run() noexcept {
  if (tasks_.empty()) return;
  CollectedWork* const here = std::exchange(collecting, nullptr);
  const rpc::ExecutionContextScope nothing_current({});
  // Nodes of a pass may begin calls while the worker shuts down, on a thread of the user, too.
  std::optional<base::CallbackScope> callbacks;
  if (!rpc::ThreadPool::on_any_pool_thread()) callbacks.emplace();
  for (auto& task : std::exchange(tasks_, {})) task();
  collecting = here;
}

}  // namespace stitch::dist_autograd
