#include "stitch/rpc/calls/call_table.h"

#include <iterator>
#include <utility>

namespace stitch::rpc {

std::uint64_t CallTable::add(OutstandingCall&& call) {
  base::MutexLock lock(mutex_);
  const bool limited = call.deadline != Clock::time_point::max();
  const std::uint64_t id = call.id = next_++;
  OutstandingCall& added = calls_.emplace(id, std::move(call)).first->second;
  if (limited) deadlines_.add(added, added.expires());
  size_.store(calls_.size(), std::memory_order_relaxed);
  return id;
}

std::optional<CallTable::Clock::time_point> CallTable::deadline(std::uint64_t id) const {
  base::MutexLock lock(mutex_);
  const auto found = calls_.find(id);
  if (found == calls_.end()) return std::nullopt;
  return found->second.deadline;
}

std::uint64_t CallTable::new_id() {
  base::MutexLock lock(mutex_);
  return next_++;
}

bool CallTable::give_room(std::uint64_t id, Room room) {
  base::MutexLock lock(mutex_);
  const auto found = calls_.find(id);
  if (found == calls_.end()) return false;
  found->second.room = std::move(room);
  return true;
}

bool CallTable::begin(std::uint64_t id) {
  base::MutexLock lock(mutex_);
  const auto found = calls_.find(id);
  if (found == calls_.end()) return false;
  found->second.begun = true;
  return true;
}

void CallTable::note_queued(std::uint64_t id) {
  base::MutexLock lock(mutex_);
  const auto found = calls_.find(id);
  if (found != calls_.end()) found->second.queued = true;
}

void CallTable::note_sent(std::uint64_t id, Clock::time_point when) {
  base::MutexLock lock(mutex_);
  const auto found = calls_.find(id);
  if (found != calls_.end()) found->second.sent = when;
}

OutstandingCall CallTable::extract(Calls::iterator at) noexcept {
  deadlines_.remove(at->second);
  OutstandingCall call = std::move(at->second);
  calls_.erase(at);
  size_.store(calls_.size(), std::memory_order_relaxed);
  return call;
}

std::optional<OutstandingCall> CallTable::take(std::uint64_t id) {
  base::MutexLock lock(mutex_);
  const auto found = calls_.find(id);
  if (found == calls_.end()) return std::nullopt;
  return extract(found);
}

std::optional<OutstandingCall> CallTable::take(std::uint64_t id, const WorkerInfo& from) {
  base::MutexLock lock(mutex_);
  const auto found = calls_.find(id);
  if (found == calls_.end() || *found->second.to != from) return std::nullopt;
  return extract(found);
}

std::shared_ptr<PendingCall> CallTable::find(std::uint64_t id, const WorkerInfo& from) const {
  base::MutexLock lock(mutex_);
  const auto found = calls_.find(id);
  if (found == calls_.end() || *found->second.to != from) return nullptr;
  return found->second.pending;
}

std::vector<OutstandingCall> CallTable::take_all(const WorkerInfo* to) noexcept {
  base::MutexLock lock(mutex_);
  std::vector<OutstandingCall> taken;
  for (auto it = calls_.begin(); it != calls_.end();) {
    const auto next = std::next(it);
    if (to == nullptr || *it->second.to == *to) taken.push_back(extract(it));
    it = next;
  }
  return taken;
}

std::vector<OutstandingCall> CallTable::list() const {
  base::MutexLock lock(mutex_);
  std::vector<OutstandingCall> calls;
  calls.reserve(calls_.size());
  for (const auto& [id, call] : calls_) {
    OutstandingCall copy;
    copy.to = call.to;
    copy.function = call.function;
    copy.timeout = call.timeout;
    copy.deadline = call.deadline;
    copy.id = id;
    copy.made = call.made;
    copy.under = call.under;
    copy.queued = call.queued;
    copy.sent = call.sent;
    calls.push_back(std::move(copy));
  }
  return calls;
}

CallTable::Expired CallTable::take_expired(Clock::time_point now) noexcept {
  base::MutexLock lock(mutex_);
  Expired expired;
  while (deadlines_.first_deadline() <= now)
    expired.calls.push_back(extract(calls_.find(deadlines_.first().id)));
  expired.next = deadlines_.first_deadline();
  return expired;
}

namespace {

std::string call_text(const OutstandingCall& call) {
  return "call " + std::string(call.function) + "() to " + to_string(*call.to);
}

}  // namespace

std::string timed_out_after(const OutstandingCall& call) {
  std::string ms = std::to_string(std::chrono::duration<double, std::milli>(call.timeout).count());
  ms.erase(ms.find_last_not_of('0') + 1);
  if (ms.back() < '0' || ms.back() > '9') ms.pop_back();  // the decimal point of the locale
  return "timed out after " + ms + " ms; ";
}

Error about(const OutstandingCall& call, const Error& cause, const std::string& text) {
  // If the callee failed because another worker is gone, the error names that worker.
  const bool names_another = cause.code() == ErrorCode::disconnected && !cause.worker().empty();
  return Error(cause.code(), call_text(call) + ' ' + text)
      .with_worker(names_another ? cause.worker() : call.to->name)
      .with_function(std::string(call.function))
      .with_remote(cause.remote());
}

void complete_with_error(const OutstandingCall& call, const Error& error) noexcept {
  call.pending->on_error(error);
}

}  // namespace stitch::rpc
