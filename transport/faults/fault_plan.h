#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace stitch::transport {

// What STITCH_FAULT and Options::fault ask for; docs/reliability.md says what each part means and
// how it is written. Plain values.
struct FaultPlan {
  using Duration = std::chrono::nanoseconds;
  // When the process of one life of a worker is ended or stopped.
  struct Strike {
    enum class At : std::uint8_t { step, call, time };
    std::string worker;
    std::uint64_t epoch = 1;  // of that life; the first one is 1
    At at = At::time;
    std::uint64_t count = 0;  // of steps or calls
    Duration time{0};         // since the worker started
    bool kill = true;         // SIGKILL, else SIGSTOP
  };
  // Two groups of workers between which nothing is delivered, from `from` until `until` after the
  // start of the worker that looks.
  struct Partition {
    std::set<std::string, std::less<>> left;
    std::set<std::string, std::less<>> right;
    Duration from{0};
    Duration until = Duration::max();
    [[nodiscard]] bool between(std::string_view a, std::string_view b) const {
      return (left.contains(a) && right.contains(b)) || (left.contains(b) && right.contains(a));
    }
  };

  std::uint64_t seed = 1;
  double drop = 0;  // probabilities, for each message
  double duplicate = 0;
  double reorder = 0;
  Duration delay_from{0};  // of every message
  Duration delay_to{0};
  Duration cut{0};  // the mean life of a connection; 0: as long as it lives
  std::vector<Strike> strikes;
  std::vector<Partition> partitions;

  // Whether connections behave differently.
  [[nodiscard]] bool touches_connections() const noexcept {
    return drop > 0 || duplicate > 0 || reorder > 0 || delay_to.count() > 0 || cut.count() > 0 ||
           !partitions.empty();
  }
};

// Reads "seed=7,drop=0.01,delay=50ms,kill=ps0@step10". Nothing for an empty text. Throws
// Error(invalid_argument) naming the part that is wrong and what is allowed.
[[nodiscard]] std::optional<FaultPlan> parse_fault_plan(std::string_view text);

}  // namespace stitch::transport
