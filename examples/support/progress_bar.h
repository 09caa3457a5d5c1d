#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

// Shows how far a training run is, its loss, images per second and the time left. On a terminal one
// line is redrawn in place, at most ten times a second; elsewhere a line is printed every few
// percent. Not thread-safe.
class ProgressBar {
 public:
  // `total` images will be seen. `out` stays open.
  ProgressBar(std::int64_t total, std::FILE* out = stdout);

  // `done` images have been seen so far, in all; `loss` is the latest.
  void update(std::int64_t done, double loss);
  // Leaves the last state on the screen. Nothing is printed afterwards.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;

  void print(Clock::time_point now);
  [[nodiscard]] std::string text(Clock::time_point now) const;

  const std::int64_t total_;
  std::FILE* const out_;
  const bool terminal_;
  const Clock::time_point start_;
  std::int64_t done_ = 0;
  double loss_ = 0;
  Clock::time_point printed_at_{};
  std::int64_t printed_done_ = -1;
  std::int64_t printed_percent_ = -1;
};
