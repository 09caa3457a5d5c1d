#include "stitch/rpc/call_table.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "stitch/rpc/incoming_call.h"

namespace stitch {

CallTable::Added CallTable::add(Record record) {
  MutexLock lock(mutex_);
  Added added;
  added.id = next_++;
  added.watch = record.deadline < watched_;
  if (added.watch) watched_ = record.deadline;
  records_.emplace(added.id, std::move(record));
  size_.store(records_.size(), std::memory_order_relaxed);
  return added;
}

CallTable::Record CallTable::extract(Records::iterator at) {
  Record record = std::move(at->second);
  records_.erase(at);
  size_.store(records_.size(), std::memory_order_relaxed);
  return record;
}

std::optional<CallTable::Record> CallTable::take(std::uint64_t id) {
  MutexLock lock(mutex_);
  const auto found = records_.find(id);
  if (found == records_.end()) return std::nullopt;
  return extract(found);
}

std::optional<CallTable::Record> CallTable::take(std::uint64_t id, const WorkerInfo& from) {
  MutexLock lock(mutex_);
  const auto found = records_.find(id);
  if (found == records_.end() || *found->second.to != from) return std::nullopt;
  return extract(found);
}

std::shared_ptr<PendingCall> CallTable::find(std::uint64_t id, const WorkerInfo& from) const {
  MutexLock lock(mutex_);
  const auto found = records_.find(id);
  if (found == records_.end() || *found->second.to != from) return nullptr;
  return found->second.pending;
}

std::vector<CallTable::Record> CallTable::take_all() {
  MutexLock lock(mutex_);
  std::vector<Record> taken;
  while (!records_.empty()) taken.push_back(extract(records_.begin()));
  return taken;
}

std::vector<CallTable::Record> CallTable::take_all(const WorkerInfo& to) {
  MutexLock lock(mutex_);
  std::vector<Record> taken;
  for (auto it = records_.begin(); it != records_.end();) {
    const auto next = std::next(it);
    if (*it->second.to == to) taken.push_back(extract(it));
    it = next;
  }
  return taken;
}

CallTable::Expired CallTable::take_expired(Clock::time_point now) {
  MutexLock lock(mutex_);
  Expired expired;
  for (auto it = records_.begin(); it != records_.end();) {
    const auto next = std::next(it);
    if (it->second.deadline <= now) {
      const auto id = it->first;
      expired.records.emplace_back(id, extract(it));
    } else {
      expired.next = std::min(expired.next, it->second.deadline);
    }
    it = next;
  }
  // Looking at all of them costs: not too often.
  if (expired.next != Clock::time_point::max()) {
    const auto pause =
        std::chrono::milliseconds(1) + std::chrono::microseconds(records_.size() / 1000);
    expired.next = std::max(expired.next, now + pause);
  }
  watched_ = expired.next;
  return expired;
}

void IncomingTable::add(const std::shared_ptr<IncomingCall>& call) {
  MutexLock lock(mutex_);
  if (call->one_way()) {
    one_way_.emplace(call.get(), call);
  } else {
    calls_.insert_or_assign(Key{call->caller().id, call->id()}, call);
  }
}

void IncomingTable::remove(const IncomingCall& call) {
  MutexLock lock(mutex_);
  if (call.one_way()) {
    one_way_.erase(&call);
  } else {
    calls_.erase(Key{call.caller().id, call.id()});
  }
}

std::shared_ptr<IncomingCall> IncomingTable::find(WorkerId caller, std::uint64_t call_id) const {
  MutexLock lock(mutex_);
  const auto found = calls_.find(Key{caller, call_id});
  return found == calls_.end() ? nullptr : found->second.lock();
}

std::vector<std::shared_ptr<IncomingCall>> IncomingTable::list(
    std::optional<WorkerId> caller) const {
  std::vector<std::shared_ptr<IncomingCall>> found;
  // Let go of without the lock: the last reference to a call takes it out of this table.
  std::vector<std::shared_ptr<IncomingCall>> others;
  MutexLock lock(mutex_);
  for (const auto& [key, weak] : calls_) {
    if (caller && key.caller != *caller) continue;
    if (auto call = weak.lock()) found.push_back(std::move(call));
  }
  for (const auto& [at, weak] : one_way_) {
    if (auto call = weak.lock())
      (!caller || call->caller().id == *caller ? found : others).push_back(std::move(call));
  }
  lock.unlock();
  return found;
}

std::size_t IncomingTable::size() const {
  MutexLock lock(mutex_);
  return calls_.size() + one_way_.size();
}

}  // namespace stitch
