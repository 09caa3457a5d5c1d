#include "stitch/dist_autograd/context_state.h"

#include <algorithm>

#include "stitch/dist_autograd/pass.h"

namespace stitch::dist_autograd {

bool ContextState::ended() const {
  base::MutexLock lock(mutex_);
  return ended_;
}

std::optional<Error> ContextState::failure() const {
  base::MutexLock lock(mutex_);
  return failure_;
}

void ContextState::throw_if_unusable() const {
  base::MutexLock lock(mutex_);
  check_usable();
}

void ContextState::check_usable() const {
  if (ended_)
    throw Error(ErrorCode::cancelled, "context " + dist_autograd::to_string(id_) + " has ended");
  if (failure_) throw *failure_;
}

bool ContextState::add_send(LinkId link, NodePtr node) {
  base::MutexLock lock(mutex_);
  if (ended_) return false;
  sends_[link] = std::move(node);
  return true;
}

void ContextState::remove_send(LinkId link) {
  NodePtr removed;
  base::MutexLock lock(mutex_);
  const auto found = sends_.find(link);
  if (found == sends_.end()) return;
  removed = std::move(found->second);
  sends_.erase(found);
  lock.unlock();
}

std::vector<NodePtr> ContextState::sends() const {
  base::MutexLock lock(mutex_);
  std::vector<NodePtr> nodes;
  nodes.reserve(sends_.size());
  for (const auto& [link, send] : sends_) nodes.push_back(send);
  return nodes;
}

std::size_t ContextState::send_count() const {
  base::MutexLock lock(mutex_);
  return sends_.size();
}

bool ContextState::add_peer(const WorkerInfo& peer) {
  base::MutexLock lock(mutex_);
  if (ended_) return false;
  const auto [known, fresh] = peers_.emplace(peer.id, peer);
  if (!fresh && known->second.epoch < peer.epoch) known->second = peer;  // the other life is over
  return true;
}

std::vector<WorkerInfo> ContextState::peers() const {
  base::MutexLock lock(mutex_);
  std::vector<WorkerInfo> all;
  for (const auto& [id, peer] : peers_) all.push_back(peer);
  return all;
}

void ContextState::add_teller(WorkerId worker, std::uint64_t epoch) {
  const Life teller{worker, epoch};
  base::MutexLock lock(mutex_);
  if (std::find(tellers_.begin(), tellers_.end(), teller) == tellers_.end())
    tellers_.push_back(teller);
}

bool ContextState::told_by(WorkerId worker, std::uint64_t epoch) const {
  base::MutexLock lock(mutex_);
  return std::find(tellers_.begin(), tellers_.end(), Life{worker, epoch}) != tellers_.end();
}

bool ContextState::remove_teller(WorkerId worker, std::uint64_t epoch) {
  base::MutexLock lock(mutex_);
  return std::erase(tellers_, Life{worker, epoch}) != 0 && tellers_.empty();
}

std::uint64_t ContextState::next_pass() {
  base::MutexLock lock(mutex_);
  return next_pass_++;
}

std::shared_ptr<Pass> ContextState::open_pass(PassId id,
                                              const std::function<std::shared_ptr<Pass>()>& make) {
  base::MutexLock lock(mutex_);
  if (const auto found = passes_.find(id); found != passes_.end()) return found->second;
  if (is_past(id)) return nullptr;
  check_usable();
  if (passes_.size() >= kMaxPasses)
    throw Error(ErrorCode::overloaded, "context " + dist_autograd::to_string(id_) + " has " +
                                           std::to_string(passes_.size()) +
                                           " backward passes that have not ended");
  auto pass = make();
  passes_.emplace(id, pass);
  return pass;
}

std::shared_ptr<Pass> ContextState::find_pass(PassId id) const {
  base::MutexLock lock(mutex_);
  const auto found = passes_.find(id);
  return found == passes_.end() ? nullptr : found->second;
}

bool ContextState::is_past(PassId id) const {
  const auto past = past_passes_.find({id.root, id.epoch});
  return past != past_passes_.end() && past->second.contains(id.counter);
}

bool ContextState::has_ended(PassId id) const {
  base::MutexLock lock(mutex_);
  return is_past(id);
}

void ContextState::close_pass(PassId id) noexcept {
  std::shared_ptr<Pass> closed;
  base::MutexLock lock(mutex_);
  past_passes_[{id.root, id.epoch}].insert(id.counter);
  if (const auto found = passes_.find(id); found != passes_.end()) {
    closed = std::move(found->second);
    passes_.erase(found);
  }
  lock.unlock();
}

wire::OlderPasses ContextState::older_passes(PassId id) const {
  base::MutexLock lock(mutex_);
  const auto past = past_passes_.find({id.root, id.epoch});
  const auto open_in = [&](const rref::IntervalSet& ended) {
    return ended.missing(kFirstPass, id.counter, wire::OlderPasses::kMaxOpen);
  };
  return {past == past_passes_.end() ? open_in({}) : open_in(past->second)};
}

void ContextState::close_older_passes(PassId id, const wire::OlderPasses& older) {
  base::MutexLock lock(mutex_);
  rref::IntervalSet& past = past_passes_[{id.root, id.epoch}];
  std::uint64_t first =
      older.open.size() < wire::OlderPasses::kMaxOpen ? kFirstPass : older.open.front();
  for (const std::uint64_t open : older.open) {
    if (first < open) past.insert_run(first, open - 1);
    first = open + 1;
  }
  if (first < id.counter) past.insert_run(first, id.counter - 1);
}

std::vector<std::shared_ptr<Pass>> ContextState::passes() const {
  base::MutexLock lock(mutex_);
  std::vector<std::shared_ptr<Pass>> all;
  for (const auto& [id, pass] : passes_) all.push_back(pass);
  return all;
}

void ContextState::set_last_pass(PassSummary summary) {
  base::MutexLock lock(mutex_);
  last_pass_ = std::move(summary);
}

std::optional<PassSummary> ContextState::last_pass() const {
  base::MutexLock lock(mutex_);
  return last_pass_;
}

std::size_t ContextState::past_passes_remembered() const {
  base::MutexLock lock(mutex_);
  std::size_t runs = 0;
  for (const auto& [root, counters] : past_passes_) runs += counters.runs();
  return runs;
}

ContextState::FailEffects ContextState::fail(const Error& error) noexcept {
  FailEffects effects;
  base::MutexLock lock(mutex_);
  effects.error = failure_.value_or(error);
  if (ended_ || failure_) return effects;
  for (const auto& [id, pass] : passes_) effects.passes.push_back(pass);
  for (const auto& [id, peer] : peers_) effects.peers.push_back(peer);
  failure_ = error;
  effects.first = true;
  return effects;
}

ContextState::EndEffects ContextState::end() noexcept {
  EndEffects effects;
  decltype(sends_) dropped;
  {
    base::MutexLock lock(mutex_);
    if (ended_) return effects;
    for (const auto& [id, pass] : passes_) effects.passes.push_back(pass);
    for (const auto& [id, peer] : peers_) effects.peers.push_back(peer);
    ended_ = true;
    effects.first = true;
    dropped.swap(sends_);
  }
  // Gradients made with create_graph hold graphs that hold nodes that hold gradients: this breaks
  // such cycles.
  gradients_->clear();
  return effects;
}

}  // namespace stitch::dist_autograd
