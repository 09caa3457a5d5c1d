#include "stitch/rpc/world/c10d_store.h"

#include <sodium.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <exception>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/base/deadline.h"
#include "stitch/base/printable.h"
#include "stitch/base/random.h"
#include "stitch/transport/store/store_map.h"

namespace stitch::rpc {

namespace {

using transport::in_store;
using transport::Store;
using Clock = std::chrono::steady_clock;
using Raw = std::vector<std::uint8_t>;  // what torch's store holds

// The first byte of a value: it is as it was set, or sealed. No value is empty, as the store takes
// an expected value that is empty for none.
constexpr std::uint8_t kPlain = 'p';
constexpr std::uint8_t kSealed = 's';
const Raw kNever{'?'};  // no value of ours
constexpr std::size_t kSealBytes = 1 + crypto_secretbox_NONCEBYTES + crypto_secretbox_MACBYTES;
// torch's server ends a connection with a longer value.
constexpr std::size_t kMaxBytes = Store::kMaxValueBytes - kSealBytes - 64;
constexpr std::int64_t kMaxClaims = 65'536;
constexpr std::chrono::milliseconds kFirstPause{2};
constexpr std::chrono::milliseconds kLongestPause{50};

std::string first_line(std::string_view text) {
  return base::printable(std::string(text.substr(0, text.find('\n'))));
}

const unsigned char* bytes_of(const transport::Key& key) {
  return reinterpret_cast<const unsigned char*>(key.data());
}

class C10dStore final : public Store, public std::enable_shared_from_this<C10dStore> {
 public:
  C10dStore(const std::string& host, std::uint16_t port,
            std::shared_ptr<const transport::SecretKey> key,
            std::chrono::milliseconds connect_timeout)
      : name_("c10d store at " + host + ':' + std::to_string(port)), key_(std::move(key)) {
    base::start_sodium();
    c10d::TCPStoreOptions options;
    options.port = port;
    options.waitWorkers = false;
    options.timeout = connect_timeout;
    try {
      store_ = c10::make_intrusive<c10d::TCPStore>(host, options);
    } catch (const std::exception& error) {
      throw Error(ErrorCode::disconnected, name_ + " cannot be reached within " +
                                               std::to_string(connect_timeout.count()) +
                                               " ms: " + first_line(error.what()));
    }
  }

  void set(const std::string& key, const std::string& value) override {
    const Raw sealed = seal(key, value);
    // Torch's set has no reply; what comes after it on this connection does.
    ask([&] {
      store_->set(key, sealed);
      return store_->check({key});
    });
  }

  std::string get(const std::string& key, Timeout timeout) override {
    std::optional<std::string> value;
    poll(timeout, [&] { return (value = try_get(key)).has_value(); });
    if (!value) throw in_store(transport::not_set_error(key, timeout), name_);
    return std::move(*value);
  }

  std::optional<std::string> try_get(const std::string& key) override {
    const auto there = read(key);
    return there ? std::optional(open(key, *there)) : std::nullopt;
  }

  bool erase(const std::string& key) override {
    in_store(name_, [&] { transport::check_key(key); });
    return ask([&] { return store_->deleteKey(key); });
  }

  Claimed claim(const std::string& key, const std::string& value) override {
    in_store(name_, [&] { transport::check_key(key); });
    const std::string place = kClaim + key;
    // With a number of its own, so that two equal claims differ.
    const Raw sealed = seal(place, entry_of(std::to_string(base::random_number()), value));
    const Raw there = exchange(place, {}, sealed);
    if (there != sealed) return {nullptr, read_entry(open(place, there)).second};
    const std::string folder = folder_of(key);
    const std::int64_t slot = ask([&] { return store_->add(counter_of(folder), 1); });
    auto claimed = std::make_unique<C10dClaim>(shared_from_this(), place, slot_of(folder, slot));
    set(claimed->slot, entry_of(key, value));
    return {std::move(claimed), value};
  }

  std::map<std::string, std::string> claims(const std::string& prefix, std::size_t count,
                                            Timeout timeout) override {
    std::map<std::string, std::string> found;
    const std::string folder = folder_of(prefix);
    poll(timeout, [&] {
      const std::int64_t slots = ask([&] { return store_->add(counter_of(folder), 0); });
      if (slots < 0 || slots > kMaxClaims) {
        throw Error(ErrorCode::protocol, name_ + " says that there were " + std::to_string(slots) +
                                             " claims of \"" + prefix + '"');
      }
      found.clear();
      for (std::int64_t slot = 1; slot <= slots; ++slot) {
        const auto entry = try_get(slot_of(folder, slot));
        if (!entry || entry->empty()) continue;
        auto claim = read_entry(*entry);
        if (claim.first.starts_with(prefix)) found.insert(std::move(claim));
      }
      return found.size() >= count;
    });
    return found;
  }

  std::string describe() const override { return name_; }

 private:
  static std::string folder_of(const std::string& key) { return key.substr(0, key.rfind('/') + 1); }
  static constexpr const char* kClaim = "claim:";

  struct C10dClaim final : Claim {
    C10dClaim(std::shared_ptr<C10dStore> of, std::string claimed, std::string at)
        : store(std::move(of)), place(std::move(claimed)), slot(std::move(at)) {}
    ~C10dClaim() override {
      try {
        store->set(slot, "");
        store->erase(place);
      } catch (const Error&) {
      }  // the store is gone
    }
    const std::shared_ptr<C10dStore> store;
    const std::string place;
    const std::string slot;
  };

  static std::string counter_of(const std::string& folder) { return "claims:" + folder + '#'; }
  static std::string slot_of(const std::string& folder, std::int64_t slot) {
    return "claims:" + folder + std::to_string(slot);
  }

  // A key and a value as one.
  static std::string entry_of(const std::string& key, const std::string& value) {
    base::Bytes bytes;
    base::ByteWriter writer(bytes);
    writer.write_string(key);
    writer.write_string(value);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  static std::pair<std::string, std::string> read_entry(const std::string& entry) {
    base::ByteReader reader(std::as_bytes(std::span(entry)), "claim in a c10d store");
    std::string key = reader.read_string();
    std::string value = reader.read_string();
    reader.expect_end();
    return {std::move(key), std::move(value)};
  }

  [[nodiscard]] transport::Key key_of(const std::string& key) const {
    return key_->hash("stitch value in a c10d store", {std::as_bytes(std::span(key))});
  }

  [[nodiscard]] Raw seal(const std::string& key, const std::string& value) const {
    in_store(name_, [&] {
      transport::check_entry(key, value);
      if (value.size() > kMaxBytes)
        throw Error(ErrorCode::out_of_range,
                    "value of " + std::to_string(value.size()) + " bytes, more than the " +
                        std::to_string(kMaxBytes) + " allowed, cannot be set");
    });
    Raw raw(1 + value.size(), kPlain);
    if (!key_) {
      std::copy(value.begin(), value.end(), raw.begin() + 1);
      return raw;
    }
    raw.assign(kSealBytes + value.size(), kSealed);
    unsigned char* const nonce = raw.data() + 1;
    randombytes_buf(nonce, crypto_secretbox_NONCEBYTES);
    crypto_secretbox_easy(nonce + crypto_secretbox_NONCEBYTES,
                          reinterpret_cast<const unsigned char*>(value.data()), value.size(), nonce,
                          bytes_of(key_of(key)));
    return raw;
  }

  [[nodiscard]] std::string open(const std::string& key, const Raw& raw) const {
    const auto refuse = [&](ErrorCode code, const std::string& why) {
      return Error(code, "value of key \"" + key + "\" in " + name_ + ' ' + why);
    };
    if (raw.empty() || raw.size() > Store::kMaxValueBytes ||
        (raw[0] != kPlain && raw[0] != kSealed))
      throw refuse(ErrorCode::protocol, "is none of stitch's");
    const std::string_view bytes(reinterpret_cast<const char*>(raw.data()), raw.size());
    if (!key_) {
      if (raw[0] == kPlain) return std::string(bytes.substr(1));
      throw refuse(ErrorCode::unauthenticated, "is sealed, and this worker has no secret");
    }
    std::string value(raw.size() < kSealBytes ? 0 : raw.size() - kSealBytes, '\0');
    const unsigned char* const nonce = raw.data() + 1;
    if (raw[0] != kSealed || raw.size() < kSealBytes ||
        crypto_secretbox_open_easy(
            reinterpret_cast<unsigned char*>(value.data()), nonce + crypto_secretbox_NONCEBYTES,
            raw.size() - 1 - crypto_secretbox_NONCEBYTES, nonce, bytes_of(key_of(key))) != 0)
      throw refuse(ErrorCode::unauthenticated, "is not sealed with the secret of this worker");
    return value;
  }

  // compareSet of torch's: where there is no value, and one was expected, it returns that.
  Raw exchange(const std::string& key, const Raw& expected, const Raw& desired) {
    return ask([&] { return store_->compareSet(key, expected, desired); });
  }
  // One request, which does not wait for a key that is erased meanwhile, as torch's get would.
  std::optional<Raw> read(const std::string& key) {
    in_store(name_, [&] { transport::check_key(key); });
    Raw raw = exchange(key, kNever, kNever);
    return raw == kNever ? std::nullopt : std::optional(std::move(raw));
  }

  // Until done() returns true, or `timeout` has passed.
  template <class Done>
  static void poll(Timeout timeout, Done done) {
    const auto deadline = base::deadline_after(timeout);
    for (auto pause = kFirstPause; !done(); pause = std::min(2 * pause, kLongestPause)) {
      const auto now = Clock::now();
      if (now >= deadline) return;
      std::this_thread::sleep_until(std::min(deadline, now + pause));
    }
  }

  // The errors of torch's store.
  template <class Request>
  auto ask(Request request) -> decltype(request()) {
    try {
      return request();
    } catch (const std::exception& error) {
      throw Error(ErrorCode::disconnected, name_ + " is gone: " + first_line(error.what()));
    }
  }

  const std::string name_;
  const std::shared_ptr<const transport::SecretKey> key_;
  c10::intrusive_ptr<c10d::TCPStore> store_;  // any thread
};

}  // namespace

std::shared_ptr<Store> make_c10d_store(const std::string& host, std::uint16_t port,
                                       std::shared_ptr<const transport::SecretKey> key,
                                       std::chrono::milliseconds connect_timeout) {
  return std::make_shared<C10dStore>(host, port, std::move(key), connect_timeout);
}

}  // namespace stitch::rpc
