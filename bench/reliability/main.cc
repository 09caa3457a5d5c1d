// stitch-reliability: what happens to calls when workers are killed, stopped, partitioned and
// restarted. See `stitch-reliability --help`.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "chaos_run.h"
#include "detection.h"
#include "flags.h"
#include "neighbours.h"

namespace stitch_reliability {

namespace {

constexpr const char* kHelp =
    R"(stitch-reliability: what happens to calls when workers are killed, stopped and partitioned.

  stitch-reliability chaos [options]
      A world of processes that call each other, with references, gradients and optimizer steps,
      while workers are killed, stopped, partitioned and restarted. Prints one table. Exit status 1
      if an operation was lost (no outcome), executed twice, hung (no outcome within its deadline
      and the slack) or wrong, or if a process crashed.
        --processes N       workers (8), 2 to 64
        --duration T        (10m)
        --every T           between two events (2s); 0s: none
        --events LIST       of kill, stop, partition, restart (all). Stops and partitions last 0.5 s
                            or 3 s; the last worker is spared whatever ends a life
        --work LIST         of calls, references, gradients, steps (all)
        --seed N            chooses events and operations (1)
        --threads N         that make calls, in each worker (2), 1 to 3
        --pause T           of such a thread between two rounds (2ms)
        --slack T           (5s)
        --fault TEXT        Options::fault of all workers, such as drop=0.001
        --namespaces LIST   network namespaces; worker i is in the one of number i mod their count
        --verbose yes       a line for each event
      Figures: `stitch-reliability chaos` on a machine that does nothing else.

  stitch-reliability detection [options]
      The time from the death of a worker until a pending call to it fails, and until workers know
      that it was declared dead; median and worst. A partition by STITCH_FAULT lets handshakes pass,
      so that no worker is declared dead.
        --trials N          of each kind (100)
        --kinds LIST        of kill, stop, partition (all)
        --namespaces A,B    network namespaces, of workers 0 and 1, and of worker 2
        --cut COMMAND --restore COMMAND
                            cuts and restores the network between the two: a real partition

  stitch-reliability neighbours [options]
      The calls between two workers over TCP: alone, and while one of them has half-open connections
      that send nothing and a peer that reads nothing.
        --connections N     half-open (5000; fewer if the limit of open files is lower)
        --seconds N         of each measure (10)

bench/reliability/netem runs chaos and detection between two network namespaces with loss and delay.
In chaos and detection heartbeat_timeout is 1.5 s and reconnect_timeout 1 s.
Variables of stitch (STITCH_TRANSPORTS, STITCH_HEARTBEAT_TIMEOUT, STITCH_DUMP_DIR, ...) count. A
worker that hangs is ended by SIGABRT: with STITCH_DUMP_DIR it leaves a dump.
)";

// What is stopped or parted is to be noticed within a run. Variables count.
void notice_soon() {
  ::setenv("STITCH_HEARTBEAT_TIMEOUT", "1500ms", 0);
  ::setenv("STITCH_RECONNECT_TIMEOUT", "1s", 0);
}

int run_chaos(const std::vector<std::string>& words) {
  const Flags flags(words, {"processes", "duration", "every", "events", "work", "seed", "threads",
                            "pause", "slack", "fault", "namespaces", "verbose"});
  ChaosSettings settings;
  settings.schedule = {
      .seed = static_cast<std::uint64_t>(flags.number("seed", 1, 0, 1L << 62)),
      .workers = static_cast<int>(flags.number("processes", 8, 2, CallBook::kMaxWorkers)),
      .duration = flags.duration("duration", "10m"),
      .every = flags.duration("every", "2s"),
      .types = flags.list("events", "kill,stop,partition,restart")};
  settings.traffic = {.seed = settings.schedule.seed,
                      .work = flags.list("work", "calls,references,gradients,steps"),
                      .pause = flags.duration("pause", "2ms"),
                      .slack = flags.duration("slack", "5s")};
  check_work(settings.traffic.work);
  settings.threads = static_cast<int>(flags.number("threads", 2, 1, CallBook::kMaxThreads - 1));
  settings.fault = flags.text("fault", "");
  settings.namespaces = flags.list("namespaces", "");
  settings.verbose = flags.text("verbose", "no") == "yes";
  const int workers = settings.schedule.workers;
  ChaosRun run(std::move(settings));
  const ChaosCounts counts = run.run();
  const bool good = print_table(book(), counts, workers, run.lives());
  if (!good || counts.stderr_lines != 0) {
    run.keep_logs();
    std::printf("\n  what the workers wrote on stderr is in %s\n", run.folder().c_str());
  }
  return good ? 0 : 1;
}

int run_detection(const std::vector<std::string>& words) {
  const Flags flags(words, {"trials", "kinds", "namespaces", "cut", "restore"});
  DetectionSettings settings;
  settings.trials = static_cast<int>(flags.number("trials", 100, 1, 100'000));
  settings.kinds = flags.list("kinds", "kill,stop,partition");
  settings.namespaces = flags.list("namespaces", "");
  settings.cut = flags.text("cut", "");
  settings.restore = flags.text("restore", "");
  return measure_detection(settings);
}

int run_neighbours(const std::vector<std::string>& words) {
  const Flags flags(words, {"connections", "seconds"});
  return measure_neighbours(
      {.connections = static_cast<std::size_t>(flags.number("connections", 5000, 1, 1 << 20)),
       .seconds = static_cast<double>(flags.number("seconds", 10, 1, 3600))});
}

int run_program(const std::vector<std::string>& words) {
  const auto asks_for_help = [](const std::string& word) {
    return word == "--help" || word == "-h";
  };
  if (words.empty() || std::any_of(words.begin(), words.end(), asks_for_help)) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  const std::string& what = words.front();
  const std::vector<std::string> rest(words.begin() + 1, words.end());
  if (what == "neighbours") return run_neighbours(rest);
  notice_soon();
  if (what == "chaos") return run_chaos(rest);
  if (what == "detection") return run_detection(rest);
  throw std::invalid_argument("\"" + what +
                              "\" is unknown; there are chaos, detection, neighbours");
}

}  // namespace

}  // namespace stitch_reliability

int main(int argc, char** argv) try {
  return stitch_reliability::run_program({argv + 1, argv + argc});
} catch (const std::exception& error) {
  std::fprintf(stderr, "stitch-reliability: %s\n", error.what());
  return 2;
}
