#include "stitch/rpc/agent/gather_exchange.h"

#include <algorithm>
#include <utility>

namespace stitch {

std::string Board::next_key(const std::vector<std::string>& sorted_names) {
  std::string names;
  for (const auto& name : sorted_names) names += name + ' ';
  MutexLock lock(mutex_);
  return names + '#' + std::to_string(generations_[names]++);
}

void Board::post(const std::string& key, Value value, std::size_t times) {
  if (times == 0) return;
  std::vector<Promise<Value>> waiting;
  {
    MutexLock lock(mutex_);
    if (closed_) return;
    Entry& entry = entries_[key];
    waiting.swap(entry.waiting);
    entry.value = value;
    entry.left = times - std::min(times, waiting.size());
    if (entry.left == 0) entries_.erase(key);
  }
  for (auto& promise : waiting) promise.set_value(value);
}

Future<Value> Board::fetch(const std::string& key) {
  MutexLock lock(mutex_);
  if (closed_) return make_failed<Value>(*closed_);
  Entry& entry = entries_[key];
  if (entry.left == 0) {
    entry.waiting.emplace_back();
    return entry.waiting.back().future();
  }
  Value value = entry.value;
  if (--entry.left == 0) entries_.erase(key);
  return make_ready(std::move(value));
}

void Board::close(const Error& why) {
  std::map<std::string, Entry> entries;
  {
    MutexLock lock(mutex_);
    closed_ = why;
    entries.swap(entries_);
  }
  for (auto& [key, entry] : entries) {
    for (auto& promise : entry.waiting) promise.set_error(why);
  }
}

}  // namespace stitch
