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

// The accepted connections of an endpoint whose handshakes are not through: strangers may have a
// few of them, and not all descriptors and memory there are. When there are too many, the oldest
// one goes, those first that have not said a word: a worker speaks as soon as it has connected, and
// is through in a moment. Many workers may connect at the same moment: as long as there are fewer
// than kMost, those that came just now are given kGrace. Not thread-safe: used by the thread that
// polls.
class HalfOpen {
 public:
  // Drops a connection, telling the peer why if that is possible.
  using Drop = std::function<void(const Error& why)>;
  using Clock = std::chrono::steady_clock;

  // Takes note of one more, at `now`; before that, some go if there are too many.
  void add(const std::shared_ptr<StreamConnection>& connection, Drop drop,
           Clock::time_point now = Clock::now()) {
    forget_those_through();
    auto silent = static_cast<std::size_t>(std::count_if(
        entries_.begin(), entries_.end(), [](const Entry& each) { return each.silent; }));
    for (; silent >= kMostSilent; --silent) {
      const auto oldest = std::find_if(entries_.begin(), entries_.end(),
                                       [](const Entry& each) { return each.silent; });
      if (oldest == entries_.end() || now - oldest->since < kGrace) break;
      drop_oldest();
    }
    if (entries_.size() >= kMost) drop_oldest();
    entries_.push_back({connection, std::move(drop), true, now});
  }
  // Drops the oldest one, if any.
  void drop_oldest() {
    forget_those_through();
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

  static constexpr std::size_t kMostSilent = 64;
  static constexpr std::size_t kMost = 256;
  static constexpr std::chrono::milliseconds kGrace{100};

 private:
  struct Entry {
    std::weak_ptr<StreamConnection> connection;
    Drop drop;
    bool silent;
    Clock::time_point since;
  };
  void forget_those_through() {
    std::erase_if(entries_, [](Entry& each) {
      const auto connection = each.connection.lock();
      if (!connection || !connection->half_open()) return true;
      each.silent = !connection->has_spoken();
      return false;
    });
  }
  std::vector<Entry> entries_;  // in order of arrival
  std::atomic<std::int64_t> dropped_{0};
};

}  // namespace stitch::transport
