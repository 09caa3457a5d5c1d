#include "stitch/transport/store/store_map.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace stitch::transport {

namespace {

// The beginning of a key or value, for an error text.
std::string quoted(const std::string& text) {
  constexpr std::size_t kShown = 128;
  return text.size() <= kShown
             ? '"' + text + '"'
             : '"' + text.substr(0, kShown) + "\"... (" + std::to_string(text.size()) + " bytes)";
}

}  // namespace

void StoreMap::set(const std::string& key, std::string value) {
  values_.insert_or_assign(key, std::move(value));
  const auto queue = queues_.find(key);
  if (queue == queues_.end()) return;
  const std::unordered_set<WaitId> woken = std::move(queue->second);
  queues_.erase(queue);
  for (const WaitId id : woken) {
    const auto wait = waits_.find(id);
    if (enqueue(id, wait->second)) continue;
    waits_.erase(wait);
    ready_.push_back(id);
  }
}

const std::string* StoreMap::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

std::int64_t StoreMap::sum(const std::string& key, std::int64_t delta) const {
  std::int64_t number = 0;
  if (const std::string* value = find(key); value != nullptr) {
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
    if (error != std::errc{} || end != value->data() + value->size()) {
      throw Error(ErrorCode::invalid_argument, "value " + quoted(*value) + " of key " +
                                                   quoted(key) + " is not a 64-bit decimal number");
    }
  }
  std::int64_t sum = 0;
  if (__builtin_add_overflow(number, delta, &sum)) {
    throw Error(ErrorCode::out_of_range, "sum of " + std::to_string(number) + " and " +
                                             std::to_string(delta) + " for key " + quoted(key) +
                                             " overflows 64 bits");
  }
  return sum;
}

bool StoreMap::matches(const std::string& key, const std::optional<std::string>& expected) const {
  const std::string* value = find(key);
  return value == nullptr ? !expected.has_value() : expected.has_value() && *value == *expected;
}

bool StoreMap::erase(const std::string& key) { return values_.erase(key) > 0; }

std::int64_t StoreMap::add(const std::string& key, std::int64_t delta) {
  const std::int64_t result = sum(key, delta);
  set(key, std::to_string(result));
  return result;
}

std::string StoreMap::compare_and_set(const std::string& key,
                                      const std::optional<std::string>& expected,
                                      const std::string& desired) {
  if (matches(key, expected)) {
    set(key, desired);
    return desired;
  }
  const std::string* value = find(key);
  return value == nullptr ? std::string() : *value;
}

std::vector<std::string> StoreMap::missing(const std::vector<std::string>& keys) const {
  std::vector<std::string> missing;
  std::copy_if(keys.begin(), keys.end(), std::back_inserter(missing),
               [this](const std::string& key) { return !values_.contains(key); });
  return missing;
}

bool StoreMap::enqueue(WaitId id, Wait& wait) {
  // Checks all keys, from the last one waited for: another may have been erased meanwhile.
  for (std::size_t step = 0; step < wait.keys.size(); ++step) {
    const std::size_t index = (wait.at + step) % wait.keys.size();
    if (values_.contains(wait.keys[index])) continue;
    wait.at = index;
    queues_[wait.keys[index]].insert(id);
    return true;
  }
  return false;
}

StoreMap::WaitId StoreMap::wait(std::vector<std::string> keys) {
  Wait wait{std::move(keys)};
  const WaitId id = next_wait_;
  if (!enqueue(id, wait)) return 0;
  ++next_wait_;
  waits_.emplace(id, std::move(wait));
  return id;
}

void StoreMap::cancel(WaitId wait) {
  std::erase(ready_, wait);
  const auto found = waits_.find(wait);
  if (found == waits_.end()) return;
  const auto queue = queues_.find(found->second.keys[found->second.at]);
  if (queue != queues_.end()) {  // missing when memory ran out inside a set()
    queue->second.erase(wait);
    if (queue->second.empty()) queues_.erase(queue);
  }
  waits_.erase(found);
}

std::vector<StoreMap::WaitId> StoreMap::take_ready() { return std::exchange(ready_, {}); }

void check_key(const std::string& key) {
  if (key.empty()) throw Error(ErrorCode::invalid_argument, "an empty key cannot be used");
  if (key.size() > Store::kMaxKeyBytes) {
    throw Error(ErrorCode::invalid_argument,
                "key " + quoted(key) + " of " + std::to_string(key.size()) +
                    " bytes, more than the " + std::to_string(Store::kMaxKeyBytes) +
                    " allowed, cannot be used");
  }
}

void check_keys(const std::vector<std::string>& keys) {
  std::for_each(keys.begin(), keys.end(), check_key);
}

void check_compare(const std::string& key, const std::optional<std::string>& expected,
                   const std::string& desired) {
  check_key(key);
  if (expected.has_value()) check_value(key, *expected);
  check_value(key, desired);
}

void check_value(const std::string& key, const std::string& value) {
  if (value.size() > Store::kMaxValueBytes) {
    throw Error(ErrorCode::out_of_range, "value of " + std::to_string(value.size()) +
                                             " bytes for key " + quoted(key) + ", more than the " +
                                             std::to_string(Store::kMaxValueBytes) +
                                             " allowed, cannot be set");
  }
}

Error not_set_error(const std::vector<std::string>& missing, Store::Timeout timeout) {
  constexpr std::size_t kNamed = 8;
  std::string text = missing.size() == 1 ? "key " : "keys ";
  for (std::size_t index = 0; index < missing.size() && index < kNamed; ++index)
    text += (index > 0 ? ", " : "") + quoted(missing[index]);
  if (missing.size() > kNamed) text += " and " + std::to_string(missing.size() - kNamed) + " more";
  text += missing.size() == 1 ? " was" : " were";
  return Error(ErrorCode::timeout,
               text + " not set within " + std::to_string(timeout.count()) + " ms");
}

Error in_store(const Error& error, const std::string& store) {
  return Error(error.code(), error.what() + (" in " + store));
}

}  // namespace stitch::transport
