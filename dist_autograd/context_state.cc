#include "stitch/dist_autograd/context_state.h"

#include "stitch/dist_autograd/pass.h"

namespace stitch::dist_autograd {

bool ContextState::ended() const {
  MutexLock lock(mutex_);
  return ended_;
}

bool ContextState::add_send(LinkId link, NodePtr node, bool of_gradients) {
  MutexLock lock(mutex_);
  if (ended_) return false;
  sends_[link] = {std::move(node), of_gradients};
  if (of_gradients) ++gradient_links_;
  return true;
}

void ContextState::remove_send(LinkId link) {
  Send removed;
  MutexLock lock(mutex_);
  const auto found = sends_.find(link);
  if (found == sends_.end()) return;
  removed = std::move(found->second);
  sends_.erase(found);
  if (removed.of_gradients) --gradient_links_;
  lock.unlock();
}

std::vector<NodePtr> ContextState::sends() const {
  MutexLock lock(mutex_);
  std::vector<NodePtr> nodes;
  nodes.reserve(sends_.size());
  for (const auto& [link, send] : sends_) nodes.push_back(send.node);
  return nodes;
}

std::size_t ContextState::send_count() const {
  MutexLock lock(mutex_);
  return sends_.size();
}

bool ContextState::has_gradient_links() const {
  MutexLock lock(mutex_);
  return gradient_links_ != 0;
}

bool ContextState::add_peer(const WorkerInfo& peer) {
  MutexLock lock(mutex_);
  if (ended_) return false;
  peers_.emplace(peer.id, peer);
  return true;
}

std::vector<WorkerInfo> ContextState::peers() const {
  MutexLock lock(mutex_);
  std::vector<WorkerInfo> all;
  for (const auto& [id, peer] : peers_) all.push_back(peer);
  return all;
}

std::shared_ptr<Pass> ContextState::open_pass(PassId id,
                                              const std::function<std::shared_ptr<Pass>()>& make) {
  MutexLock lock(mutex_);
  if (ended_ || past_passes_.contains(id)) return nullptr;
  auto& pass = passes_[id];
  if (!pass) pass = make();
  return pass;
}

std::shared_ptr<Pass> ContextState::find_pass(PassId id) const {
  MutexLock lock(mutex_);
  const auto found = passes_.find(id);
  return found == passes_.end() ? nullptr : found->second;
}

void ContextState::close_pass(PassId id) {
  std::shared_ptr<Pass> closed;
  MutexLock lock(mutex_);
  past_passes_.insert(id);
  if (const auto found = passes_.find(id); found != passes_.end()) {
    closed = std::move(found->second);
    passes_.erase(found);
  }
  lock.unlock();
}

bool ContextState::note_abort(PassId id) {
  MutexLock lock(mutex_);
  return aborted_passes_.insert(id).second;
}

std::vector<std::shared_ptr<Pass>> ContextState::passes() const {
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<Pass>> all;
  for (const auto& [id, pass] : passes_) all.push_back(pass);
  return all;
}

ContextState::Ending ContextState::end() {
  Ending ending;
  decltype(sends_) dropped;
  {
    MutexLock lock(mutex_);
    if (ended_) return ending;
    ended_ = true;
    ending.first = true;
    dropped.swap(sends_);
    for (const auto& [id, pass] : passes_) ending.passes.push_back(pass);
    for (const auto& [id, peer] : peers_) ending.peers.push_back(peer);
  }
  // Gradients made with create_graph hold graphs that hold nodes that hold gradients: such circles
  // end here.
  gradients_->clear();
  return ending;
}

}  // namespace stitch::dist_autograd
