#include "tests/simulation/kernel.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <exception>
#include <iostream>

namespace stitch::simulation {

bool History::traced_ = false;

// Histories that begin while it lives keep their traces.
class Trace {
 public:
  Trace() { History::traced_ = true; }
  ~Trace() { History::traced_ = false; }
};

Outcome History::run() {
  try {
    play();
  } catch (const std::exception& error) {
    fail(std::string("it throws: ") + error.what());
  }
  std::string trace;
  for (const std::string& line : trace_) trace += line;
  return {failure_, counts_, std::move(trace)};
}

bool History::step() {
  if (failed() || agenda_.empty()) return false;
  now_ = agenda_.time();
  agenda_.take()();
  return true;
}

void History::run_until(Time end) {
  while (!agenda_.empty() && agenda_.time() <= end && step()) continue;
  now_ = end;
}

std::string History::time_text() const {
  const auto passed = now_ - Time(std::chrono::hours(1));
  if (passed == Duration{}) return "";
  return std::to_string(std::chrono::duration<double, std::milli>(passed).count()) + " ms: ";
}

Totals& Totals::operator+=(const Totals& other) {
  for (const auto& [what, times] : other.counts) counts[what] += times;
  histories += other.histories;
  of += other.of;
  return *this;
}

std::uint64_t Totals::operator[](const std::string& what) const {
  const auto found = counts.find(what);
  return found == counts.end() ? 0 : found->second;
}

void Totals::expect_over(const std::string& what, std::uint64_t least) const {
  if (histories <= 1) return;
  EXPECT_GT((*this)[what], least * histories / of) << what;
}

void Totals::expect_under(const std::string& what, std::uint64_t most) const {
  if (histories <= 1) return;
  EXPECT_LT((*this)[what], most * histories / of) << what;
}

Totals run_histories(std::uint64_t first, std::uint64_t count, const Run& run) {
  constexpr std::size_t kEnd = 4'000;  // characters
  Totals totals{.of = count};
  std::uint64_t number = first;
  std::uint64_t end = first + share_of(count);
  const char* const replayed = std::getenv("HISTORY");
  if (replayed != nullptr) {
    number = std::stoull(replayed);
    if (number < first || number >= first + count) return totals;
    end = number + 1;
  }
  for (; number < end; ++number) {
    const Outcome outcome = run(number);
    ++totals.histories;
    for (const auto& [what, times] : outcome.counts) totals.counts[what] += times;
    if (outcome.failure.empty() && replayed == nullptr) continue;
    const Trace traced;
    const std::string trace = run(number).trace;
    std::cerr << trace.substr(replayed == nullptr && trace.size() > kEnd ? trace.size() - kEnd : 0);
    EXPECT_EQ(outcome.failure, "") << "HISTORY=" << number << " repeats it";
    break;
  }
  return totals;
}

}  // namespace stitch::simulation
