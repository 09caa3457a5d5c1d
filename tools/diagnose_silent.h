#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "diagnose_dump.h"

namespace stitch_run {

// The workers of a run that have written no dump. Refers to its Dumps. Thread contract: one thread.
class SilentWorkers {
 public:
  explicit SilentWorkers(const Dumps& dumps);

  // What is known of a worker of which there is no dump: that it was declared dead, has left, or
  // has written none.
  [[nodiscard]] std::string why(const std::string& worker) const;
  // Those that dumps name as members. One whose last life has left or was declared dead has nothing
  // to say: it is among them only if it is in `awaited`.
  [[nodiscard]] std::vector<std::string> list(const std::set<std::string>& awaited) const;

 private:
  // The last life of a worker that is named.
  struct LastLife {
    double epoch = 0;
    std::string over;  // "left" or "dead", as soon as one dump says so
  };

  const Dumps& dumps_;
  std::map<std::string, LastLife> named_;
};

}  // namespace stitch_run
