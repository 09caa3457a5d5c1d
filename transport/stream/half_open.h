#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/transport/stream/stream_connection.h"

namespace stitch::transport {

// The accepted connections of an endpoint whose handshakes are not finished: strangers may hold a
// few of them, but not all descriptors and memory. When there are too many, the oldest is dropped,
// first those that have sent no record: a worker sends its first record as soon as it has
// connected, and its handshake takes a moment. Many workers may connect at the same moment: while
// there are fewer than kMax, a connection is not dropped within kGrace. Not thread-safe but for
// dropped(): used by the thread that polls.
class HalfOpen {
 public:
  // Drops a connection, and sends the peer the reason if that is possible.
  using Drop = std::function<void(const Error& why)>;
  using Clock = std::chrono::steady_clock;

  // Adds one, at `now`, after dropping some if there are too many.
  void add(const std::shared_ptr<StreamConnection>& connection, Drop drop,
           Clock::time_point now = Clock::now()) {
    forget_finished();
    auto silent = static_cast<std::size_t>(std::count_if(
        entries_.begin(), entries_.end(), [](const Entry& each) { return each.silent; }));
    for (; silent >= kMaxSilent; --silent) {
      const auto oldest = std::find_if(entries_.begin(), entries_.end(),
                                       [](const Entry& each) { return each.silent; });
      if (oldest == entries_.end() || now - oldest->since < kGrace) break;
      drop_oldest();
    }
    if (entries_.size() >= kMax) drop_oldest();
    entries_.push_back({connection, std::move(drop), true, now});
  }
  // Drops the oldest one, if any.
  void drop_oldest() {
    forget_finished();
    if (entries_.empty()) return;
    auto oldest = std::find_if(entries_.begin(), entries_.end(),
                               [](const Entry& each) { return each.silent; });
    if (oldest == entries_.end()) oldest = entries_.begin();
    const Drop drop = std::move(oldest->drop);
    entries_.erase(oldest);
    dropped_.fetch_add(1, std::memory_order_relaxed);
    drop(Error(ErrorCode::overloaded, "too many connections are in their handshake: " +
                                          std::to_string(entries_.size()) + " beside this one"));
  }

  // How many have been dropped. Any thread.
  [[nodiscard]] std::int64_t dropped() const noexcept { return dropped_.load(); }

  // Connections that have sent no record.
  static constexpr std::size_t kMaxSilent = 64;
  // All half-open connections.
  static constexpr std::size_t kMax = 256;
  // Milliseconds in which a worker has sent its first record, even on a busy machine.
  static constexpr std::chrono::milliseconds kGrace{100};

 private:
  struct Entry {
    std::weak_ptr<StreamConnection> connection;
    Drop drop;
    bool silent;
    Clock::time_point since;
  };
  void forget_finished() {
    std::erase_if(entries_, [](Entry& each) {
      const auto connection = each.connection.lock();
      if (!connection || !connection->half_open()) return true;
      each.silent = !connection->has_received_record();
      return false;
    });
  }
  std::vector<Entry> entries_;  // in order of arrival
  std::atomic<std::int64_t> dropped_{0};
};

}  // namespace stitch::transport
