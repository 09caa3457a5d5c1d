#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace stitch_reliability {

// What happens to a worker.
struct Event {
  enum class Type : std::uint8_t { kill, stop, partition, restart };
  Type type;
  int victim;
  std::chrono::nanoseconds at;     // since the beginning of the run
  std::chrono::nanoseconds lasts;  // until a stop or partition ends; of a kill, until the restart
};
[[nodiscard]] const char* to_string(Event::Type type);

struct ScheduleSettings {
  std::uint64_t seed = 1;
  int workers = 8;
  std::chrono::nanoseconds duration{};
  std::chrono::nanoseconds every{};  // 0: nothing happens
  std::vector<std::string> types;    // of "kill", "stop", "partition", "restart"
};

// The events of a run, one each `every`: the same for the same settings. The last worker is spared
// whatever ends a life, so that one life lasts from the first moment to the last.
// Stops and partitions last 0.5 s, which a worker survives, or 3 s, which it does not. Throws
// std::invalid_argument for a type that is unknown.
[[nodiscard]] std::vector<Event> make_schedule(const ScheduleSettings& settings);

// The partitions as Options::fault of a worker that starts `since` after the beginning; "" when
// none is left.
[[nodiscard]] std::string partitions_for(const std::vector<Event>& events, int workers,
                                         std::chrono::nanoseconds since);

}  // namespace stitch_reliability
