#include "stitch/rpc/calls/incoming_table.h"

#include <algorithm>
#include <utility>

#include "stitch/rpc/calls/incoming_call.h"

namespace stitch::rpc {

IncomingTable::Added IncomingTable::add(const std::shared_ptr<IncomingCall>& call) {
  base::MutexLock lock(mutex_);
  const Key key{call->caller().id, call->caller().epoch, call->id()};
  TrackedCall* tracked = nullptr;
  if (call->one_way()) {
    tracked = &one_way_[call.get()];
  } else {
    const auto [at, added] = calls_.try_emplace(key);
    if (!added) return Added::duplicate;
    tracked = &at->second;
  }
  tracked->address = call.get();
  tracked->call = call;
  const auto deadline = call->deadline();
  if (deadline != Clock::time_point::max()) deadlines_.add(*tracked, deadline);
  return cancelled_early(key) ? Added::cancelled : Added::serve;
}

void IncomingTable::remove(const IncomingCall& call) {
  base::MutexLock lock(mutex_);
  if (call.one_way()) {
    const auto found = one_way_.find(&call);
    if (found == one_way_.end()) return;
    deadlines_.remove(found->second);
    one_way_.erase(found);
    return;
  }
  const auto found = calls_.find(Key{call.caller().id, call.caller().epoch, call.id()});
  if (found == calls_.end() || found->second.address != &call) return;
  deadlines_.remove(found->second);
  calls_.erase(found);
}

// Ids ascend: most requests are newer than every cancelled one.
bool IncomingTable::cancelled_early(const Key& key) const {
  if (early_.empty() || key.id == 0) return false;
  const auto found = early_.find(key.caller);
  if (found == early_.end() || found->second.epoch != key.epoch || key.id > found->second.highest)
    return false;
  const auto& ids = found->second.ids;
  return std::find(ids.begin(), ids.end(), key.id) != ids.end();
}

std::shared_ptr<IncomingCall> IncomingTable::cancel(const WorkerInfo& caller,
                                                    std::uint64_t call_id) {
  base::MutexLock lock(mutex_);
  const auto found = calls_.find(Key{caller.id, caller.epoch, call_id});
  if (found != calls_.end()) return found->second.call.lock();
  EarlyCancels& early = early_[caller.id];
  if (early.epoch != caller.epoch) early = EarlyCancels{};
  early.epoch = caller.epoch;
  early.ids[early.next] = call_id;
  early.next = (early.next + 1) % kEarlyCancels;
  early.highest = std::max(early.highest, call_id);
  return nullptr;
}

void IncomingTable::forget_cancels(const WorkerInfo& caller) {
  base::MutexLock lock(mutex_);
  const auto found = early_.find(caller.id);
  if (found != early_.end() && found->second.epoch == caller.epoch) early_.erase(found);
}

IncomingTable::Expired IncomingTable::expired(Clock::time_point now) noexcept {
  Expired expired;
  base::MutexLock lock(mutex_);
  while (deadlines_.first_deadline() <= now) {
    TrackedCall& tracked = deadlines_.first();
    if (auto call = tracked.call.lock()) expired.calls.push_back(std::move(call));
    deadlines_.remove(tracked);
  }
  expired.next = deadlines_.first_deadline();
  return expired;
}

std::shared_ptr<IncomingCall> IncomingTable::find(const WorkerInfo& caller,
                                                  std::uint64_t call_id) const {
  base::MutexLock lock(mutex_);
  const auto found = calls_.find(Key{caller.id, caller.epoch, call_id});
  return found == calls_.end() ? nullptr : found->second.call.lock();
}

std::vector<std::shared_ptr<IncomingCall>> IncomingTable::list(
    const std::optional<WorkerInfo>& caller) const noexcept {
  std::vector<std::shared_ptr<IncomingCall>> found;
  // Destroyed after the lock is released: the last reference removes a call from this table.
  std::vector<std::shared_ptr<IncomingCall>> others;
  base::MutexLock lock(mutex_);
  for (const auto& [key, tracked] : calls_) {
    if (caller && (key.caller != caller->id || key.epoch != caller->epoch)) continue;
    if (auto call = tracked.call.lock()) found.push_back(std::move(call));
  }
  for (const auto& [at, tracked] : one_way_) {
    if (auto call = tracked.call.lock())
      (!caller || call->caller() == *caller ? found : others).push_back(std::move(call));
  }
  lock.unlock();
  return found;
}

std::size_t IncomingTable::size() const {
  base::MutexLock lock(mutex_);
  return calls_.size() + one_way_.size();
}

}  // namespace stitch::rpc
