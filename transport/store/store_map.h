#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/transport/store/store.h"

namespace stitch::transport {

// The part that every store has: the map, the rules for keys and values, and the waits for keys.
// Errors here do not name the store; in_store() adds that. Thread contract: not thread-safe; its
// owner locks, or uses it on one thread.
class StoreMap {
 public:
  using WaitId = std::uint64_t;  // never 0

  void set(const std::string& key, std::string value);
  [[nodiscard]] const std::string* find(const std::string& key) const;
  // The number under `key` plus `delta`, without storing it. Throws Error(invalid_argument) when
  // the value is not a decimal number, Error(out_of_range) when the sum has more than 64 bits.
  [[nodiscard]] std::int64_t sum(const std::string& key, std::int64_t delta) const;
  // True when the value of `key` is `expected`; nullopt: when there is none.
  [[nodiscard]] bool matches(const std::string& key,
                             const std::optional<std::string>& expected) const;
  bool erase(const std::string& key);
  // All values; the waits stay.
  void clear_values() noexcept { values_.clear(); }
  // Calls f(key, value) with each.
  template <class F>
  void for_each(F&& f) const {
    for (const auto& [key, value] : values_) f(key, value);
  }

  // sum(), stored.
  std::int64_t add(const std::string& key, std::int64_t delta);
  // The value afterwards; empty when there is none because another value than none was expected.
  std::string compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                              const std::string& desired);

  [[nodiscard]] std::vector<std::string> missing(const std::vector<std::string>& keys) const;
  // Registers a wait until all of `keys` have values; 0 when they have now. take_ready() returns
  // the wait once they do.
  WaitId wait(std::vector<std::string> keys);
  void cancel(WaitId wait);
  // The waits that have ended since the last call.
  [[nodiscard]] std::vector<WaitId> take_ready();

 private:
  // A wait is in the queue of one missing key; when that is set it moves to the queue of the next
  // missing one.
  struct Wait {
    std::vector<std::string> keys;
    std::size_t at = 0;  // index of the key in whose queue it is
  };
  // Puts `wait` into the queue of a missing key; false when none is missing.
  bool enqueue(WaitId id, Wait& wait);

  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<WaitId, Wait> waits_;
  std::unordered_map<std::string, std::unordered_set<WaitId>> queues_;
  std::vector<WaitId> ready_;
  WaitId next_wait_ = 1;
};

// Throw Error(invalid_argument) for an empty key or one that is too long, Error(out_of_range) for a
// value that is too long.
void check_key(const std::string& key);
void check_keys(const std::vector<std::string>& keys);
void check_value(const std::string& key, const std::string& value);
void check_compare(const std::string& key, const std::optional<std::string>& expected,
                   const std::string& desired);

// `key "a" was not set within 5000 ms`
[[nodiscard]] Error not_set_error(const std::vector<std::string>& missing, Store::Timeout timeout);
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
