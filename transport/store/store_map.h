#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/transport/store/store.h"

namespace stitch::transport {

// The part that every store has: what it holds, and the rules for keys and values. Errors here do
// not name the store; in_store() adds that. Thread contract: not thread-safe; its owner locks.
class StoreMap {
 public:
  // Shared with the replies that are on their way.
  using Value = std::shared_ptr<const std::string>;
  using Entries = std::map<std::string, Value>;

  void set(const std::string& key, std::string value) {
    values_.insert_or_assign(key, std::make_shared<const std::string>(std::move(value)));
  }
  // Null when there is none.
  [[nodiscard]] Value find(const std::string& key) const;
  bool erase(const std::string& key) { return values_.erase(key) > 0; }
  [[nodiscard]] const Entries& values() const noexcept { return values_; }

  // Whether `key` is claimed now, and by what value.
  struct Holder {
    bool claimed = false;
    Value value;
  };
  Holder claim(const std::string& key, const std::string& value);
  // Returns how long the value of the claim was.
  std::size_t release(const std::string& key);
  [[nodiscard]] Entries claims(const std::string& prefix) const;
  [[nodiscard]] std::size_t count_claims(const std::string& prefix) const;

 private:
  Entries values_;
  Entries claims_;
};

// Throw Error(invalid_argument) for an empty key or one that is too long, Error(out_of_range) for a
// value that is too long.
void check_key(const std::string& key);
void check_value(const std::string& key, const std::string& value);
void check_entry(const std::string& key, const std::string& value);

[[nodiscard]] std::map<std::string, std::string> texts_of(const StoreMap::Entries& entries);

// `key "a" was not set within 5000 ms`
[[nodiscard]] Error not_set_error(const std::string& key, Store::Timeout timeout);
// The same error with " in tcp store at …" after its text.
[[nodiscard]] Error in_store(const Error& error, const std::string& store);
// Runs operation(); its errors name the store.
template <class Operation>
auto in_store(const std::string& store, Operation operation) -> decltype(operation()) {
  try {
    return operation();
  } catch (const Error& error) {
    throw in_store(error, store);
  }
}

}  // namespace stitch::transport
