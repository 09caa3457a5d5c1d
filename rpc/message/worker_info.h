#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>

namespace stitch {

// Identifies a worker within its world: a strong integer, equal to its rank. It belongs to the
// worker's name: a worker that is restarted under its name has it again.
class WorkerId {
 public:
  constexpr WorkerId() noexcept = default;
  // That of the worker with this rank.
  constexpr explicit WorkerId(std::uint32_t value) noexcept : value_(value) {}
  // The rank.
  [[nodiscard]] constexpr std::uint32_t value() const noexcept { return value_; }
  friend constexpr auto operator<=>(WorkerId, WorkerId) = default;
  friend std::ostream& operator<<(std::ostream& out, WorkerId id) { return out << id.value_; }
  template <class Archive>
  void serialize(Archive& archive) {
    archive(value_);
  }

 private:
  std::uint32_t value_ = 0;
};

// A worker's name, id and epoch: a worker that is restarted under its name has a higher epoch.
// Sendable.
struct WorkerInfo {
  std::string name;         // unique in its world
  WorkerId id;              // the rank
  std::uint64_t epoch = 0;  // which life of the worker

  friend bool operator==(const WorkerInfo&, const WorkerInfo&) = default;
  friend std::ostream& operator<<(std::ostream& out, const WorkerInfo& info) {
    return out << "worker \"" << info.name << "\" (id " << info.id << ")";
  }
  template <class Archive>
  void serialize(Archive& archive) {
    archive(name, id, epoch);
  }
};

// `worker "ps0" (id 7)`, as error texts name a worker.
[[nodiscard]] std::string to_string(const WorkerInfo& info);

// Whether a worker may be called so: 1 to 127 of letters, digits, '-', '_', ':', '.'.
[[nodiscard]] bool is_worker_name(const std::string& name);

}  // namespace stitch

template <>
struct std::hash<stitch::WorkerId> {
  std::size_t operator()(stitch::WorkerId id) const noexcept {
    return std::hash<std::uint32_t>{}(id.value());
  }
};
template <>
struct std::hash<stitch::WorkerInfo> {
  std::size_t operator()(const stitch::WorkerInfo& info) const noexcept;
};
