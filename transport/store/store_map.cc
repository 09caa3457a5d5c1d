#include "stitch/transport/store/store_map.h"

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

const std::string* StoreMap::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

std::int64_t StoreMap::add(const std::string& key, std::int64_t delta) {
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
  set(key, std::to_string(sum));
  return sum;
}

bool StoreMap::matches(const std::string& key, const std::optional<std::string>& expected) const {
  const std::string* value = find(key);
  return value == nullptr ? !expected.has_value() : expected.has_value() && *value == *expected;
}

std::string StoreMap::compare_and_set(const std::string& key,
                                      const std::optional<std::string>& expected,
                                      const std::string& desired) {
  if (matches(key, expected)) set(key, desired);
  const std::string* value = find(key);
  return value == nullptr ? std::string() : *value;
}

StoreMap::Holder StoreMap::claim(const std::string& key, const std::string& value) {
  const auto [place, free] = claims_.try_emplace(key, value);
  return {free, place->second};
}

std::size_t StoreMap::release(const std::string& key) {
  const auto claim = claims_.extract(key);
  return claim.empty() ? 0 : claim.mapped().size();
}

StoreMap::Entries StoreMap::claims(const std::string& prefix) const {
  Entries found;
  for (auto at = claims_.lower_bound(prefix); at != claims_.end(); ++at) {
    if (!at->first.starts_with(prefix)) break;
    found.insert(found.end(), *at);
  }
  return found;
}

std::size_t StoreMap::count_claims(const std::string& prefix) const {
  std::size_t count = 0;
  for (auto at = claims_.lower_bound(prefix); at != claims_.end(); ++at) {
    if (!at->first.starts_with(prefix)) break;
    ++count;
  }
  return count;
}

void check_key(const std::string& key) {
  if (key.empty()) throw Error(ErrorCode::invalid_argument, "an empty key cannot be used");
  if (key.size() > Store::kMaxKeyBytes) {
    throw Error(ErrorCode::invalid_argument,
                "key " + quoted(key) + " of " + std::to_string(key.size()) +
                    " bytes, more than the " + std::to_string(Store::kMaxKeyBytes) +
                    " allowed, cannot be used");
  }
}

void check_entry(const std::string& key, const std::string& value) {
  check_key(key);
  check_value(key, value);
}

void check_compare(const std::string& key, const std::optional<std::string>& expected,
                   const std::string& desired) {
  if (expected.has_value()) check_value(key, *expected);
  check_entry(key, desired);
}

void check_value(const std::string& key, const std::string& value) {
  if (value.size() > Store::kMaxValueBytes) {
    throw Error(ErrorCode::out_of_range, "value of " + std::to_string(value.size()) +
                                             " bytes for key " + quoted(key) + ", more than the " +
                                             std::to_string(Store::kMaxValueBytes) +
                                             " allowed, cannot be set");
  }
}

Error not_set_error(const std::string& key, Store::Timeout timeout) {
  return Error(ErrorCode::timeout, "key " + quoted(key) + " was not set within " +
                                       std::to_string(timeout.count()) + " ms");
}

Error in_store(const Error& error, const std::string& store) {
  return Error(error.code(), error.what() + (" in " + store));
}

}  // namespace stitch::transport
