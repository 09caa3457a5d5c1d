#include "stitch/rpc/agent/gather_exchange.h"

#include <algorithm>
#include <utility>

namespace stitch::rpc {

std::string GatherExchange::next_key(const std::vector<std::string>& sorted_lives) {
  std::string lives;
  for (const auto& life : sorted_lives) lives += life + ' ';
  base::MutexLock lock(mutex_);
  return lives + '#' + std::to_string(generations_[lives]++);
}

void GatherExchange::post(const std::string& key, OwnedObject value, std::size_t times) {
  if (times == 0) return;
  std::vector<Promise<OwnedObject>> waiting;
  {
    base::MutexLock lock(mutex_);
    if (closed_) return;
    Contribution& contribution = contributions_[key];
    waiting.swap(contribution.waiting);
    contribution.value = value;
    contribution.left = times - std::min(times, waiting.size());
    if (contribution.left == 0) contributions_.erase(key);
  }
  for (auto& promise : waiting) promise.set_value(value);
}

Future<OwnedObject> GatherExchange::fetch(const std::string& key) {
  base::MutexLock lock(mutex_);
  if (closed_) return make_failed<OwnedObject>(*closed_);
  if (leaving_ && !contributions_.contains(key)) return make_failed<OwnedObject>(*leaving_);
  Contribution& contribution = contributions_[key];
  if (contribution.left == 0) {
    contribution.waiting.emplace_back();
    return contribution.waiting.back().future();
  }
  OwnedObject value = contribution.value;
  if (--contribution.left == 0) contributions_.erase(key);
  if (contributions_.empty()) fetched_.notify_all();
  return make_ready(std::move(value));
}

std::vector<GatherExchange::Listed> GatherExchange::list() const {
  base::MutexLock lock(mutex_);
  std::vector<Listed> listed;
  for (const auto& [key, each] : contributions_)
    listed.push_back({key, each.left > 0, each.left, each.waiting.size(), each.since});
  return listed;
}

void GatherExchange::leave(const Error& why, std::chrono::steady_clock::time_point deadline) {
  std::vector<Promise<OwnedObject>> waiting;
  {
    base::MutexLock lock(mutex_);
    leaving_ = why;
    for (auto each = contributions_.begin(); each != contributions_.end();) {
      if (each->second.left > 0) {
        ++each;
        continue;
      }
      for (auto& promise : each->second.waiting) waiting.push_back(std::move(promise));
      each = contributions_.erase(each);
    }
  }
  for (auto& promise : waiting) promise.set_error(why);
  base::MutexLock lock(mutex_);
  while (!closed_ && !contributions_.empty() && std::chrono::steady_clock::now() < deadline)
    fetched_.wait_until(mutex_, deadline);
}

void GatherExchange::close(const Error& why) {
  std::map<std::string, Contribution> contributions;
  {
    base::MutexLock lock(mutex_);
    closed_ = why;
    contributions.swap(contributions_);
    fetched_.notify_all();
  }
  for (auto& [key, contribution] : contributions) {
    for (auto& promise : contribution.waiting) promise.set_error(why);
  }
}

}  // namespace stitch::rpc
