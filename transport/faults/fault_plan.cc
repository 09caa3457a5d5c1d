#include "stitch/transport/faults/fault_plan.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/name_list.h"
#include "stitch/base/parse_duration.h"

namespace stitch::transport {

namespace {

using Duration = FaultPlan::Duration;

constexpr const char* kNames[] = {"seed", "drop",      "delay", "duplicate", "reorder",
                                  "cut",  "partition", "kill",  "stop"};

// One "name=value" of the text.
struct Part {
  std::string_view name;
  std::string_view value;

  [[noreturn]] void refuse(const std::string& allowed) const {
    throw Error(ErrorCode::invalid_argument, "fault \"" + std::string(name) + "=" +
                                                 std::string(value) + "\" is not understood; " +
                                                 std::string(name) + " takes " + allowed);
  }
};

std::optional<std::uint64_t> number_of(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<Duration> duration_of(std::string_view text) {
  constexpr std::chrono::nanoseconds kMax{std::int64_t{1'000'000'000'000'000'000}};
  const bool has_unit = !text.empty() && text.back() >= 'a' && text.back() <= 'z';
  const auto duration = has_unit ? base::parse_duration(text) : std::nullopt;
  if (!duration || *duration >= kMax) return std::nullopt;
  return *duration;
}

std::optional<std::pair<Duration, Duration>> range_of(std::string_view text) {
  const auto dash = text.find('-');
  const auto from = duration_of(text.substr(0, dash));
  const auto to = dash == std::string_view::npos ? from : duration_of(text.substr(dash + 1));
  if (!from || !to || *to < *from) return std::nullopt;
  return std::pair(*from, *to);
}

double probability_of(const Part& part) {
  double value = 0;
  const char* const end_of_text = part.value.data() + part.value.size();
  const auto [end, error] = std::from_chars(part.value.data(), end_of_text, value);
  if (error != std::errc() || end != end_of_text || !(value >= 0 && value <= 1))
    part.refuse("a probability from 0 to 1, such as 0.01");
  return value;
}

FaultPlan::Strike strike_of(const Part& part) {
  constexpr const char* kAllowed =
      "a worker and a moment: ps0@step10, ps0@call1000, ps0@time2s; with an epoch other than 1: "
      "ps0/2@step10";
  const auto at = part.value.rfind('@');
  if (at == std::string_view::npos || at == 0) part.refuse(kAllowed);
  FaultPlan::Strike strike;
  const std::string_view life = part.value.substr(0, at);
  const auto slash = life.find('/');
  strike.worker = life.substr(0, slash);
  if (slash != std::string_view::npos) {
    const auto epoch = number_of(life.substr(slash + 1));
    if (!epoch || *epoch == 0 || strike.worker.empty()) part.refuse(kAllowed);
    strike.epoch = *epoch;
  }
  strike.kill = part.name == "kill";
  const std::string_view moment = part.value.substr(at + 1);
  if (moment.starts_with("time")) {
    const auto time = duration_of(moment.substr(4));
    if (!time) part.refuse(kAllowed);
    strike.time = *time;
    return strike;
  }
  const bool step = moment.starts_with("step");
  const auto count = step || moment.starts_with("call") ? number_of(moment.substr(4))
                                                        : std::optional<std::uint64_t>();
  if (!count || *count == 0) part.refuse(kAllowed);
  strike.at = step ? FaultPlan::Strike::At::step : FaultPlan::Strike::At::call;
  strike.count = *count;
  return strike;
}

std::set<std::string, std::less<>> names_of(const Part& part, std::string_view text,
                                            const char* allowed) {
  std::set<std::string, std::less<>> names;
  for (std::size_t at = 0; at <= text.size();) {
    const auto plus = std::min(text.find('+', at), text.size());
    if (plus == at) part.refuse(allowed);
    names.emplace(text.substr(at, plus - at));
    at = plus + 1;
  }
  return names;
}

FaultPlan::Partition partition_of(const Part& part) {
  constexpr const char* kAllowed =
      "two groups of workers and a time: ps0+ps1|trainer0@2s-5s, or ps0|ps1@2s, or ps0|ps1";
  const auto at = part.value.rfind('@');
  const std::string_view groups = part.value.substr(0, at);
  const auto bar = groups.find('|');
  if (bar == std::string_view::npos) part.refuse(kAllowed);
  FaultPlan::Partition partition;
  partition.left = names_of(part, groups.substr(0, bar), kAllowed);
  partition.right = names_of(part, groups.substr(bar + 1), kAllowed);
  for (const auto& name : partition.left) {
    if (partition.right.contains(name)) part.refuse("groups that have no worker in common");
  }
  if (at == std::string_view::npos) return partition;
  const std::string_view time = part.value.substr(at + 1);
  const auto dash = time.find('-');
  const auto from = duration_of(time.substr(0, dash));
  const auto until =
      dash == std::string_view::npos ? Duration::max() : duration_of(time.substr(dash + 1));
  if (!from || !until || *until <= *from) part.refuse(kAllowed);
  partition.from = *from;
  partition.until = *until;
  return partition;
}

void apply(const Part& part, FaultPlan& plan) {
  if (part.name == "seed") {
    const auto seed = number_of(part.value);
    if (!seed) part.refuse("a number from 0 on");
    plan.seed = *seed;
  } else if (part.name == "drop") {
    plan.drop = probability_of(part);
  } else if (part.name == "duplicate") {
    plan.duplicate = probability_of(part);
  } else if (part.name == "reorder") {
    plan.reorder = probability_of(part);
  } else if (part.name == "delay") {
    const auto range = range_of(part.value);
    if (!range) part.refuse("a duration, 50ms, or a range of them, 10ms-50ms");
    std::tie(plan.delay_from, plan.delay_to) = *range;
  } else if (part.name == "cut") {
    const auto mean = duration_of(part.value);
    if (!mean || mean->count() == 0) part.refuse("the mean life of a connection, such as 2s");
    plan.cut = *mean;
  } else if (part.name == "partition") {
    plan.partitions.push_back(partition_of(part));
  } else if (part.name == "kill" || part.name == "stop") {
    plan.strikes.push_back(strike_of(part));
  } else {
    std::vector<std::string> known(std::begin(kNames), std::end(kNames));
    const auto near = base::nearest_names(std::string(part.name), known, 1);
    throw Error(ErrorCode::invalid_argument,
                "fault \"" + std::string(part.name) + "\" is unknown; there are " +
                    base::join_names(known) +
                    (near.empty() ? "" : "; did you mean " + near.front() + "?"));
  }
}

}  // namespace

std::optional<FaultPlan> parse_fault_plan(std::string_view text) {
  if (text.empty()) return std::nullopt;
  FaultPlan plan;
  std::set<std::string_view> seen;
  for (std::size_t at = 0; at <= text.size();) {
    const auto comma = std::min(text.find(',', at), text.size());
    const std::string_view item = text.substr(at, comma - at);
    at = comma + 1;
    const auto equals = item.find('=');
    const Part part{item.substr(0, equals),
                    equals == std::string_view::npos ? "" : item.substr(equals + 1)};
    if (part.value.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  "fault \"" + std::string(item) + "\" is not understood; faults are name=value, " +
                      "several of them with commas: seed=7,drop=0.01,delay=50ms,kill=ps0@step10");
    }
    const bool repeatable = part.name == "kill" || part.name == "stop" || part.name == "partition";
    if (!repeatable && !seen.insert(part.name).second) part.refuse("one value; it is there twice");
    apply(part, plan);
  }
  return plan;
}

}  // namespace stitch::transport
