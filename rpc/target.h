#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "stitch/rpc/peer_table.h"
#include "stitch/rpc/worker_info.h"

namespace stitch {

struct TargetOptions;

// Whom to call and for how long to wait: implicit from a name, a WorkerId, a WorkerInfo, or
// `{.to = "ps0", .timeout = 5s}`. A timeout of zero means none; without one Options::rpc_timeout counts.
class Target {
 public:
  Target(const char* name) : to_(std::string(name)) {}       // NOLINT: implicit by design, all of them
  Target(std::string name) : to_(std::move(name)) {}         // NOLINT
  Target(std::string_view name) : to_(std::string(name)) {}  // NOLINT
  Target(WorkerId id) : to_(id) {}                           // NOLINT
  Target(WorkerInfo info) : to_(std::move(info)) {}          // NOLINT
  Target(TargetOptions options);                             // NOLINT

  // The worker meant. Throws Error(invalid_argument) when there is none of that name or id.
  [[nodiscard]] const WorkerInfo& resolve(const PeerTable& peers) const {
    return std::visit([&](const auto& to) -> const WorkerInfo& { return peers.find(to); }, to_);
  }
  [[nodiscard]] std::optional<std::chrono::nanoseconds> timeout() const noexcept { return timeout_; }

 private:
  std::variant<std::string, WorkerId, WorkerInfo> to_;
  std::optional<std::chrono::nanoseconds> timeout_;
};

// The aggregate behind `{.to = ..., .timeout = ...}`.
struct TargetOptions {
  Target to;
  std::optional<std::chrono::nanoseconds> timeout{};
};

inline Target::Target(TargetOptions options) : Target(std::move(options.to)) { timeout_ = options.timeout; }

}  // namespace stitch
