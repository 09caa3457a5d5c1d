#include "stitch/transport/store/store_map.h"

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

StoreMap::Value StoreMap::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : found->second;
}

StoreMap::Holder StoreMap::claim(const std::string& key, const std::string& value) {
  const auto [place, free] = claims_.try_emplace(key);
  if (free) place->second = std::make_shared<const std::string>(value);
  return {free, place->second};
}

std::size_t StoreMap::release(const std::string& key) {
  const auto claim = claims_.extract(key);
  return claim.empty() ? 0 : claim.mapped()->size();
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

void check_value(const std::string& key, const std::string& value) {
  if (value.size() > Store::kMaxValueBytes) {
    throw Error(ErrorCode::out_of_range, "value of " + std::to_string(value.size()) +
                                             " bytes for key " + quoted(key) + ", more than the " +
                                             std::to_string(Store::kMaxValueBytes) +
                                             " allowed, cannot be set");
  }
}

std::map<std::string, std::string> texts_of(const StoreMap::Entries& entries) {
  std::map<std::string, std::string> texts;
  for (const auto& [key, value] : entries) texts.emplace_hint(texts.end(), key, *value);
  return texts;
}

Error not_set_error(const std::string& key, Store::Timeout timeout) {
  return Error(ErrorCode::timeout, "key " + quoted(key) + " was not set within " +
                                       std::to_string(timeout.count()) + " ms");
}

Error in_store(const Error& error, const std::string& store) {
  return Error(error.code(), error.what() + (" in " + store));
}

}  // namespace stitch::transport
