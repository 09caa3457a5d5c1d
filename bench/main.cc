// stitch-bench: measures stitch between two processes of this host. See `stitch-bench --help`.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <stdexcept>

#include "busy.h"
#include "cores.h"
#include "measure.h"
#include "report.h"
#include "settings.h"
#include "timing.h"
#include "two_processes.h"

namespace stitch_bench {

namespace {

// The first argument of a measure's process, before its measure, rank, path, the base memory, the
// kind of busy host and the command line.
constexpr const char* kSideWord = "--side-of-a-measure";
constexpr std::size_t kSideWords = 6;
constexpr int kNoDevice = 77;  // exit status

int run_side(const std::vector<std::string>& arguments) {
  if (arguments.size() < kSideWords)
    throw std::invalid_argument("a process of a measure was started wrongly");
  const Measure& measure = find_measure(arguments[1]);
  const int rank = std::stoi(arguments[2]);
  Side side(parse_settings({arguments.begin() + kSideWords, arguments.end()}), rank,
            arguments[3] == "-" ? "" : arguments[3], std::stod(arguments[4]), arguments[5]);
  const auto busy = begin_busy(arguments[5]);
  if (side.settings().pin) pin_to_core(rank);
  (rank == 0 ? measure.first : measure.second)(side);
  return 0;
}

// The wanted measures and their floors, in the order of the list, each once.
std::vector<const Measure*> wanted_measures(const Settings& settings) {
  std::vector<std::string> names;
  for (const auto& name : settings.measures) names.push_back(find_measure(name).name);
  for (const Measure& measure : all_measures()) {
    if ((settings.all && (!measure.needs_device || has_device())) ||
        (settings.measures.empty() && measure.quick))
      names.push_back(measure.name);
  }
  for (std::size_t i = 0; settings.floors && i < names.size(); ++i) {
    for (const auto& floor : find_measure(names[i]).floors) {
      if (std::find(names.begin(), names.end(), floor) == names.end()) names.push_back(floor);
    }
  }
  std::vector<const Measure*> wanted;
  for (const Measure& measure : all_measures()) {
    if (std::find(names.begin(), names.end(), measure.name) != names.end())
      wanted.push_back(&measure);
  }
  return wanted;
}

// Runs the rounds; one instance per program.
class Benchmark {
 public:
  Benchmark(std::vector<std::string> arguments, Settings settings)
      : arguments_(std::move(arguments)), settings_(std::move(settings)) {}

  int run() {
    const auto measures = wanted_measures(settings_);
    const auto kinds = settings_.busy.empty() ? std::vector<std::string>{"idle"} : settings_.busy;
    for (int round = 1; round <= settings_.rounds && processes_.interrupted() == 0; ++round) {
      for (const Measure* measure : measures) {
        const auto paths = measure->paths.empty() ? std::vector<std::string>{""} : measure->paths;
        for (const auto& path : paths) {
          for (const auto& busy : kinds) {
            if (processes_.interrupted() == 0) run_once(*measure, path, busy, round);
          }
        }
      }
    }
    print();
    if (processes_.interrupted() != 0) return 128 + processes_.interrupted();
    return failures_ == 0 ? 0 : 1;
  }

 private:
  void run_once(const Measure& measure, const std::string& path, const std::string& busy,
                int round) {
    const std::string label =
        measure.name + (path.empty() ? "" : " " + path) + (busy == "idle" ? "" : " busy-" + busy);
    std::vector<std::vector<std::string>> sides;
    for (const std::string rank : {"0", "1"}) {
      if (rank == "1" && measure.second == nullptr) break;
      auto& words = sides.emplace_back(
          std::vector<std::string>{kSideWord, measure.name, rank, path.empty() ? "-" : path,
                                   std::to_string(report_.value("memory.libtorch_only")), busy});
      words.insert(words.end(), arguments_.begin(), arguments_.end());
    }
    const auto start = Clock::now();
    std::fprintf(stderr, "round %d of %d  %-36s", round, settings_.rounds, label.c_str());
    const std::chrono::seconds limit(180 + static_cast<long>(60 * settings_.seconds));
    const std::string failure = processes_.run(
        sides, competitors_of(busy), limit, [this](const std::string& line) { report_.add(line); });
    std::fprintf(stderr, " %6.1f s\n", seconds_since(start));
    if (!failure.empty()) {
      std::fprintf(stderr, "stitch-bench: %s: %s\n", label.c_str(), failure.c_str());
      ++failures_;
    }
  }

  void print() const {
    if (!report_.empty()) std::fputs(report_.table().c_str(), stdout);
    if (settings_.result_lines) std::fputs(report_.result_lines().c_str(), stdout);
    if (!settings_.json_file.empty()) report_.write_json(settings_.json_file, settings_);
  }

  const std::vector<std::string> arguments_;
  const Settings settings_;
  TwoProcesses processes_;
  Report report_;
  int failures_ = 0;
};

void print_list() {
  for (const Measure& measure : all_measures()) {
    std::printf("%-28s%s%s\n", measure.name.c_str(), measure.about.c_str(),
                measure.quick ? "  (quick set)" : "");
  }
}

int run_program(const std::vector<std::string>& arguments) {
  if (!arguments.empty() && arguments.front() == kSideWord) return run_side(arguments);
  Settings settings = parse_settings(arguments);
  if (settings.help) {
    std::fputs(help_text().c_str(), stdout);
    return 0;
  }
  if (settings.list) {
    print_list();
    return 0;
  }
  for (const auto& name : settings.measures) {
    if (!find_measure(name).needs_device || has_device()) continue;
    std::fprintf(stderr, "stitch-bench: no device: the measure %s needs a CUDA device: %s\n",
                 name.c_str(), why_no_device().c_str());
    return kNoDevice;
  }
  return Benchmark(arguments, std::move(settings)).run();
}

}  // namespace

}  // namespace stitch_bench

int main(int argc, char** argv) try {
#ifndef __OPTIMIZE__
  std::fputs(
      "stitch-bench: warning: it is built without optimization; figures are of the preset "
      "release\n",
      stderr);
#endif
  return stitch_bench::run_program({argv + 1, argv + argc});
} catch (const std::exception& error) {
  std::fprintf(stderr, "stitch-bench: %s\n", error.what());
  return 2;
}
