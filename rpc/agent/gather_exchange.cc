#include "stitch/rpc/agent/gather_exchange.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <utility>

namespace stitch::rpc {

bool GatherExchange::has_passed(const std::string& key) const {
  const auto end = key.rfind('#');
  if (end == std::string::npos) return false;
  std::uint64_t number = 0;
  const char* const last = key.data() + key.size();
  const auto read = std::from_chars(key.data() + end + 1, last, number);
  if (read.ec != std::errc() || read.ptr != last) return false;
  const auto set = sets_.find(key.substr(0, end));
  return set != sets_.end() && number < set->second.next;
}

GatherExchange::Contributions::iterator GatherExchange::drop_if_done(Contributions::iterator at,
                                                                     Contributions& dropped) {
  const auto next = std::next(at);
  if (!at->second.done()) return next;
  dropped.insert(contributions_.extract(at));
  if (contributions_.empty()) fetched_.notify_all();
  return next;
}

GatherExchange::Posted GatherExchange::post(const std::vector<WorkerInfo>& lives, OwnedObject value,
                                            std::vector<WorkerInfo> others,
                                            Clock::time_point over) {
  std::string names;
  for (const auto& life : lives) names += life.name + '/' + std::to_string(life.epoch) + ' ';
  Posted posted;
  Contributions dropped;
  std::vector<Fetch> waiting;
  {
    base::MutexLock lock(mutex_);
    Set& set = sets_[names];
    if (set.next == 0) set.lives = lives;
    posted.key = names + '#' + std::to_string(set.next++);
    if (closed_ || others.empty()) return posted;
    const auto at = contributions_.try_emplace(posted.key).first;
    Contribution& contribution = at->second;
    waiting.swap(contribution.waiting);
    contribution.value = value;
    contribution.posted = true;
    contribution.left = std::move(others);
    contribution.over = over;
    for (const Fetch& fetch : waiting) std::erase(contribution.left, fetch.from);
    if (!contribution.done() && over != Clock::time_point::max() && !expires_)
      posted.expires = expires_ = over;
    drop_if_done(at, dropped);
  }
  for (auto& fetch : waiting) fetch.promise.set_value(value);
  return posted;
}

std::optional<GatherExchange::Clock::time_point> GatherExchange::expire(Clock::time_point now) {
  Contributions over;  // destroyed without the lock
  base::MutexLock lock(mutex_);
  Clock::time_point next = Clock::time_point::max();
  for (auto each = contributions_.begin(); each != contributions_.end();) {
    const auto at = each++;
    if (at->second.over <= now) {
      over.insert(contributions_.extract(at));
    } else {
      next = std::min(next, at->second.over);
    }
  }
  if (contributions_.empty()) fetched_.notify_all();
  expires_.reset();
  if (next != Clock::time_point::max()) expires_ = next;
  return expires_;
}

Future<OwnedObject> GatherExchange::fetch(const std::string& key, const WorkerInfo& from) {
  Contributions dropped;
  base::MutexLock lock(mutex_);
  if (closed_) return make_failed<OwnedObject>(*closed_);
  auto at = contributions_.find(key);
  if (at == contributions_.end()) {
    if (leaving_) return make_failed<OwnedObject>(*leaving_);
    if (has_passed(key)) {
      return make_failed<OwnedObject>(
          Error(ErrorCode::cancelled, "that worker is in this gathering no more"));
    }
    at = contributions_.try_emplace(key).first;
  }
  Contribution& contribution = at->second;
  if (!contribution.posted) {
    contribution.waiting.push_back({from, {}});
    return contribution.waiting.back().promise.future();
  }
  OwnedObject value = contribution.value;
  std::erase(contribution.left, from);
  drop_if_done(at, dropped);
  return make_ready(std::move(value));
}

void GatherExchange::stop_waiting(const std::string& key, const WorkerInfo& from) {
  std::vector<Fetch> stopped;
  Contributions dropped;
  {
    base::MutexLock lock(mutex_);
    const auto at = contributions_.find(key);
    if (at == contributions_.end()) return;
    auto& waiting = at->second.waiting;
    const auto first = std::stable_partition(
        waiting.begin(), waiting.end(), [&](const Fetch& fetch) { return fetch.from != from; });
    stopped.assign(std::move_iterator(first), std::move_iterator(waiting.end()));
    waiting.erase(first, waiting.end());
    drop_if_done(at, dropped);
  }
  for (auto& fetch : stopped)
    fetch.promise.set_error(Error(ErrorCode::cancelled, "its caller waits no more"));
}

void GatherExchange::on_lost(const WorkerInfo& life) {
  std::vector<std::string> keys;
  Contributions dropped;
  {
    base::MutexLock lock(mutex_);
    std::erase_if(sets_, [&](const auto& each) {
      return std::ranges::find(each.second.lives, life) != each.second.lives.end();
    });
    for (auto each = contributions_.begin(); each != contributions_.end();) {
      if (!each->second.waiting.empty()) keys.push_back(each->first);
      std::erase(each->second.left, life);
      each = drop_if_done(each, dropped);
    }
  }
  for (const auto& key : keys) stop_waiting(key, life);
}

std::vector<GatherExchange::Listed> GatherExchange::list() const {
  base::MutexLock lock(mutex_);
  std::vector<Listed> listed;
  for (const auto& [key, each] : contributions_)
    listed.push_back({key, each.posted, each.left.size(), each.waiting.size(), each.since});
  return listed;
}

std::size_t GatherExchange::size() const {
  base::MutexLock lock(mutex_);
  return contributions_.size();
}

void GatherExchange::leave(const Error& why, Clock::time_point deadline) {
  std::vector<Fetch> waiting;
  Contributions dropped;
  {
    base::MutexLock lock(mutex_);
    leaving_ = why;
    for (auto each = contributions_.begin(); each != contributions_.end();) {
      for (auto& fetch : each->second.waiting) waiting.push_back(std::move(fetch));
      each->second.waiting.clear();
      each = drop_if_done(each, dropped);
    }
  }
  for (auto& fetch : waiting) fetch.promise.set_error(why);
  base::MutexLock lock(mutex_);
  while (!closed_ && !contributions_.empty() && Clock::now() < deadline)
    fetched_.wait_until(mutex_, deadline);
}

void GatherExchange::close(const Error& why) {
  Contributions contributions;
  {
    base::MutexLock lock(mutex_);
    closed_ = why;
    contributions.swap(contributions_);
    fetched_.notify_all();
  }
  for (auto& [key, contribution] : contributions) {
    for (auto& fetch : contribution.waiting) fetch.promise.set_error(why);
  }
}

}  // namespace stitch::rpc
