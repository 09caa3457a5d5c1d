#include "schedule.h"

#include <array>
#include <random>
#include <stdexcept>

namespace stitch_reliability {

namespace {

using namespace std::chrono_literals;
using Nanoseconds = std::chrono::nanoseconds;

constexpr std::array<const char*, 4> kTypes{"kill", "stop", "partition", "restart"};

Event::Type type_of(const std::string& name) {
  for (std::size_t i = 0; i < kTypes.size(); ++i) {
    if (name == kTypes[i]) return static_cast<Event::Type>(i);
  }
  throw std::invalid_argument("event \"" + name +
                              "\" is unknown; there are kill, stop, partition, restart");
}

std::string microseconds(Nanoseconds time) { return std::to_string(time.count() / 1000) + "us"; }

}  // namespace

const char* to_string(Event::Type type) { return kTypes.at(static_cast<std::size_t>(type)); }

std::vector<Event> make_schedule(const ScheduleSettings& settings) {
  std::vector<Event> events;
  std::vector<Event::Type> types;
  for (const auto& name : settings.types) types.push_back(type_of(name));
  if (settings.every <= 0s || types.empty()) return events;
  std::mt19937_64 random(settings.seed);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  for (Nanoseconds at = settings.every; at + 4s < settings.duration; at += settings.every) {
    Event event{types[below(types.size())], 0, at, 0s};
    const bool ends_a_life =
        event.type == Event::Type::kill || event.type == Event::Type::restart || below(2) == 1;
    event.victim =
        static_cast<int>(below(static_cast<std::size_t>(settings.workers - (ends_a_life ? 1 : 0))));
    switch (event.type) {
      case Event::Type::kill:
        event.lasts = std::chrono::milliseconds(200 + below(800));
        break;
      case Event::Type::restart:
        break;
      default:
        event.lasts = ends_a_life ? Nanoseconds(3s) : Nanoseconds(500ms);
    }
    events.push_back(event);
  }
  return events;
}

std::string partitions_for(const std::vector<Event>& events, int workers, Nanoseconds since) {
  std::string text;
  for (const Event& event : events) {
    if (event.type != Event::Type::partition || event.at + event.lasts <= since) continue;
    text += text.empty() ? "partition=" : ",partition=";
    text += "worker" + std::to_string(event.victim) + "|";
    std::string others;
    for (int rank = 0; rank < workers; ++rank) {
      if (rank != event.victim)
        others += (others.empty() ? "worker" : "+worker") + std::to_string(rank);
    }
    text += others + "@" + microseconds(std::max(event.at - since, Nanoseconds(0))) + "-" +
            microseconds(event.at + event.lasts - since);
  }
  return text;
}

}  // namespace stitch_reliability
