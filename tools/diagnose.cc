#include "diagnose.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>

#include "diagnose_silent.h"
#include "run_options.h"
#include "stitch/base/own_folder.h"

namespace stitch_run {
namespace {

constexpr std::size_t kMaxChains = 50;

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result;
}

std::string verdict_of(const WaitChain& chain) {
  return (chain.circular ? "circular wait: " : "") + chain.text;
}

std::string culprit_of(const WaitChain& chain) {
  std::string text = "worker \"" + chain.culprit + "\"";
  if (!chain.culprit_function.empty()) text += ", " + chain.culprit_function;
  return text;
}

// The workers for which others wait.
std::set<std::string> awaited_in(const std::vector<WaitChain>& chains) {
  std::set<std::string> awaited;
  for (const WaitChain& chain : chains) {
    awaited.insert(chain.culprit);
    for (const WaitLink& link : chain.links) awaited.insert(link.to);
  }
  return awaited;
}

void list_workers(const Dumps& dumps, const SilentWorkers& silent,
                  const std::vector<std::string>& names, std::string& text) {
  double newest = 0;
  for (const auto& [name, dump] : dumps.by_worker) newest = std::max(newest, dump.time);
  text += "\nworkers:\n";
  for (const auto& [name, dump] : dumps.by_worker) {
    text += "  \"" + name + "\", process " + std::to_string(dump.pid) + " on " + dump.host + ": " +
            dump.reason + " (" + dump.file + ")";
    if (newest - dump.time > kOldSeconds)
      text += ", " + seconds_text(newest - dump.time) + " older than the newest dump";
    text += '\n';
  }
  for (const std::string& name : names) text += "  \"" + name + "\" " + silent.why(name) + '\n';
}

// A file that is to be written. Nothing that has its name is opened: it is replaced.
struct Place {
  std::filesystem::path path;
  stitch::base::Descriptor folder;
  [[nodiscard]] std::string name() const { return path.filename(); }
};

Place place_of(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto there = std::filesystem::symlink_status(path, ignored);
  if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there))
    throw std::runtime_error("\"" + path.string() + "\" is no file");
  const auto folder = path.has_parent_path() ? path.parent_path() : ".";
  return {path,
          stitch::base::Descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC))};
}

// Has Graphviz draw. False where there is none.
bool run_dot(const Place& dot, const Place& svg) {
  const stitch::base::Descriptor from(
      ::openat(dot.folder.get(), dot.name().c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  const std::string unfinished = svg.name() + ".part";
  const auto to = stitch::base::make_file(svg.folder.get(), unfinished);
  const int in = from.get();  // a forked child's Descriptors are empty
  const int out = to.get();
  const pid_t child = from && to ? ::fork() : -1;
  if (child == 0) {
    const int null = ::open("/dev/null", O_WRONLY);
    if (null >= 0) ::dup2(null, STDERR_FILENO);
    ::dup2(in, STDIN_FILENO);
    ::dup2(out, STDOUT_FILENO);
    ::execlp("dot", "dot", "-Tsvg", nullptr);
    ::_exit(127);
  }
  int status = -1;
  const bool drawn =
      child > 0 && ::waitpid(child, &status, 0) == child && WIFEXITED(status) &&
      WEXITSTATUS(status) == 0 &&
      ::renameat(svg.folder.get(), unfinished.c_str(), svg.folder.get(), svg.name().c_str()) == 0;
  if (!drawn) ::unlinkat(svg.folder.get(), unfinished.c_str(), 0);
  return drawn;
}

}  // namespace

bool asks_for_diagnosis(const std::vector<std::string>& arguments) {
  return !arguments.empty() &&
         (arguments[0] == "--diagnose" || arguments[0].starts_with("--diagnose="));
}

std::string diagnosis_text(const Dumps& dumps) {
  const auto chains = find_waits(dumps);
  const SilentWorkers silent(dumps);
  const auto silent_names = silent.list(awaited_in(chains));
  std::string text;
  if (chains.empty()) {
    text = "no worker waits for another\n";
    if (!silent_names.empty()) {
      text = "no worker that has written a dump waits for another, but worker \"" +
             silent_names.front() + "\" " + silent.why(silent_names.front()) + '\n';
    }
  } else {
    text = verdict_of(chains.front()) + "\n\nculprit: " + culprit_of(chains.front()) + '\n';
  }
  if (chains.size() > 1) {
    text += "\nall that waits:\n";
    std::set<std::string> told;
    std::size_t listed = 0;
    for (const WaitChain& chain : chains) {
      if (!told.insert(chain.text).second) continue;
      if (listed++ == kMaxChains) break;
      text += "  " + verdict_of(chain) + '\n';
    }
    if (listed > kMaxChains) text += "  ... and more\n";
  }
  list_workers(dumps, silent, silent_names, text);
  if (!dumps.left_out.empty()) {
    text += "\nleft out, because they cannot be read:\n";
    for (const std::string& each : dumps.left_out) text += "  " + each + '\n';
  }
  if (!dumps.former_lives.empty()) {
    text += "\nof former lives, left out:\n";
    for (const std::string& each : dumps.former_lives) text += "  " + each + '\n';
  }
  if (!dumps.other_runs.empty()) {
    text += "\nof other runs, left out:\n";
    for (const std::string& each : dumps.other_runs) text += "  " + each + '\n';
  }
  return text;
}

std::string diagnosis_dot(const Dumps& dumps) {
  const auto chains = find_waits(dumps);
  std::map<std::string, std::string> notes;  // by worker: the functions that hold others up
  std::set<std::string> workers;
  struct Arrow {
    std::set<double> ages;  // of each wait once, whichever chains it is in
    bool circular = false;
  };
  std::map<std::tuple<std::string, std::string, std::string>, Arrow> arrows;
  for (const auto& [name, dump] : dumps.by_worker) workers.insert(name);
  const auto silent = SilentWorkers(dumps).list(awaited_in(chains));
  workers.insert(silent.begin(), silent.end());
  for (const WaitChain& chain : chains) {
    notes[chain.culprit] = chain.culprit_function;
    workers.insert(chain.culprit);
    for (const WaitLink& link : chain.links) {
      workers.insert(link.worker);
      workers.insert(link.to);
      Arrow& arrow = arrows[{link.worker, link.to, link.what}];
      arrow.ages.insert(link.seconds);
      arrow.circular = arrow.circular || chain.circular;
    }
  }
  std::string dot = "digraph waits {\n  rankdir=LR;\n  node [shape=box, style=rounded];\n";
  for (const std::string& name : workers) {
    std::string label = escaped(name);
    std::string style;
    if (const auto note = notes.find(name); note != notes.end()) {
      if (!note->second.empty()) label += "\\n" + escaped(note->second);
      style = ", style=\"rounded,filled\", fillcolor=\"#ffd0d0\"";
    }
    if (std::find(silent.begin(), silent.end(), name) != silent.end())
      label += "\\nno dump", style = ", style=\"rounded,filled,dashed\", fillcolor=\"#d0d0d0\"";
    dot += "  \"" + escaped(name) + "\" [label=\"" + label + "\"" + style + "];\n";
  }
  for (const auto& [key, arrow] : arrows) {
    const auto& [from, to, what] = key;
    dot += "  \"" + escaped(from) + "\" -> \"" + escaped(to) + "\" [label=\"" + escaped(what) +
           (arrow.ages.size() > 1 ? " (" + std::to_string(arrow.ages.size()) + ")" : "") + "\\n" +
           seconds_text(*arrow.ages.rbegin()) + "\"" + (arrow.circular ? ", color=red" : "") +
           "];\n";
  }
  return dot + "}\n";
}

int diagnose(const std::vector<std::string>& arguments) {
  std::vector<std::string> words = arguments;
  if (words[0].starts_with("--diagnose=")) {
    words.insert(words.begin() + 1, words[0].substr(words[0].find('=') + 1));
    words[0] = "--diagnose";
  }
  if (words.size() < 2) throw UsageError("--diagnose needs the folder that the dumps are in");
  std::string dot_file;
  std::string svg_file;
  for (std::size_t i = 2; i < words.size(); i += 2) {
    if (words[i] != "--dot" && words[i] != "--svg") {
      throw UsageError("--diagnose does not understand \"" + words[i] +
                       "\"; after the folder it takes --dot FILE and --svg FILE");
    }
    if (i + 1 == words.size()) throw UsageError(words[i] + " needs the name of a file");
    (words[i] == "--dot" ? dot_file : svg_file) = words[i + 1];
  }
  const Dumps dumps = read_dumps(words[1]);
  std::fputs(diagnosis_text(dumps).c_str(), stdout);
  const std::filesystem::path folder = words[1];
  const auto place = [&](const std::string& file, const char* otherwise) {
    if (!file.empty()) return place_of(file);
    return Place{folder / otherwise, stitch::base::open_own_folder(folder)};
  };
  const Place dot = place(dot_file, "waits.dot");
  const Place svg = place(svg_file, "waits.svg");
  if (!stitch::base::write_file(dot.folder.get(), dot.name(), diagnosis_dot(dumps)))
    throw std::runtime_error("\"" + dot.path.string() + "\" cannot be written");
  if (run_dot(dot, svg)) {
    std::printf("\npicture: %s\n", svg.path.c_str());
  } else {
    std::printf("\npicture: %s (no SVG: \"dot\" of Graphviz is not there)\n", dot.path.c_str());
  }
  return 0;
}

}  // namespace stitch_run
