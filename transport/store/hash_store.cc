#include "stitch/transport/store/hash_store.h"

#include <map>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/store/store_map.h"

namespace stitch::transport {

namespace {

class HashStore final : public Store, public std::enable_shared_from_this<HashStore> {
 public:
  void set(const std::string& key, const std::string& value) override {
    in_store(describe(), [&] { check_entry(key, value); });
    const base::MutexLock lock(mutex_);
    map_.set(key, value);
    changed_.notify_all();
  }

  std::string get(const std::string& key, Timeout timeout) override {
    in_store(describe(), [&] { check_key(key); });
    const auto deadline = base::deadline_after(timeout);
    const base::MutexLock lock(mutex_);
    StoreMap::Value value;
    while (!(value = map_.find(key))) {
      if (std::chrono::steady_clock::now() >= deadline)
        throw in_store(not_set_error(key, timeout), describe());
      changed_.wait_until(mutex_, deadline);
    }
    return *value;
  }

  std::optional<std::string> try_get(const std::string& key) override {
    in_store(describe(), [&] { check_key(key); });
    const base::MutexLock lock(mutex_);
    const StoreMap::Value value = map_.find(key);
    return value ? std::optional(*value) : std::nullopt;
  }

  bool erase(const std::string& key) override {
    in_store(describe(), [&] { check_key(key); });
    const base::MutexLock lock(mutex_);
    return map_.erase(key);
  }

  Claimed claim(const std::string& key, const std::string& value) override {
    in_store(describe(), [&] { check_entry(key, value); });
    const base::MutexLock lock(mutex_);
    const StoreMap::Holder holder = map_.claim(key, value);
    if (!holder.claimed) return {nullptr, *holder.value};
    changed_.notify_all();
    return {std::make_unique<HashClaim>(shared_from_this(), key), value};
  }

  std::map<std::string, std::string> claims(const std::string& prefix, std::size_t count,
                                            Timeout timeout) override {
    const auto deadline = base::deadline_after(timeout);
    const base::MutexLock lock(mutex_);
    for (;;) {
      const StoreMap::Entries found = map_.claims(prefix);
      if (found.size() >= count || std::chrono::steady_clock::now() >= deadline)
        return texts_of(found);
      changed_.wait_until(mutex_, deadline);
    }
  }

  std::string describe() const override { return "hash store"; }

 private:
  struct HashClaim final : Claim {
    HashClaim(std::shared_ptr<HashStore> of, std::string claimed)
        : store(std::move(of)), key(std::move(claimed)) {}
    ~HashClaim() override {
      const base::MutexLock lock(store->mutex_);
      store->map_.release(key);
    }
    const std::shared_ptr<HashStore> store;
    const std::string key;
  };

  base::Mutex mutex_;
  base::CondVar changed_;
  StoreMap map_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<Store> make_hash_store() { return std::make_shared<HashStore>(); }

}  // namespace stitch::transport
