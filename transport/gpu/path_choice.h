#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace stitch::transport::gpu {

// How the bytes of one transfer travel. The numbers are on the wire.
enum class Path : std::uint8_t {
  staging = 0,  // through pinned host memory and the workers' connection
  local = 1,    // one copy on the device, within a process
  peer = 2,     // one copy from device to device, within a process
  nccl = 3,     // a two-rank communicator
};
inline constexpr std::size_t kPaths = 4;
[[nodiscard]] std::string_view to_string(Path path) noexcept;
// As counters name it: "staging", "local", "peer", "nccl".
[[nodiscard]] std::string_view short_name(Path path) noexcept;

// What tells whether two workers share a process. Equal identities: the same process.
struct ProcessIdentity {
  std::array<std::uint64_t, 2> host{};  // of its boot
  std::uint64_t process = 0;            // of this process; random, so that no other has it
  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};
// The identity of this process; a forked child has another. Any thread.
[[nodiscard]] ProcessIdentity this_process();

// What one end of an ordered pair of devices is.
struct PathEnd {
  ProcessIdentity process;
  std::array<char, 16> device_uuid{};
  int device = 0;
  int nccl_version = 0;  // 0: there is none, or it is not to be used
};

// How far a path between two devices is.
enum class PathState : std::uint8_t {
  untried,  // or broken, and time to try again
  opening,  // being opened or tested
  open,     // it has passed its test
  closed,   // not available: refused, or broken and not to be tried yet
};

// When a path that was refused or broke is tried again. Not thread-safe.
class PathPause {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // NCCL leaves a thread behind for each communicator that does not come up.
  static constexpr std::chrono::nanoseconds kLongest = std::chrono::hours(1);

  // It has failed. The first pause is `first`; each one that follows without success() between
  // them is twice as long, up to kLongest or `first`, whichever is longer.
  void failure(std::chrono::nanoseconds first);
  // A transfer has come by it.
  void success() { length_ = std::chrono::nanoseconds(0); }
  [[nodiscard]] std::chrono::nanoseconds length() const { return length_; }
  [[nodiscard]] bool over() const { return std::chrono::steady_clock::now() >= until_; }

 private:
  std::chrono::nanoseconds length_{0};
  Time until_{};
};

// How far each path from one device to another is.
struct PathStates {
  PathState peer = PathState::closed;
  PathState nccl = PathState::closed;
  bool nccl_between_hosts = true;
};

struct PathChoice {
  Path path = Path::staging;
  bool open_nccl = false;        // besides: begin to open a communicator
  bool test_peer = false;        // besides: begin to test copies between the devices
  bool versions_differ = false;  // it would be by NCCL, if the two versions worked together
  bool sealed = false;           // it would be by NCCL, if that was allowed between hosts
};

// Two ends of a communicator have one version of NCCL, to the last number: NCCL itself demands it.
[[nodiscard]] bool nccl_versions_match(int one, int other) noexcept;

// The path of a transfer of `bytes` from `source` to `destination`. Pure.
[[nodiscard]] PathChoice choose_path(const PathEnd& source, const PathEnd& destination,
                                     const PathStates& states, std::size_t bytes);

}  // namespace stitch::transport::gpu
