#include "stitch/rpc/call_table.h"

#include "stitch/rpc/incoming_call.h"

namespace stitch {

std::uint64_t CallTable::add(Record record) {
  MutexLock lock(mutex_);
  const std::uint64_t id = next_++;
  records_.emplace(id, std::move(record));
  return id;
}

bool CallTable::set_timer(std::uint64_t id, transport::EventLoop::TimerId timer) {
  MutexLock lock(mutex_);
  const auto found = records_.find(id);
  if (found == records_.end()) return false;
  found->second.timer = timer;
  return true;
}

std::optional<CallTable::Record> CallTable::take(std::uint64_t id) {
  MutexLock lock(mutex_);
  const auto found = records_.find(id);
  if (found == records_.end()) return std::nullopt;
  std::optional<Record> record(std::move(found->second));
  records_.erase(found);
  return record;
}

std::optional<CallTable::Record> CallTable::take(std::uint64_t id, const WorkerInfo& from) {
  MutexLock lock(mutex_);
  const auto found = records_.find(id);
  if (found == records_.end() || found->second.to != from) return std::nullopt;
  std::optional<Record> record(std::move(found->second));
  records_.erase(found);
  return record;
}

std::vector<CallTable::Record> CallTable::take_all() {
  MutexLock lock(mutex_);
  std::vector<Record> taken;
  for (auto& [id, record] : records_) taken.push_back(std::move(record));
  records_.clear();
  return taken;
}

std::vector<CallTable::Record> CallTable::take_all(const WorkerInfo& to) {
  MutexLock lock(mutex_);
  std::vector<Record> taken;
  for (auto it = records_.begin(); it != records_.end();) {
    if (it->second.to == to) {
      taken.push_back(std::move(it->second));
      it = records_.erase(it);
    } else {
      ++it;
    }
  }
  return taken;
}

std::size_t CallTable::size() const {
  MutexLock lock(mutex_);
  return records_.size();
}

void IncomingTable::add(const std::shared_ptr<IncomingCall>& call) {
  MutexLock lock(mutex_);
  if (call->one_way()) {
    one_way_.emplace(call.get(), call);
  } else {
    calls_.insert_or_assign({call->caller().id, call->id()}, call);
  }
}

void IncomingTable::remove(const IncomingCall& call) {
  MutexLock lock(mutex_);
  if (call.one_way()) {
    one_way_.erase(&call);
  } else {
    calls_.erase({call.caller().id, call.id()});
  }
}

std::shared_ptr<IncomingCall> IncomingTable::find(WorkerId caller, std::uint64_t call_id) const {
  MutexLock lock(mutex_);
  const auto found = calls_.find({caller, call_id});
  return found == calls_.end() ? nullptr : found->second.lock();
}

std::vector<std::shared_ptr<IncomingCall>> IncomingTable::list(std::optional<WorkerId> caller) const {
  std::vector<std::shared_ptr<IncomingCall>> found;
  // Let go of without the lock: the last reference to a call takes it out of this table.
  std::vector<std::shared_ptr<IncomingCall>> others;
  MutexLock lock(mutex_);
  for (const auto& [key, weak] : calls_) {
    if (caller && key.first != *caller) continue;
    if (auto call = weak.lock()) found.push_back(std::move(call));
  }
  for (const auto& [at, weak] : one_way_) {
    if (auto call = weak.lock()) (!caller || call->caller().id == *caller ? found : others).push_back(std::move(call));
  }
  lock.unlock();
  return found;
}

std::size_t IncomingTable::size() const {
  MutexLock lock(mutex_);
  return calls_.size() + one_way_.size();
}

}  // namespace stitch
