#include "diagnose_silent.h"

#include <unistd.h>

#include <fstream>

namespace stitch_run {
namespace {

// The letter for the state of a process of this host; 0 if there is none.
char process_state(long pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(in, stat);
  const auto end = stat.rfind(')');
  return end == std::string::npos || end + 2 >= stat.size() ? '\0' : stat[end + 2];
}

}  // namespace

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
  for (const auto& [name, sign] : dumps.running) add(name, sign.epoch, "");
}

std::string SilentWorkers::why(const std::string& worker) const {
  const std::string none = "has written no dump";
  const auto last = named_.find(worker);
  const std::string over = last == named_.end() ? "" : last->second.over;
  if (over == "left") return none + ": it has left the world";
  const bool declared_dead = over == "dead";
  const auto found = dumps_.running.find(worker);
  if (found == dumps_.running.end()) {
    return none + (declared_dead ? ": it was declared dead"
                                 : ": it is stopped, dead, cut off, or has no dump folder");
  }
  const Dump& sign = found->second;
  char host[256] = {};
  const bool here = ::gethostname(host, sizeof(host) - 1) == 0 && sign.host == host;
  const std::string process = " (process " + std::to_string(sign.pid) + ")" +
                              (declared_dead ? ", and was declared dead" : "");
  if (!here) {
    return none +
           (declared_dead ? ": it was declared dead; look at process " : ": look at process ") +
           std::to_string(sign.pid) + " on " + sign.host;
  }
  switch (process_state(sign.pid)) {
    case '\0':
    case 'Z':
    case 'X':
      return none + ": it is dead" + process;
    case 'T':
    case 't':
      return none + ": it is stopped" + process;
    default:
      return none + ", though it runs" + process + ": send it SIGUSR1";
  }
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
