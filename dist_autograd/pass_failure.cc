// How a pass fails: on this worker, and how the others hear of it.
#include <chrono>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/name_list.h"
#include "stitch/dist_autograd/do_or_repeat.h"
#include "stitch/dist_autograd/engine.h"
#include "stitch/dist_autograd/pass.h"
#include "stitch/rpc/message/life_text.h"

namespace stitch::dist_autograd {

void Pass::abort(const Error& error) {
  do_or_repeat(*agent_, [self = shared_from_this(), error] {
    auto failing =
        std::make_shared<Engine::Failing>(Engine::Failing{self->context_, self->header()});
    {
      base::MutexLock lock(self->mutex_);
      if (!self->protocol_.running()) return;
      failing->told = self->protocol_.concerned();
      // Under the lock, so that a pass that succeeds here has not failed its context.
      failing->effects = self->context_->fail(error);
      self->error_ = failing->effects.error;
      self->protocol_.fail();
    }
    self->engine_.spread_failure(std::move(failing));
    do_or_repeat(*self->agent_, [self] { self->stop_strand(); });
  });
}

void Pass::stop_strand() {
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
  do_or_repeat(*agent_, [self = shared_from_this(), error] {
    std::set<WorkerId> told;
    {
      base::MutexLock lock(self->mutex_);
      told = self->protocol_.concerned();
    }
    self->engine_.fail_context(self->context_, self->header(), self->found_here(error),
                               std::move(told));
  });
}

}  // namespace stitch::dist_autograd
