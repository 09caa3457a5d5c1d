#include "run_options.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <string_view>

#include "stitch/base/name_list.h"

namespace stitch_run {
namespace {

constexpr int kMaxProcesses = 1000;
constexpr double kMaxSeconds = 1e7;
constexpr std::array<std::string_view, 11> kOptions{
    "-n",      "--min-workers", "--max-workers", "--restarts", "--name",    "--timeout",
    "--grace", "--no-prefix",   "--help",        "--version",  "--diagnose"};

std::string unknown_option(const std::string& option) {
  std::string text = "unknown option \"" + option + "\"";
  // The names of -n in other launchers.
  for (std::string_view alias : {"--n", "-np", "--np", "--nproc", "--nprocs", "--nproc-per-node",
                                 "--nproc_per_node", "-N", "-w", "--workers"}) {
    if (option == alias)
      return text + "; did you mean \"-n\"? (stitch-run --help lists the options)";
  }
  // Of a short option most letters are others in one that is three edits away.
  const std::size_t near = std::min<std::size_t>(3, option.size() / 3);
  const auto distance = [&](std::string_view known) {
    return stitch::base::edit_distance(option, std::string(known), near);
  };
  const auto nearest = std::ranges::min_element(kOptions, {}, distance);
  if (distance(*nearest) <= near) text += "; did you mean \"" + std::string(*nearest) + "\"?";
  return text + " (stitch-run --help lists the options)";
}

int parse_processes(const std::string& option, const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool digits =
      !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
  if (!digits || end != text.data() + text.size() || (error == std::errc() && value == 0)) {
    throw UsageError(option + " is \"" + text + "\"; it takes a number of processes from 1 to " +
                     std::to_string(kMaxProcesses));
  }
  if (error != std::errc() || value > kMaxProcesses) {
    throw UsageError(option + " is " + text + "; one host runs at most " +
                     std::to_string(kMaxProcesses) + " processes");
  }
  return value;
}

int parse_restarts(const std::string& text) {
  constexpr int kMaxRestarts = 1000;
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 ||
      value > kMaxRestarts) {
    throw UsageError("--restarts is \"" + text + "\"; it takes a number from 0 to " +
                     std::to_string(kMaxRestarts));
  }
  return value;
}

// Fills what was not given, and checks that it fits together: min <= n <= max.
void complete_sizes(RunOptions& options, std::optional<int> processes, std::optional<int> min,
                    std::optional<int> max) {
  if (!processes && !max) {
    throw UsageError("-n is missing: say how many processes to start, as in stitch-run -n 4 ./app");
  }
  options.processes = processes ? *processes : *max;
  if (!min && !max) return;
  options.elastic = RunOptions::Range{min.value_or(1), max.value_or(options.processes)};
  const auto [least, most] = *options.elastic;
  if (least > options.processes || options.processes > most) {
    throw UsageError(std::to_string(options.processes) +
                     " processes do not fit a world of --min-workers " + std::to_string(least) +
                     " to --max-workers " + std::to_string(most));
  }
}

std::chrono::milliseconds parse_seconds(const std::string& option, const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value) ||
      value < 0 || value > kMaxSeconds) {
    throw UsageError(option + " is \"" + text + "\"; it takes a number of seconds");
  }
  return std::chrono::milliseconds(static_cast<long>(value * 1000));
}

void check_command(const RunOptions& options) {
  if (!options.command.empty()) return;
  throw UsageError("the program is missing, as in stitch-run -n " +
                   std::to_string(options.processes) + " ./app");
}

// The value in "--name=value" or "-n4", which is cut off `option`.
std::optional<std::string> split_off_value(std::string& option) {
  std::size_t end = option.find('=');
  std::size_t begin = end + 1;
  if (!option.starts_with("--")) {
    if (option.size() < 3 || option[1] != 'n' || option[2] < '0' || option[2] > '9')
      return std::nullopt;
    end = begin = 2;
  }
  if (end == std::string::npos) return std::nullopt;
  std::string value = option.substr(begin);
  option.resize(end);
  return value;
}

}  // namespace

RunOptions parse_options(const std::vector<std::string>& arguments) {
  RunOptions options;
  std::optional<int> processes;
  std::optional<int> min;
  std::optional<int> max;
  std::size_t i = 0;
  for (; i < arguments.size(); ++i) {
    std::string option = arguments[i];
    if (option == "--") {
      ++i;
      break;
    }
    if (option.size() < 2 || option[0] != '-') break;

    const std::optional<std::string> attached = split_off_value(option);
    const auto value = [&]() -> std::string {
      if (attached) return *attached;
      if (i + 1 == arguments.size()) throw UsageError(option + " needs a value");
      return arguments[++i];
    };
    const auto no_value = [&] {
      if (attached)
        throw UsageError(option + " takes no value, but was given \"" + *attached + "\"");
    };

    if (option == "-n") {
      processes = parse_processes(option, value());
    } else if (option == "--min-workers") {
      min = parse_processes(option, value());
    } else if (option == "--max-workers") {
      max = parse_processes(option, value());
    } else if (option == "--restarts") {
      options.restarts = parse_restarts(value());
    } else if (option == "--name") {
      options.name = value();
    } else if (option == "--timeout") {
      options.timeout = parse_seconds(option, value());
    } else if (option == "--grace") {
      options.grace = parse_seconds(option, value());
    } else if (option == "--no-prefix") {
      no_value();
      options.prefix = false;
    } else if (option == "--help" || option == "-h") {
      no_value();
      options.help = true;
    } else if (option == "--version") {
      no_value();
      options.version = true;
    } else {
      throw UsageError(unknown_option(arguments[i]));
    }
  }
  options.command.assign(arguments.begin() + static_cast<std::ptrdiff_t>(i), arguments.end());
  if (options.help || options.version) return options;
  complete_sizes(options, processes, min, max);
  check_command(options);
  return options;
}

std::string help_text() {
  return R"(usage: stitch-run -n N [options] program [arguments...]
       stitch-run --diagnose DIR [--dot FILE] [--svg FILE]

Starts N processes of one program on this host as workers 0 to N-1 of a group.

  -n N            how many processes
  --min-workers M, --max-workers X
                  an elastic world: it starts when M workers have arrived (default: 1), and workers
                  join and leave, up to X at a time (default: N). -n is X where it is not given.
                  A worker that fails does not end the run while M others run
  --restarts K    starts a worker that fails again, under its rank and name, up to K times
                  (default: 0), and says so; the others go on meanwhile
  --name PREFIX   worker i is called PREFIX<i> (default: worker)
  --timeout S     stop everything after S seconds, with status 124
  --grace S       time between asking processes to stop and killing them (default: 5)
  --no-prefix     no "[worker0] " in front of each line; the processes get stdout itself, so that a
                  program can draw a progress bar on the terminal
  --help          this text
  --version       the version

Each process finds in its environment:
  RANK, LOCAL_RANK              its number, 0 to N-1
  WORLD_SIZE, LOCAL_WORLD_SIZE  N
  MASTER_ADDR, MASTER_PORT      127.0.0.1 and a port that was free
  STITCH_NAME                   its name
  STITCH_INIT_METHOD            file:// and a private file in which the workers meet
  STITCH_SECRET_FILE            a private file with a random secret, where neither it nor
                                STITCH_SECRET is set
  STITCH_JOB                    a random name of the run
  STITCH_WORLD_SIZE             M:X, in an elastic world
  OMP_NUM_THREADS               processors divided by N, at least 1; kept where it is set already
  OMP_WAIT_POLICY               passive, where N is above 1; kept where it is set already
Standard input is empty.

--diagnose reads the dumps that workers have written into DIR (STITCH_DUMP_DIR: when a call times
out, on SIGUSR1) and says who waits for whom, in which function and since when;
the first line is the verdict. It draws DIR/waits.dot, and DIR/waits.svg where Graphviz is there.
SIGUSR1 to a worker, or to all: pkill -USR1 -f ./app (stitch-run, which that matches, too, takes no
notice of it).

When one process fails and is not to be started again, the others are asked to stop (SIGTERM) and
killed after the grace time; the failure is printed last, and its status is stitch-run's: the exit
status, or 128 + the number of the signal. Ctrl-C and SIGTERM are passed on to the processes; a
second one kills them. No process is left behind.
)";
}

}  // namespace stitch_run
