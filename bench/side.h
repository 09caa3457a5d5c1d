#pragma once

#include <string>

#include "settings.h"

namespace stitch_bench {

// One of the two processes of a measure: rank 0 measures and reports, rank 1 serves. Owned by
// main(); used by the main thread only.
class Side {
 public:
  // The descriptors that both processes are started with.
  static constexpr int kLink = 3;     // a socket to the other process; absent where there is none
  static constexpr int kResults = 4;  // a pipe to the process that prints the table

  Side(Settings settings, int rank, std::string path, double base_rss_mib, const std::string& busy)
      : settings_(std::move(settings)),
        prefix_(busy == "idle" ? "" : "busy-" + busy + "."),
        rank_(rank),
        path_(std::move(path)),
        base_rss_mib_(base_rss_mib) {}

  [[nodiscard]] const Settings& settings() const { return settings_; }
  [[nodiscard]] int rank() const { return rank_; }
  // Of Measure::paths: how stitch connects, "same_host" or "tcp", or how bytes go from device to
  // device; empty for measures without stitch.
  [[nodiscard]] const std::string& path() const { return path_; }
  // The memory of a process that only loads libtorch, measured before; 0 when it was not.
  [[nodiscard]] double base_rss_mib() const { return base_rss_mib_; }
  // The floor for this path: one over shared memory, or one over TCP.
  [[nodiscard]] std::string floor(const std::string& same_host, const std::string& tcp) const {
    return "floor." + (path_ == "tcp" ? tcp : same_host);
  }

  // Sends a line to the other process; waits for one from it. Throws std::runtime_error when
  // the other process has ended.
  void send_line(const std::string& line) const;
  [[nodiscard]] std::string receive_line() const;
  // Returns once both sides have called it.
  void meet() const;

  // Reports a number. `key` and `unit` have no blanks. `floor`: the key of the number to compare it
  // with.
  void result(const std::string& key, double value, const std::string& unit,
              const std::string& floor = {}) const;

 private:
  const Settings settings_;
  const std::string prefix_;  // of all keys
  const int rank_;
  const std::string path_;
  const double base_rss_mib_;
};

}  // namespace stitch_bench
