#pragma once

#include <string>

#include "settings.h"

namespace stitch_bench {

// One of the two processes of a measure, as the measure sees it: rank 0 measures and reports, rank
// 1 answers. Belongs to main(); used by the process's first thread only.
class Side {
 public:
  // The descriptors that both processes are started with.
  static constexpr int kLink = 3;     // a socket to the other process; absent where there is none
  static constexpr int kResults = 4;  // a pipe to the process that makes the table

  Side(Settings settings, int rank, std::string path, double base_rss_mib)
      : settings_(std::move(settings)),
        rank_(rank),
        path_(std::move(path)),
        base_rss_mib_(base_rss_mib) {}

  [[nodiscard]] const Settings& settings() const { return settings_; }
  [[nodiscard]] int rank() const { return rank_; }
  // "same_host" or "tcp": how stitch is to connect; empty for measures without stitch.
  [[nodiscard]] const std::string& path() const { return path_; }
  // What a process that only loads libtorch takes, as measured before; 0 when it was not.
  [[nodiscard]] double base_rss_mib() const { return base_rss_mib_; }
  // The floor that belongs to this path: one over shared memory, or one over TCP.
  [[nodiscard]] std::string floor(const std::string& same_host, const std::string& tcp) const {
    return "floor." + (path_ == "tcp" ? tcp : same_host);
  }

  // Sends a line to the other process; receives one, waiting. Throws std::runtime_error when the
  // other process is gone.
  void tell(const std::string& line) const;
  [[nodiscard]] std::string hear() const;
  // Both sides have got here.
  void meet() const;

  // Reports a number. `key` and `unit` have no blanks. `floor`: the key of what it is to be
  // compared with.
  void result(const std::string& key, double value, const std::string& unit,
              const std::string& floor = {}) const;

 private:
  const Settings settings_;
  const int rank_;
  const std::string path_;
  const double base_rss_mib_;
};

}  // namespace stitch_bench
