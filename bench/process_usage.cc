#include "process_usage.h"

#include <time.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace stitch_bench {

namespace {

// A number from /proc/self/status.
double status_number(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(name + ":")) continue;
    std::istringstream words(line.substr(name.size() + 1));
    double value = 0;
    if (words >> value) return value;
  }
  throw std::runtime_error("/proc/self/status does not have " + name);
}

double cpu_seconds() {
  timespec used{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

}  // namespace

double resident_mib() { return status_number("VmRSS") / 1024; }

int thread_count() { return static_cast<int>(status_number("Threads")); }

double cpu_percent_while_asleep(double seconds) {
  const auto start = std::chrono::steady_clock::now();
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const double used = cpu_seconds() - before;
  return 100 * used /
         std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace stitch_bench
