// Who runs the nodes of a pass: the thread in backward(), or the one that read what makes them
// ready.
#include <optional>
#include <utility>

#include "stitch/dist_autograd/collected_work.h"
#include "stitch/dist_autograd/pass.h"
#include "stitch/rpc/agent/torch_state.h"
#include "stitch/rpc/future/thread_pool.h"

namespace stitch::dist_autograd {

void Pass::begin(std::vector<at::Tensor> gradients, Promise<void> done,
                 rpc::Clock::time_point deadline) {
  done.on_cancel([weak = weak_from_this()] {
    if (const auto pass = weak.lock())
      pass->abort(Error(ErrorCode::cancelled, "backward was cancelled"));
  });
  std::optional<Error> over;
  {
    base::MutexLock lock(mutex_);
    begun_ = rpc::Clock::now();
    if (!protocol_.running()) over = error_;
    if (!over) promise_ = done;
    if (!over && deadline != rpc::Clock::time_point::max()) {
      timer_ = agent_->loop().call_at(deadline, [weak = weak_from_this()] {
        if (const auto pass = weak.lock()) pass->expire();
      });
    }
  }
  if (over) {
    done.set_error(*over);
    strand_->start();
    return;
  }
  guard([&] {
    for (std::size_t i = 0; i < gradients.size(); ++i) strand_->seed(i, std::move(gradients[i]));
  });
  strand_->start();  // also after an error: a pass that was aborted ends on its strand
}

void Pass::begin_and_drive(std::vector<at::Tensor> gradients, Promise<void> done,
                           rpc::Clock::time_point deadline) {
  std::optional<rpc::FreshTorchState> fresh;  // for the messages that this thread handles
  if (!rpc::has_fresh_torch_state()) fresh.emplace();
  CollectedWork work(*this);
  driven_ = true;
  begin(std::move(gradients), std::move(done), deadline);
  for (;;) {
    driver_wanted_.clear();
    work.run();
    {
      base::MutexLock lock(mutex_);
      if (protocol_.ended()) return;
    }
    const BlockingRegion blocking;
    if (!agent_->poll(driver_wanted_, rpc::Clock::time_point::max())) return;
  }
}

void Pass::execute(c10::Device device, base::UniqueFunction<void()> slice) {
  // What a node of a device has made ready on the CPU does not wait for a user-function thread:
  // all of them may wait for this pass.
  const bool on_device_thread =
      plan_->devices() > 1 && agent_->serves_here() && !agent_->pool().on_pool_thread();
  if (!device.is_cpu() || on_device_thread)
    return agent_->post_for_device(device, std::move(slice));
  if (!CollectedWork::take(*this, slice)) agent_->post_where_read(std::move(slice));
}

void Pass::wait_until_quiet() {
  prepare();
  if (strand_->running_on_this_thread()) return;
  const BlockingRegion blocking;
  base::MutexLock lock(mutex_);
  while (!protocol_.ended()) changed_.wait(mutex_);
}

Pass::Progress Pass::progress() {
  Progress progress;
  progress.opened = opened_;
  base::MutexLock lock(mutex_);
  const auto& awaited = protocol_.awaited();
  progress.awaited.assign(awaited.begin(), awaited.end());
  if (!built_) return progress;
  progress.nodes_run = strand_->nodes_run();
  progress.thread = strand_->thread();
  return progress;
}

}  // namespace stitch::dist_autograd
