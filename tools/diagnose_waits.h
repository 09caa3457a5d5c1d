#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "diagnose_dump.h"

namespace stitch_run {

// One link of a chain: `worker` waits for `to`, because of `what` (a function, "a barrier", ...).
struct WaitLink {
  std::string worker;
  std::string to;
  std::string what;
  double seconds = 0;
};

// Who waits for whom, from a thread or a pass that waits to what it waits for in the end.
struct WaitChain {
  std::string text;  // a sentence
  std::vector<WaitLink> links;
  // The worker and the function at the end, which everything before waits for. The function may be
  // empty: the worker as a whole is silent, or has not come to a barrier.
  std::string culprit;
  std::string culprit_function;
  bool circular = false;
  bool waited_for = false;  // a thread waits for it now, or it has timed out
  double seconds = 0;       // since when
};

// All that waits, the most telling first: circles, then what threads wait for, then by age. At most
// one for each beginning.
[[nodiscard]] std::vector<WaitChain> find_waits(const Dumps& dumps);

// Dumps of one hang are written within seconds: one that is so much older than the newest one may
// be of another.
inline constexpr double kOldSeconds = 60;

// "12.1 s".
[[nodiscard]] std::string seconds_text(double seconds);

}  // namespace stitch_run
