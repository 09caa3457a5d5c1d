#include "stitch/rpc/future/stop_flag.h"

#include <utility>

namespace stitch::rpc {

void StopFlag::request(const std::shared_ptr<Runtime>& runtime, detail::ToStop& more,
                       bool with_work) {
  std::optional<std::stop_source> source;
  std::shared_ptr<detail::FutureStateBase> awaited;
  {
    base::MutexLock lock(mutex_);
    if (!requested_.exchange(true, std::memory_order_acq_rel)) source = source_;
    if (with_work) {
      to_pass_on_ = true;
      awaited = awaited_.lock();
    }
  }
  if (source && runtime) {
    runtime->run_stop([source = std::move(*source), awaited = std::move(awaited)]() mutable {
      source.request_stop();
      detail::FutureStateBase::stop({awaited});
    });
    return;
  }
  if (source) source->request_stop();
  more.push_back(std::move(awaited));
}

std::stop_token StopFlag::token() {
  base::MutexLock lock(mutex_);
  if (!source_) {
    source_.emplace();
    if (requested()) source_->request_stop();  // it has no callbacks yet
  }
  return source_->get_token();
}

bool StopFlag::awaits(const std::shared_ptr<detail::FutureStateBase>& state) {
  base::MutexLock lock(mutex_);
  awaited_ = state;
  return to_pass_on_;
}

void StopFlag::resumed(bool with_error) {
  base::MutexLock lock(mutex_);
  awaited_.reset();
  if (with_error) to_pass_on_ = false;
}

}  // namespace stitch::rpc
