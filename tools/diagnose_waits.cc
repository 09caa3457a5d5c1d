// One file, though long: the functions that follow a chain call one another.
#include "diagnose_waits.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "diagnose_silent.h"

namespace stitch_run {
namespace {

constexpr std::size_t kMaxLinks = 64;
// Of a gathering: as its caller names it, and as the worker that serves it does.
constexpr std::string_view kGatherings[] = {"stitch::Worker::barrier", "stitch::Worker::all_gather",
                                            "stitch::detail::fetch_posted"};

constexpr std::string_view kShutdown = "shutdown";  // as WaitLink::what
constexpr std::string_view kForLeader = "the leader of the shutdown";

std::string in_quotes(std::string_view worker) { return "\"" + std::string(worker) + "\""; }

std::string with_brackets(const std::string& function) {
  return function.empty() || function.back() == ')' ? function : function + "()";
}

bool is_barrier(const std::string& function) {
  return std::any_of(std::begin(kGatherings), std::end(kGatherings), [&](std::string_view name) {
    return function.find(name) != std::string::npos;
  });
}

// Follows one chain from link to link.
class Follower {
 public:
  Follower(const Dumps& dumps, const SilentWorkers& silent) : dumps_(dumps), silent_(silent) {}

  WaitChain take() && {
    // A chain that comes back to a worker in it, and ends there in a wait, is a circle.
    if (ends_in_wait_ && !chain_.circular) {
      for (const WaitLink& link : chain_.links)
        chain_.circular = chain_.circular || (link.worker == chain_.culprit && several(link) &&
                                              link.what != kShutdown);
    }
    chain_.text = text_;
    return std::move(chain_);
  }

  // `from` waits for the answer to one of its calls. `since` and `row` are of its tables "calls
  // made" or "calls timed out".
  void follow_call(const Dump& from, const DumpRow& row) {
    const std::string function = row.text("function");
    const std::string to = row.text("to");
    const double age = row.number("age");
    if (is_barrier(function)) {
      follow_barrier(from, to, age);
      return;
    }
    const std::string call = with_brackets(function);
    link(from.name, to, call, age);
    say("worker " + in_quotes(to) + ": call " + call + " since " + seconds_text(age));
    const Dump* const there = dumps_.find(to);
    if (there == nullptr) {
      end_silent(to);
      return;
    }
    for (const DumpRow& served : there->rows("calls served")) {
      if (served.text("caller") == from.name && served.number("call") == row.number("call")) {
        follow_served(*there, served, "");
        return;
      }
    }
    const std::string state = row.text("state");
    if (state == "waits for a connection" || state == "waits to be sent") {
      end(to, function, "; the request " + state + why_not_connected(from, to), false);
      return;
    }
    end(to, function,
        "; worker " + in_quotes(to) +
            " has no such call: the request or the answer is on its way, "
            "or the call has ended there",
        false);
  }

  // What the program's own threads of a worker wait for. False if they wait for nothing.
  bool follow_own_threads(const Dump& dump) {
    std::optional<DumpRow> oldest;
    for (const DumpRow& row : dump.rows("calls made")) {
      if (row.has("under caller")) continue;
      if (!oldest || row.number("age") > oldest->number("age")) oldest = row;
    }
    if (!oldest || !enter(dump.name, "its own threads")) return false;
    add("; worker " + in_quotes(dump.name) + " itself waits for ");
    follow_call(dump, *oldest);
    return true;
  }

  void follow_shutdown(const Dump& dump, const DumpRow& row) {
    const std::string to = row.text("worker");
    const std::string what = row.text("waits for");
    const double age = row.number("age");
    link(dump.name, to, std::string(kShutdown), age);
    say("worker " + in_quotes(to) + " in its shutdown since " + seconds_text(age) + ": for " +
        what);
    if (!enter(dump.name, "shutdown")) return;
    const Dump* const there = dumps_.find(to);
    if (there == nullptr) {
      end_silent(to);
      return;
    }
    if (what == kForLeader || what == "its leave") {
      const auto next = there->rows("shutdown");
      if (!next.empty()) {
        add("; that one waits for ");
        follow_shutdown(*there, next.front());
        return;
      }
    }
    if (what == "calls to end") {
      if (follow_oldest_served(*there)) return;
      if (follow_own_threads(*there)) return;
    }
    if (there->rows("shutdown").empty()) {
      if (follow_own_threads(*there)) return;
      if (follow_oldest_served(*there)) return;
      end(to, "", "; worker " + in_quotes(to) + " has not called shutdown", false);
      return;
    }
    end(to, "", "; worker " + in_quotes(to) + " is shutting down, too", false);
  }

  void follow_pass(const Dump& dump, const DumpRow& row) {
    const std::string context = row.text("context");
    const double age = row.number("age");
    if (!enter(dump.name, "pass " + context)) return;
    if (row.number("thread") != 0) {
      end(dump.name, "backward",
          "; worker " + in_quotes(dump.name) + " runs a node of the pass, its thread " +
              row.text("thread state"),
          false);
      return;
    }
    std::vector<std::string> awaited;
    const std::string names = row.text("waits for");
    for (std::size_t at = 0; at < names.size();) {
      const auto space = std::min(names.find(' ', at), names.size());
      awaited.push_back(names.substr(at, space - at));
      at = space + 1;
    }
    // The first that has something to say; a worker that is done waits for nothing.
    for (const std::string& to : awaited) {
      const Dump* const there = dumps_.find(to);
      if (there == nullptr || to == dump.name) {
        if (there != nullptr) continue;
        link(dump.name, to, "backward", age);
        say("worker " + in_quotes(to) + ": backward of context " + context + " since " +
            seconds_text(age));
        end_silent(to);
        return;
      }
      std::optional<DumpRow> theirs;
      for (const DumpRow& each : there->rows("backward passes")) {
        if (each.text("context") == context) theirs = each;
      }
      const bool runs = theirs && theirs->number("thread") != 0;
      const bool held = pool_is_held(*there);
      if (!runs && !held && awaited.size() > 1 && &to != &awaited.back()) continue;
      link(dump.name, to, "backward", age);
      say("worker " + in_quotes(to) + ": backward of context " + context + " since " +
          seconds_text(age));
      if (runs) {
        follow_pass(*there, *theirs);
      } else if (held) {
        add("; the gradients wait there for a thread");
        end_in_pool(*there, "backward");
      } else if (theirs && theirs->number("root here") == 0) {
        follow_pass(*there, *theirs);
      } else {
        end(to, "backward", "; nothing of the pass runs there now", false);
      }
      return;
    }
    end(dump.name, "backward", "; nothing of the pass runs now", false);
  }

  // The words so far begin with "worker "a" waits for ".
  void begin(const std::string& worker) { text_ = "worker " + in_quotes(worker) + " waits for "; }
  void set_weight(bool waited_for, double seconds) {
    chain_.waited_for = waited_for;
    chain_.seconds = seconds;
  }

 private:
  void add(const std::string& text) { text_ += text; }
  void say(const std::string& text) { text_ += text; }
  bool several(const WaitLink& link) const { return link.to != link.worker; }
  void link(const std::string& worker, const std::string& to, const std::string& what, double age) {
    chain_.links.push_back({worker, to, what, age});
  }
  // False at the second time: the chain is a circle.
  bool enter(const std::string& worker, const std::string& what) {
    if (chain_.links.size() > kMaxLinks || entered_.size() > 4 * kMaxLinks) return false;
    if (entered_.emplace(worker, what).second) return true;
    chain_.circular = true;
    end(worker, chain_.links.empty() ? "" : chain_.links.back().what, ", which waits for itself",
        true);
    return false;
  }
  void end(const std::string& worker, const std::string& function, const std::string& text,
           bool waits) {
    text_ += text;
    chain_.culprit = worker;
    chain_.culprit_function = with_brackets(function);
    ends_in_wait_ = waits;
  }
  void end_silent(const std::string& worker) {
    end(worker, "", "; worker " + in_quotes(worker) + " " + silent_.why(worker), false);
  }

  static std::string why_not_connected(const Dump& from, const std::string& to) {
    for (const DumpRow& row : from.rows("members")) {
      if (row.text("name") == to && !row.text("state").empty())
        return " (" + row.text("state") + ")";
    }
    return "";
  }

  // A call that `dump` serves. `how` stands before it in the text.
  void follow_served(const Dump& dump, const DumpRow& row, const std::string& how) {
    const std::string function = row.text("function");
    const std::string stage = row.text("stage");
    const std::string call = function.empty() ? "the request" : with_brackets(function);
    if (!enter(dump.name, row.text("caller") + " " + std::to_string(row.number("call")))) return;
    if (stage == "queued") {
      add("; " + call + " is queued there" + how);
      end_in_pool(dump, function);
    } else if (stage == "running") {
      follow_running(dump, row, function);
    } else if (stage == "answered") {
      end(dump.name, function,
          "; " + in_quotes(dump.name) + " has answered it: the answer is on its way", false);
    } else if (!row.text("object").empty() && row.number("running for") == 0) {
      follow_object(dump, row.text("object"));
    } else if (const auto made = made_under(dump, row)) {
      add("; " + in_quotes(dump.name) + " has begun " + call + ", which waits for ");
      follow_call(dump, *made);
    } else {
      end(dump.name, function,
          "; " + in_quotes(dump.name) + " has begun " + call + " " +
              seconds_text(row.number("running for")) +
              " ago, and the future that it returned is completed by nothing that stitch knows of "
              "(a promise that is not set)",
          true);
    }
  }

  void follow_running(const Dump& dump, const DumpRow& row, const std::string& function) {
    const std::string call = with_brackets(function);
    const std::string runs = "; " + in_quotes(dump.name) + " runs " + call + " since " +
                             seconds_text(row.number("running for"));
    const auto wait = wait_of_thread(dump, row);
    if (!wait) {
      const std::string state = row.text("thread state");
      end(dump.name, function,
          runs + ", in which its thread " + (state.empty() ? "does not wait for stitch" : state),
          state.find("lock") != std::string::npos);
      return;
    }
    if (wait->number("call") != 0) {
      for (const DumpRow& made : dump.rows("calls made")) {
        if (made.number("call") != wait->number("call")) continue;
        add(runs + ", which waits for ");
        follow_call(dump, made);
        return;
      }
    }
    if (const auto made = made_under(dump, row)) {
      add(runs + ", which waits for ");
      follow_call(dump, *made);
      return;
    }
    for (const DumpRow& pass : dump.rows("backward passes")) {
      if (pass.number("root here") == 0) continue;
      add(runs + ", which waits for ");
      follow_pass(dump, pass);
      return;
    }
    end(dump.name, function,
        runs +
            ", which waits for a future that is completed by nothing that stitch knows of (a "
            "promise that is not set)",
        true);
  }

  // An object of `dump` that is being created there.
  void follow_object(const Dump& dump, const std::string& object) {
    for (const DumpRow& row : dump.rows("objects being created")) {
      if (row.text("object") != object) continue;
      const std::string maker = row.text("made by");
      add("; the object is still being created by " +
          (maker.empty() ? std::string("a function that is not known") : with_brackets(maker)) +
          " since " + seconds_text(row.number("age")));
      for (const DumpRow& served : dump.rows("calls served")) {
        if (served.text("function") != maker || maker.empty()) continue;
        if (served.number("caller id") != row.number("creator id")) continue;
        follow_served(dump, served, "");
        return;
      }
      end(row.text("creator"), maker,
          "; worker " + in_quotes(row.text("creator")) +
              " has announced it, and its request is not "
              "there",
          false);
      return;
    }
    end(dump.name, "", "; it waits there for its turn at its object", false);
  }

  void follow_barrier(const Dump& from, const std::string& to, double age) {
    link(from.name, to, "a barrier or an all_gather", age);
    say("worker " + in_quotes(to) + " in a barrier or an all_gather since " + seconds_text(age));
    const Dump* const there = dumps_.find(to);
    if (there == nullptr) {
      end_silent(to);
      return;
    }
    if (!enter(to, "barrier")) return;
    const auto theirs = there->rows("gatherings");
    if (std::none_of(theirs.begin(), theirs.end(),
                     [](const DumpRow& row) { return !row.text("waits for").empty(); }))
      add(", where it has not arrived");
    if (follow_own_threads(*there)) return;
    const auto leaving = there->rows("shutdown");
    if (!leaving.empty()) {
      end(to, "barrier", ": it is shutting down", false);
      return;
    }
    end(to, "barrier", "; nothing is known to keep it", false);
  }

  // What holds the threads of a pool.
  static std::vector<DumpRow> holders(const Dump& dump) {
    std::vector<DumpRow> held;
    for (const DumpRow& row : dump.rows("calls served")) {
      if (row.text("stage") == "running" && !wait_of_thread(dump, row)) held.push_back(row);
    }
    return held;
  }
  static double pool_limit(const Dump& dump) {
    const auto pool = dump.rows("pool");
    // Below what counts of threads are compared with, whatever the dump says.
    constexpr double kMaxLimit = 1e9;
    return pool.empty() ? 0 : std::clamp(pool.front().number("limit"), 0.0, kMaxLimit);
  }
  static bool pool_is_held(const Dump& dump) {
    const auto pool = dump.rows("pool");
    return !pool.empty() && pool.front().number("queued") > 0 &&
           static_cast<double>(holders(dump).size()) >= pool_limit(dump);
  }
  void end_in_pool(const Dump& dump, const std::string& queued) {
    const auto held = holders(dump);
    if (held.empty()) {
      end(dump.name, queued, ": no thread of its pool is free, and no call is known to hold one",
          false);
      return;
    }
    std::map<std::string, int> counts;
    for (const DumpRow& row : held) ++counts[row.text("function")];
    const auto most = std::max_element(counts.begin(), counts.end(),
                                       [](auto& a, auto& b) { return a.second < b.second; });
    double longest = 0;
    std::string state;
    for (const DumpRow& row : held) {
      if (row.text("function") != most->first) continue;
      longest = std::max(longest, row.number("running for"));
      state = row.text("thread state");
    }
    const auto limit = static_cast<long>(pool_limit(dump));
    std::string text = ": ";
    text += static_cast<long>(held.size()) >= limit && most->second >= limit
                ? (limit == 1 ? "its one thread is held by "
                              : "all " + std::to_string(limit) + " threads of " +
                                    in_quotes(dump.name) + " are held by ")
                : std::to_string(most->second) + " of the " + std::to_string(limit) +
                      " threads of " + in_quotes(dump.name) + " are held by ";
    text += with_brackets(most->first) + " since " + seconds_text(longest);
    if (!state.empty()) text += ", in which the thread " + state;
    end(dump.name, most->first, text, state.find("lock") != std::string::npos);
  }

  bool follow_oldest_served(const Dump& dump) {
    std::optional<DumpRow> oldest;
    for (const DumpRow& row : dump.rows("calls served")) {
      if (row.text("stage") == "answered") continue;
      if (!oldest || row.number("age") > oldest->number("age")) oldest = row;
    }
    if (!oldest) return false;
    follow_served(dump, *oldest, "");
    return true;
  }

  // The innermost wait inside a future of the thread that runs a served call.
  static std::optional<DumpRow> wait_of_thread(const Dump& dump, const DumpRow& served) {
    std::optional<DumpRow> innermost;
    for (const DumpRow& row : dump.rows("threads that wait")) {
      if (row.number("thread") != served.number("thread") || !is_under(row, served)) continue;
      if (!innermost || row.number("depth") > innermost->number("depth")) innermost = row;
    }
    return innermost;
  }
  // The oldest call that the handler of a served call has made.
  static std::optional<DumpRow> made_under(const Dump& dump, const DumpRow& served) {
    for (const DumpRow& row : dump.rows("calls made")) {
      if (is_under(row, served)) return row;
    }
    return std::nullopt;
  }
  static bool is_under(const DumpRow& row, const DumpRow& served) {
    return row.has("under caller") && row.text("under caller") == served.text("caller") &&
           row.number("under call") == served.number("call");
  }

  const Dumps& dumps_;
  const SilentWorkers& silent_;
  WaitChain chain_;
  std::string text_;
  bool ends_in_wait_ = false;
  std::set<std::pair<std::string, std::string>> entered_;
};

// Whether a thread of the program waits for that call.
bool is_waited_for(const Dump& dump, const DumpRow& call) {
  const auto rows = dump.rows("threads that wait");
  return std::any_of(rows.begin(), rows.end(), [&](const DumpRow& row) {
    return row.number("call") == call.number("call") || is_barrier(call.text("function"));
  });
}

void add_chains_of(const Dumps& dumps, const SilentWorkers& silent, const Dump& dump,
                   std::vector<WaitChain>& chains) {
  const auto follow = [&](bool waited_for, double seconds, auto&& step) {
    Follower follower(dumps, silent);
    follower.begin(dump.name);
    follower.set_weight(waited_for, seconds);
    step(follower);
    chains.push_back(std::move(follower).take());
  };
  for (const DumpRow& row : dump.rows("calls timed out"))
    follow(true, row.number("age"), [&](Follower& f) { f.follow_call(dump, row); });
  std::set<std::pair<std::string, double>> served;
  for (const DumpRow& row : dump.rows("calls served"))
    served.emplace(row.text("caller"), row.number("call"));
  for (const DumpRow& row : dump.rows("calls made")) {
    // Those of handlers that are still here belong to the chains that come through these.
    if (row.has("under caller") &&
        served.contains({row.text("under caller"), row.number("under call")}))
      continue;
    follow(is_waited_for(dump, row), row.number("age"),
           [&](Follower& f) { f.follow_call(dump, row); });
  }
  for (const DumpRow& row : dump.rows("backward passes")) {
    if (row.number("root here") == 0) continue;
    follow(true, row.number("age"), [&](Follower& f) { f.follow_pass(dump, row); });
  }
  for (const DumpRow& row : dump.rows("shutdown")) {
    // A worker that serves until the others leave, too, waits for nothing.
    const std::string what = row.text("waits for");
    const bool serves = what == "shutdown to be called" || what == kForLeader;
    if (serves && dump.reason != "shutdown timed out") continue;
    follow(true, row.number("age"), [&](Follower& f) { f.follow_shutdown(dump, row); });
  }
}

// What a dump says of which the others may know better.
void name_old_dumps(const Dumps& dumps, std::vector<WaitChain>& chains) {
  double newest = 0;
  for (const auto& [name, dump] : dumps.by_worker) newest = std::max(newest, dump.time);
  for (WaitChain& chain : chains) {
    std::set<std::string> workers{chain.culprit};
    for (const WaitLink& link : chain.links) workers.insert({link.worker, link.to});
    for (const std::string& worker : workers) {
      const Dump* const dump = dumps.find(worker);
      if (dump == nullptr || newest - dump->time <= kOldSeconds) continue;
      chain.text += " (the dump of worker " + in_quotes(worker) + " is " +
                    seconds_text(newest - dump->time) + " older than the newest one)";
    }
  }
}

}  // namespace

std::string seconds_text(double seconds) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.1f s", seconds);
  return text;
}

std::vector<WaitChain> find_waits(const Dumps& dumps) {
  std::vector<WaitChain> chains;
  const SilentWorkers silent(dumps);
  for (const auto& [name, dump] : dumps.by_worker) add_chains_of(dumps, silent, dump, chains);
  name_old_dumps(dumps, chains);
  std::stable_sort(chains.begin(), chains.end(), [](const WaitChain& a, const WaitChain& b) {
    const auto rank = [](const WaitChain& chain) {
      return std::tuple(!chain.waited_for, !chain.circular, -chain.seconds);
    };
    return rank(a) < rank(b);
  });
  return chains;
}

}  // namespace stitch_run
