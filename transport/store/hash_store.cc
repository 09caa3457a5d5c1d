#include "stitch/transport/store/hash_store.h"

#include <unordered_set>

#include "stitch/base/deadline.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/store/store_map.h"

namespace stitch::transport {

namespace {

class HashStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    in_store(describe(), [&] {
      check_key(key);
      check_value(key, value);
      const base::MutexLock lock(mutex_);
      map_.set(key, value);
      wake_waiters();
    });
  }

  std::string get(const std::string& key, Timeout timeout) override {
    return in_store(describe(), [&] {
      check_key(key);
      const auto deadline = base::deadline_after(timeout);
      const base::MutexLock lock(mutex_);
      const std::string* value = nullptr;
      while ((value = map_.find(key)) == nullptr) wait_for({key}, timeout, deadline);
      return *value;
    });
  }

  std::optional<std::string> try_get(const std::string& key) override {
    return in_store(describe(), [&]() -> std::optional<std::string> {
      check_key(key);
      const base::MutexLock lock(mutex_);
      const std::string* value = map_.find(key);
      if (value == nullptr) return std::nullopt;
      return *value;
    });
  }

  void wait(const std::vector<std::string>& keys, Timeout timeout) override {
    in_store(describe(), [&] {
      check_keys(keys);
      const auto deadline = base::deadline_after(timeout);
      const base::MutexLock lock(mutex_);
      wait_for(keys, timeout, deadline);
    });
  }

  std::int64_t add(const std::string& key, std::int64_t delta) override {
    return in_store(describe(), [&] {
      check_key(key);
      const base::MutexLock lock(mutex_);
      const std::int64_t sum = map_.add(key, delta);
      wake_waiters();
      return sum;
    });
  }

  std::string compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                              const std::string& desired) override {
    return in_store(describe(), [&] {
      check_compare(key, expected, desired);
      const base::MutexLock lock(mutex_);
      std::string value = map_.compare_and_set(key, expected, desired);
      wake_waiters();
      return value;
    });
  }

  bool erase(const std::string& key) override {
    return in_store(describe(), [&] {
      check_key(key);
      const base::MutexLock lock(mutex_);
      return map_.erase(key);
    });
  }

  std::string describe() const override { return "hash store"; }

 private:
  void wake_waiters() STITCH_REQUIRES(mutex_) {
    const std::vector<StoreMap::WaitId> ready = map_.take_ready();
    if (ready.empty()) return;
    ready_.insert(ready.begin(), ready.end());
    became_ready_.notify_all();
  }

  void wait_for(const std::vector<std::string>& keys, Timeout timeout,
                std::chrono::steady_clock::time_point deadline) STITCH_REQUIRES(mutex_) {
    const StoreMap::WaitId wait = map_.wait(keys);
    if (wait == 0) return;
    while (!ready_.contains(wait)) {
      if (became_ready_.wait_until(mutex_, deadline) || ready_.contains(wait)) continue;
      map_.cancel(wait);
      throw not_set_error(map_.missing(keys), timeout);
    }
    ready_.erase(wait);
  }

  base::Mutex mutex_;
  base::CondVar became_ready_;
  StoreMap map_ STITCH_GUARDED_BY(mutex_);
  std::unordered_set<StoreMap::WaitId> ready_
      STITCH_GUARDED_BY(mutex_);  // waits that are over, until their threads see it
};

}  // namespace

std::shared_ptr<Store> make_hash_store() { return std::make_shared<HashStore>(); }

}  // namespace stitch::transport
