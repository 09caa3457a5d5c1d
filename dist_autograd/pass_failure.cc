// How a pass fails: on this worker, and how the others hear of it.
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/name_list.h"
#include "stitch/dist_autograd/engine.h"
#include "stitch/dist_autograd/pass.h"
#include "stitch/rpc/message/life_text.h"

namespace stitch::dist_autograd {

void Pass::abort(const Error& error) noexcept {
  const auto self = shared_from_this();  // the failure may take it out of its context
  std::set<WorkerId> told;
  ContextState::FailEffects effects;
  {
    base::MutexLock lock(mutex_);
    if (!protocol_.running()) return;
    told = protocol_.concerned();
    // Under the lock, so that a pass that succeeds here has not failed its context.
    effects = context_->fail(error);
    error_ = effects.error;
    protocol_.fail();
  }
  engine_.spread_failure(*context_, header(), std::move(told), std::move(effects));
  stop_strand();
}

void Pass::stop_strand() noexcept {
  prepare();
  if (!root()) strand_->start();  // the root's is started by begin(), which may be seeding it
  strand_->stop();
}

void Pass::on_peer_lost(const WorkerInfo& peer, const Error& reason) {
  const rpc::Life* const present = agent_->peers().life(peer.id);
  {
    base::MutexLock lock(mutex_);
    if (!protocol_.needs(peer.id)) return;
    if (present != nullptr && lives_.is_former(peer, present->info().epoch)) return;
  }
  const Error gone =
      rpc::life_gone(peer, std::string(": ") + reason.what(), rpc::LifeName::with_id);
  abort(Error(gone.code(), std::string("backward cannot go on: ") + gone.what())
            .with_worker(peer.name));
}

void Pass::expire() {
  const Progress found = progress();
  std::vector<std::string> waiting;
  for (const WorkerId id : found.awaited)
    waiting.push_back(stitch::to_string(agent_->peers().find(id)));
  rpc::Clock::time_point begun;
  {
    base::MutexLock lock(mutex_);
    begun = begun_;
  }
  agent_->dumps().on_timeout("backward timed out", engine_.table_of({shared_from_this()}));
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(rpc::Clock::now() - begun).count();
  abort(Error(ErrorCode::timeout,
              "backward timed out after " + std::to_string(ms) + " ms" +
                  (waiting.empty() ? std::string() : "; not done: " + base::join_names(waiting))));
}

void Pass::done_not_sent(const Error& error) {
  std::set<WorkerId> told;
  {
    base::MutexLock lock(mutex_);
    told = protocol_.concerned();
  }
  engine_.fail_context(*context_, header(), found_here(error), std::move(told));
}

}  // namespace stitch::dist_autograd
