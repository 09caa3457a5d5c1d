#include "stitch/transport/store/prefix_store.h"

#include <utility>

#include "stitch/transport/store/store_map.h"

namespace stitch::transport {

namespace {

class PrefixStore final : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store)
      : prefix_(std::move(prefix)), store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(full(key), value);
  }
  std::string get(const std::string& key, Timeout timeout) override {
    return store_->get(full(key), timeout);
  }
  std::optional<std::string> try_get(const std::string& key) override {
    return store_->try_get(full(key));
  }
  bool erase(const std::string& key) override { return store_->erase(full(key)); }
  Claimed claim(const std::string& key, const std::string& value) override {
    return store_->claim(full(key), value);
  }
  std::map<std::string, std::string> claims(const std::string& prefix, std::size_t count,
                                            Timeout timeout) override {
    std::map<std::string, std::string> found;
    const std::string all = prefix_ + '/' + prefix;
    for (auto& [key, value] : store_->claims(all, count, timeout)) {
      // A store of others may say anything.
      if (key.starts_with(all)) found.emplace(key.substr(prefix_.size() + 1), std::move(value));
    }
    return found;
  }
  std::string describe() const override { return store_->describe(); }

 private:
  // An empty key would be valid in the other store. Error texts have the full key, so describe()
  // does not need the prefix.
  std::string full(const std::string& key) const {
    if (key.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  "an empty key cannot be used under prefix \"" + prefix_ + "\" in " + describe());
    }
    return prefix_ + '/' + key;
  }

  const std::string prefix_;
  const std::shared_ptr<Store> store_;
};

}  // namespace

std::shared_ptr<Store> make_prefix_store(std::string prefix, std::shared_ptr<Store> store) {
  return std::make_shared<PrefixStore>(std::move(prefix), std::move(store));
}

}  // namespace stitch::transport
