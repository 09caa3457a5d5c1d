#include "stitch/rpc/agent/call_table.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

#include "stitch/rpc/agent/incoming_call.h"

namespace stitch::rpc {

std::uint64_t CallTable::add(Record record) {
  base::MutexLock lock(mutex_);
  const std::uint64_t id = record.id = next_++;
  Record& added = records_.emplace(id, std::move(record)).first->second;
  if (added.deadline != Clock::time_point::max()) deadlines_.add(added, added.deadline);
  size_.store(records_.size(), std::memory_order_relaxed);
  return id;
}

bool CallTable::contains(std::uint64_t id) const {
  base::MutexLock lock(mutex_);
  return records_.contains(id);
}

void CallTable::note_queued(std::uint64_t id) {
  base::MutexLock lock(mutex_);
  const auto found = records_.find(id);
  if (found != records_.end()) found->second.queued = true;
}

void CallTable::note_sent(std::uint64_t id, Clock::time_point when) {
  base::MutexLock lock(mutex_);
  const auto found = records_.find(id);
  if (found != records_.end()) found->second.sent = when;
}

CallTable::Record CallTable::extract(Records::iterator at) {
  deadlines_.remove(at->second);
  Record record = std::move(at->second);
  records_.erase(at);
  size_.store(records_.size(), std::memory_order_relaxed);
  return record;
}

std::optional<CallTable::Record> CallTable::take(std::uint64_t id) {
  base::MutexLock lock(mutex_);
  const auto found = records_.find(id);
  if (found == records_.end()) return std::nullopt;
  return extract(found);
}

std::optional<CallTable::Record> CallTable::take(std::uint64_t id, const WorkerInfo& from) {
  base::MutexLock lock(mutex_);
  const auto found = records_.find(id);
  if (found == records_.end() || *found->second.to != from) return std::nullopt;
  return extract(found);
}

std::shared_ptr<PendingCall> CallTable::find(std::uint64_t id, const WorkerInfo& from) const {
  base::MutexLock lock(mutex_);
  const auto found = records_.find(id);
  if (found == records_.end() || *found->second.to != from) return nullptr;
  return found->second.pending;
}

std::vector<CallTable::Record> CallTable::take_all() {
  base::MutexLock lock(mutex_);
  std::vector<Record> taken;
  while (!records_.empty()) taken.push_back(extract(records_.begin()));
  return taken;
}

std::vector<CallTable::Record> CallTable::take_all(const WorkerInfo& to) {
  base::MutexLock lock(mutex_);
  std::vector<Record> taken;
  for (auto it = records_.begin(); it != records_.end();) {
    const auto next = std::next(it);
    if (*it->second.to == to) taken.push_back(extract(it));
    it = next;
  }
  return taken;
}

CallTable::Expired CallTable::take_expired(Clock::time_point now) {
  base::MutexLock lock(mutex_);
  Expired expired;
  while (deadlines_.first_deadline() <= now)
    expired.records.push_back(extract(records_.find(deadlines_.first().id)));
  expired.next = deadlines_.first_deadline();
  return expired;
}

namespace {

std::string call_text(const CallTable::Record& record) {
  return "call " + std::string(record.function) + "() to " + to_string(*record.to);
}

}  // namespace

std::string duration_text(std::chrono::nanoseconds duration) {
  char text[32];
  const double seconds = std::chrono::duration<double>(duration).count();
  if (seconds >= 1) {
    std::snprintf(text, sizeof(text), "%.1f s", seconds);
  } else {
    std::snprintf(text, sizeof(text), "%.0f ms", seconds * 1000);
  }
  return text;
}

Error about(const CallTable::Record& record, const Error& cause, const std::string& text) {
  // A callee that could not do its part because another worker is gone says which.
  const bool of_another = cause.code() == ErrorCode::disconnected && !cause.worker().empty();
  return Error(cause.code(), call_text(record) + ' ' + text)
      .with_worker(of_another ? cause.worker() : record.to->name)
      .with_function(std::string(record.function))
      .with_remote(cause.remote());
}

IncomingTable::Added IncomingTable::add(const std::shared_ptr<IncomingCall>& call) {
  base::MutexLock lock(mutex_);
  const Key key{call->caller().id, call->id()};
  Entry* entry = nullptr;
  if (call->one_way()) {
    entry = &one_way_[call.get()];
  } else {
    const auto [at, added] = calls_.try_emplace(key);
    if (!added) return Added::duplicate;
    entry = &at->second;
  }
  entry->at = call.get();
  entry->call = call;
  const auto deadline = call->deadline();
  if (deadline != std::chrono::steady_clock::time_point::max()) deadlines_.add(*entry, deadline);
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
  const auto found = calls_.find(Key{call.caller().id, call.id()});
  if (found == calls_.end() || found->second.at != &call) return;
  deadlines_.remove(found->second);
  calls_.erase(found);
}

// Ids ascend: most requests are newer than whatever was cancelled.
bool IncomingTable::cancelled_early(const Key& key) const {
  if (early_.empty() || key.id == 0) return false;
  const auto found = early_.find(key.caller);
  if (found == early_.end() || key.id > found->second.highest) return false;
  const auto& ids = found->second.ids;
  return std::find(ids.begin(), ids.end(), key.id) != ids.end();
}

std::shared_ptr<IncomingCall> IncomingTable::cancel(WorkerId caller, std::uint64_t call_id) {
  base::MutexLock lock(mutex_);
  const auto found = calls_.find(Key{caller, call_id});
  if (found != calls_.end()) return found->second.call.lock();
  EarlyCancels& early = early_[caller];
  early.ids[early.next] = call_id;
  early.next = (early.next + 1) % kEarlyCancels;
  early.highest = std::max(early.highest, call_id);
  return nullptr;
}

IncomingTable::Expired IncomingTable::expired(std::chrono::steady_clock::time_point now) {
  Expired expired;
  base::MutexLock lock(mutex_);
  while (deadlines_.first_deadline() <= now) {
    Entry& entry = deadlines_.first();
    deadlines_.remove(entry);
    if (auto call = entry.call.lock()) expired.calls.push_back(std::move(call));
  }
  expired.next = deadlines_.first_deadline();
  return expired;
}

std::vector<std::shared_ptr<IncomingCall>> IncomingTable::list(
    std::optional<WorkerId> caller) const {
  std::vector<std::shared_ptr<IncomingCall>> found;
  // Let go of without the lock: the last reference to a call takes it out of this table.
  std::vector<std::shared_ptr<IncomingCall>> others;
  base::MutexLock lock(mutex_);
  for (const auto& [key, entry] : calls_) {
    if (caller && key.caller != *caller) continue;
    if (auto call = entry.call.lock()) found.push_back(std::move(call));
  }
  for (const auto& [at, entry] : one_way_) {
    if (auto call = entry.call.lock())
      (!caller || call->caller().id == *caller ? found : others).push_back(std::move(call));
  }
  lock.unlock();
  return found;
}

std::size_t IncomingTable::size() const {
  base::MutexLock lock(mutex_);
  return calls_.size() + one_way_.size();
}

}  // namespace stitch::rpc
