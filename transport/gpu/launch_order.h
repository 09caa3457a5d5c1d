#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/transport/gpu/transfer_order.h"

namespace stitch::transport::gpu {

// The NCCL launches of one device: a TransferOrder under a lock, the launcher of each pair, and the
// locks of other users of NCCL (LaneLock). Owned by a Lane. Thread contract: any thread; launchers
// are called under no lock.
class LaunchOrder {
 public:
  using Clock = std::chrono::steady_clock;
  using Pair = TransferOrder::Pair;
  // Launches a transfer. The function that it returns, if any, is called until it returns true; no
  // other launch of the device begins before.
  using Launcher = std::function<base::UniqueFunction<bool()>(std::uint64_t number)>;
  // The clock value of a transfer that has entered the order. Without a value, `held` says whether
  // a LaneLock is the reason.
  struct Entered {
    std::optional<std::uint64_t> clock{};
    bool held = false;
  };

  // `on_change` is called under the lock whenever next() may have another launch.
  explicit LaunchOrder(std::function<void()> on_change) : on_change_(std::move(on_change)) {}

  // As TransferOrder has them; announce() and accept() enter nothing while a LaneLock holds the
  // device.
  void add_pair(Pair pair, TransferOrder::End end, std::uint64_t source, Launcher launcher);
  std::vector<std::uint64_t> drop_pair(Pair pair);
  [[nodiscard]] Entered announce(Pair pair, std::uint64_t number);
  [[nodiscard]] Entered accept(Pair pair, std::uint64_t number, std::uint64_t clock);
  bool agree(Pair pair, std::uint64_t number, std::uint64_t clock);
  bool withdraw(Pair pair, std::uint64_t number);
  void finish(Pair pair);
  [[nodiscard]] std::vector<Pair> overdue(std::chrono::nanoseconds age) const;
  [[nodiscard]] std::size_t pending() const;
  [[nodiscard]] std::size_t launched() const;
  // The launch whose turn has come: its launcher and the number of its transfer.
  [[nodiscard]] std::optional<std::pair<Launcher, std::uint64_t>> next();
  // The time since a launch of the device last ended; 0 while none runs.
  [[nodiscard]] std::chrono::nanoseconds standing_still() const;

  // Keeps new transfers out of the order, and waits until all that entered before have ended.
  // Returns false, and holds nothing, when `deadline` passes first. Acquisitions are counted.
  [[nodiscard]] bool acquire(Clock::time_point deadline);
  void release();
  [[nodiscard]] bool held() const;

 private:
  void changed() STITCH_REQUIRES(mutex_);

  const std::function<void()> on_change_;
  mutable base::Mutex mutex_;
  base::CondVar changed_;
  TransferOrder order_ STITCH_GUARDED_BY(mutex_);
  std::map<Pair, Launcher> launchers_ STITCH_GUARDED_BY(mutex_);
  int holders_ STITCH_GUARDED_BY(mutex_) = 0;
  // When the first launch of the device began, or a later one ended.
  Clock::time_point last_end_ STITCH_GUARDED_BY(mutex_){};
};

}  // namespace stitch::transport::gpu
