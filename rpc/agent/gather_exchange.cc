#include "stitch/rpc/agent/gather_exchange.h"

#include <algorithm>
#include <utility>

namespace stitch::rpc {

std::string GatherExchange::next_key(const std::vector<std::string>& sorted_names) {
  std::string names;
  for (const auto& name : sorted_names) names += name + ' ';
  base::MutexLock lock(mutex_);
  return names + '#' + std::to_string(generations_[names]++);
}

void GatherExchange::post(const std::string& key, OwnedObject value, std::size_t times) {
  if (times == 0) return;
  std::vector<Promise<OwnedObject>> waiting;
  {
    base::MutexLock lock(mutex_);
    if (closed_) return;
    Entry& entry = entries_[key];
    waiting.swap(entry.waiting);
    entry.value = value;
    entry.left = times - std::min(times, waiting.size());
    if (entry.left == 0) entries_.erase(key);
  }
  for (auto& promise : waiting) promise.set_value(value);
}

Future<OwnedObject> GatherExchange::fetch(const std::string& key) {
  base::MutexLock lock(mutex_);
  if (closed_) return make_failed<OwnedObject>(*closed_);
  Entry& entry = entries_[key];
  if (entry.left == 0) {
    entry.waiting.emplace_back();
    return entry.waiting.back().future();
  }
  OwnedObject value = entry.value;
  if (--entry.left == 0) entries_.erase(key);
  return make_ready(std::move(value));
}

void GatherExchange::close(const Error& why) {
  std::map<std::string, Entry> entries;
  {
    base::MutexLock lock(mutex_);
    closed_ = why;
    entries.swap(entries_);
  }
  for (auto& [key, entry] : entries) {
    for (auto& promise : entry.waiting) promise.set_error(why);
  }
}

}  // namespace stitch::rpc
