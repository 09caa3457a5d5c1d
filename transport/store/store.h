#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace stitch::transport {

// A small shared map from keys to byte strings, for the rendezvous of workers. Implementations:
// HashStore (in process), FileStore (files of one host or a shared file system), TcpStore (a server
// and its clients), PrefixStore (a view of another). Thread contract: every method may be
// called from any thread; those with a timeout block the caller for at most that long. Errors:
// Error(timeout) naming the key that was missing, Error(disconnected) naming the store and its
// address, Error(invalid_argument) for an empty key or one over 1 KiB, Error(out_of_range) for a
// value over kMaxValueBytes.
class Store {
 public:
  using Timeout = std::chrono::milliseconds;                           // how long to wait
  static constexpr std::size_t kMaxKeyBytes = 1024;                    // of one key
  static constexpr std::size_t kMaxValueBytes = std::size_t{8} << 20;  // of one value

  virtual ~Store() = default;

  // Stores `value` under `key`, replacing what was there.
  virtual void set(const std::string& key, const std::string& value) = 0;
  // The value of `key`; waits until there is one.
  [[nodiscard]] virtual std::string get(const std::string& key, Timeout timeout) = 0;
  // The value of `key` now, or nothing.
  [[nodiscard]] virtual std::optional<std::string> try_get(const std::string& key) = 0;
  // Removes `key`; false when there was none.
  virtual bool erase(const std::string& key) = 0;

  // What this process has claimed; the claim ends with this object, or with the process.
  class Claim {
   public:
    virtual ~Claim() = default;
  };
  // What becomes of an attempt to claim a key.
  struct Claimed {
    std::unique_ptr<Claim> claim;  // null: another holds the key
    std::string holder;            // the value of the claim that holds
  };
  // Claims `key` with `value`, unless a process that lives, perhaps this one, holds it. Claims and
  // values have keys of their own. Atomic.
  virtual Claimed claim(const std::string& key, const std::string& value) = 0;
  // The claims whose keys begin with `prefix`, by key, as soon as there are `count` of them, and
  // what there is when `timeout` has passed.
  [[nodiscard]] virtual std::map<std::string, std::string> claims(const std::string& prefix,
                                                                  std::size_t count,
                                                                  Timeout timeout) = 0;

  // The name of this store for error texts: "tcp store at 127.0.0.1:29500".
  [[nodiscard]] virtual std::string describe() const = 0;
};

}  // namespace stitch::transport
