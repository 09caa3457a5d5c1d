#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

#include "stitch/base/mutex.h"

namespace stitch::transport {

// An endpoint's connections that have not ended, kept alive until they have, and whether the
// endpoint is closed. Thread contract: any thread; connections are destroyed without its lock.
template <class Connection>
class ConnectionSet {
 public:
  using Pointer = std::shared_ptr<Connection>;

  [[nodiscard]] bool closed() const noexcept { return closed_.load(); }
  // False, and nothing is kept, when the endpoint is closed.
  [[nodiscard]] bool add(const Pointer& connection) STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    if (closed()) return false;
    connections_.insert(connection);
    return true;
  }
  // REQUIRES: the caller keeps `connection` alive.
  void remove(const Pointer& connection) STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    connections_.erase(connection);
    if (connections_.empty()) empty_.notify_all();
  }
  // From now on nothing can be added. Returns the connections to close; nullopt from the second
  // call on.
  [[nodiscard]] std::optional<std::vector<Pointer>> close() STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    if (closed_) return std::nullopt;
    std::vector<Pointer> open(connections_.begin(), connections_.end());
    closed_ = true;
    return open;
  }
  void wait_until_empty() STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    while (!connections_.empty()) empty_.wait(mutex_);
  }

 private:
  base::Mutex mutex_;
  base::CondVar empty_;
  std::atomic<bool> closed_{false};
  std::unordered_set<Pointer> connections_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport
