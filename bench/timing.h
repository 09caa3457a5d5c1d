#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "side.h"

namespace stitch_bench {

using Clock = std::chrono::steady_clock;

[[nodiscard]] inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
[[nodiscard]] inline Clock::time_point after(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// The quantile of the values, 0.5 for the median. 0 when there are none.
[[nodiscard]] inline double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at = std::min(values.size() - 1,
                           static_cast<std::size_t>(share * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}
[[nodiscard]] inline double median(std::vector<double> values) {
  return quantile(std::move(values), 0.5);
}

// Runs `call` repeatedly for `seconds`, at least `least` times, after a warm-up of a quarter of
// that. Returns the time of each run, in microseconds.
template <class Call>
[[nodiscard]] std::vector<double> time_each_us(double seconds, std::size_t least, Call&& call) {
  constexpr std::size_t kMaxSamples = std::size_t{1} << 20;  // the number of samples that are kept
  const auto warm = after(seconds / 4);
  for (std::size_t i = 0; i < std::max<std::size_t>(1, least / 4) || Clock::now() < warm; ++i)
    call();
  std::vector<double> times;
  times.reserve(kMaxSamples);
  const auto end = after(seconds);
  for (auto start = Clock::now();
       times.size() < least || (start < end && times.size() < kMaxSamples);) {
    call();
    const auto now = Clock::now();
    times.push_back(std::chrono::duration<double, std::micro>(now - start).count());
    start = now;
  }
  return times;
}

// Reports p50, p99 and p99.9 of times in microseconds, under key.p50 and so on; `floor` likewise,
// but without p99.9.
inline void report_latency(const Side& side, const std::string& key,
                           const std::vector<double>& times, const std::string& floor = {}) {
  side.result(key + ".p50", quantile(times, 0.5), "us", floor.empty() ? "" : floor + ".p50");
  side.result(key + ".p99", quantile(times, 0.99), "us", floor.empty() ? "" : floor + ".p99");
  side.result(key + ".p99.9", quantile(times, 0.999), "us");
}

inline constexpr double kMiB = 1024.0 * 1024.0;
inline constexpr double kGiB = 1024.0 * kMiB;

// The minimum number of repetitions for that size.
[[nodiscard]] inline std::size_t least_repetitions(int mib) { return mib >= 64 ? 3 : 5; }

}  // namespace stitch_bench
