#include "diagnose_silent.h"

namespace stitch_run {

SilentWorkers::SilentWorkers(const Dumps& dumps) : dumps_(dumps) {
  const auto add = [this](const std::string& name, double epoch, const std::string& life) {
    LastLife& last = named_[name];
    if (epoch < last.epoch) return;
    if (epoch > last.epoch) last = {epoch, ""};
    // Others may not know it yet.
    if (life == "left" || life == "dead") last.over = life;
  };
  for (const auto& [name, dump] : dumps.by_worker) {
    for (const DumpRow& row : dump.rows("members"))
      add(row.text("name"), row.number("epoch"), row.text("life"));
  }
}

std::string SilentWorkers::why(const std::string& worker) const {
  const std::string none = "has written no dump";
  const auto last = named_.find(worker);
  const std::string over = last == named_.end() ? "" : last->second.over;
  if (over == "left") return none + ": it has left the world";
  return none + (over == "dead" ? ": it was declared dead"
                                : ": it is stopped, dead, cut off, or was not asked for one");
}

std::vector<std::string> SilentWorkers::list(const std::set<std::string>& awaited) const {
  std::vector<std::string> silent;
  for (const auto& [name, last] : named_) {
    if (dumps_.find(name) == nullptr && (last.over.empty() || awaited.contains(name)))
      silent.push_back(name);
  }
  return silent;
}

}  // namespace stitch_run
