#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/gpu/device_map.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

// A worker as the rendezvous found it.
struct Member {
  WorkerInfo info;
  std::vector<std::string> addresses;  // where it listens, best first
  WorkerDevices devices{};
};

// The workers of one world. Never changes. Thread contract: any thread.
class Members {
 public:
  Members() = default;
  // By id, from 0 without gaps.
  explicit Members(std::vector<Member> members);

  [[nodiscard]] std::size_t size() const noexcept { return infos_.size(); }
  [[nodiscard]] const std::vector<Member>& all() const noexcept { return members_; }
  [[nodiscard]] const std::vector<WorkerInfo>& infos() const noexcept { return infos_; }
  [[nodiscard]] const std::vector<std::string>& addresses(WorkerId id) const noexcept {
    return members_[id.value()].addresses;
  }
  // Throw Error(invalid_argument) naming what was looked for, and the nearest names or the range of
  // ids; the last one Error(disconnected) for a member of another epoch.
  [[nodiscard]] const WorkerInfo& find(std::string_view name) const;
  [[nodiscard]] const WorkerInfo& find(WorkerId id) const;
  [[nodiscard]] const WorkerInfo& find(const WorkerInfo& info) const;
  // Why a peer that says `hello` is not a member; nothing if it is.
  [[nodiscard]] std::optional<Error> objection(const transport::Hello& hello) const;
  // "worker "ps0" (id 7, epoch 1)", for error texts.
  [[nodiscard]] static std::string claimed_identity(const transport::Hello& hello);

 private:
  std::vector<Member> members_;
  std::vector<WorkerInfo> infos_;
  std::unordered_map<std::string, WorkerId> by_name_;
};

}  // namespace stitch::rpc
