#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "chaos_worker.h"
#include "children.h"
#include "schedule.h"

namespace stitch_reliability {

struct ChaosSettings {
  ScheduleSettings schedule;
  TrafficSettings traffic;
  int threads = 2;                      // of each worker that make calls
  std::string fault;                    // more of Options::fault, of all workers
  std::vector<std::string> namespaces;  // of the network: worker i is in the one of number i mod n
  bool verbose = false;                 // a line for each event
};

// What a run has counted itself; the rest is in the book.
struct ChaosCounts {
  std::array<int, 4> events{};  // by Event::Type
  int restarts = 0;
  int came_back_by_themselves = 0;  // of the restarts: declared dead, or links lost
  int failed_starts = 0;            // init() failed
  int crashes = 0;                  // ends that no one asked for
  int hung = 0;
  std::size_t stderr_lines = 0;
  double seconds = 0;
};

// A world of processes under which it starts, kills, stops and continues workers by a schedule.
// Thread contract: one thread; the only one of its process.
class ChaosRun {
 public:
  explicit ChaosRun(ChaosSettings settings);
  // Kills what still runs.
  ~ChaosRun();
  ChaosRun(const ChaosRun&) = delete;
  ChaosRun& operator=(const ChaosRun&) = delete;

  // From the start of the world to the end of its last process. Throws std::runtime_error when the
  // world does not come up.
  ChaosCounts run();
  // Where the logs are, if they are worth keeping.
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_.path(); }
  void keep_logs() { folder_.keep(); }
  // Of all workers together, the present ones included.
  [[nodiscard]] int lives() const { return lives_; }

 private:
  struct Process {
    pid_t pid = 0;
    int life = 0;
    bool finished = false;
    bool stopped = false;
    Clock::time_point continues{};  // when a stop ends, or has ended
    Clock::time_point starts{};     // when it is started again, while pid is 0
  };
  void start(int rank);
  void kill(int rank, Clock::time_point restart);
  void strike(const Event& event);
  // One look at all processes: who has ended, who is to be continued, restarted, or hangs.
  void look(Clock::time_point now);
  void reap(int rank, Clock::time_point now);
  void look_for_hangs(int rank, Clock::time_point now);
  void say(const std::string& line) const;
  [[nodiscard]] std::filesystem::path log_of(int rank, int life) const;
  [[nodiscard]] bool all_up() const;
  template <class Condition>
  bool until(Condition condition, std::chrono::seconds limit);

  const ChaosSettings settings_;
  const std::vector<Event> events_;
  RunFolder folder_;
  CallBook& book_;
  Clock::time_point begin_{};
  std::vector<Process> processes_;
  int lives_ = 0;
  ChaosCounts counts_;
};

// Prints what a run came to, and returns whether nothing was lost, run twice, hung or wrong.
[[nodiscard]] bool print_table(CallBook& book, const ChaosCounts& counts, int workers, int lives);

}  // namespace stitch_reliability
