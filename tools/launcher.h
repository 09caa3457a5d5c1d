#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "child_process.h"
#include "guardian.h"
#include "line_output.h"
#include "run_options.h"
#include "worker_environment.h"

namespace stitch_run {

// One run of stitch-run: starts the processes, forwards their output lines, and ends when all of
// them have. Runs on the thread that calls run(), which sleeps in poll().
class Launcher {
 public:
  // REQUIRES: a single-threaded process; signals stay blocked from here on.
  explicit Launcher(RunOptions options);
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // Returns the exit status. When it returns, all the processes, and those that they started, have
  // ended.
  int run();

 private:
  using Clock = std::chrono::steady_clock;

  struct Worker {
    int rank;
    std::string name;
    ChildProcess process;
    LineSplitter out;
    LineSplitter err;
    std::optional<ExitStatus> status;
    int restarts = 0;  // so far
  };

  // The reason for which the run is stopped before all processes have ended; the first one is kept.
  struct Ending {
    const Worker* failed = nullptr;
    int signal = 0;
    bool timeout = false;
    std::string still_running = {};
  };

  // False when the program cannot be started; the reason has been printed and `exit_code_` set.
  bool start_all();
  // Throws std::system_error.
  [[nodiscard]] ChildProcess start(int rank);
  // Starts the program of a worker that has failed again. False when that is not to be, or fails.
  bool restart(Worker& worker);
  // The number of others that have not ended.
  [[nodiscard]] int running_beside(const Worker& worker) const;
  // Whether the run goes on although this worker has failed: enough others still run.
  [[nodiscard]] bool enough_without(const Worker& failed) const;
  // Says that a worker has failed, and what comes of it.
  void say(const Worker& worker, const std::string& consequence);
  void wait_for_events();
  void read_signals();
  void note_exits();
  // Reads the available bytes; true when no more are available now. Closes `fd` and sets it to -1
  // at the end of the stream.
  static bool read_output(int& fd, LineSplitter& lines);
  // Reads to the end and closes.
  static void drain(int& fd, LineSplitter& lines);
  // Asks all processes to stop, and kills them after the grace time.
  void stop(Ending ending, int signal);
  void send_to_groups(int signal);
  [[nodiscard]] std::string running_names() const;
  // Kills the processes that workers left behind, and reaps all.
  void sweep();
  void report();

  const RunOptions options_;
  RendezvousFolder rendezvous_;
  Guardian guardian_;
  int signals_ = -1;
  LineSink out_;
  LineSink err_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::size_t running_ = 0;
  int port_ = 0;
  std::optional<Ending> ending_;
  std::optional<Clock::time_point> kill_at_;
  std::optional<Clock::time_point> timeout_at_;
  int exit_code_ = 0;
};

}  // namespace stitch_run
