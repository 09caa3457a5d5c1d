#include "chaos_run.h"

#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <utility>

namespace stitch_reliability {

namespace {

using namespace std::chrono_literals;

constexpr auto kTick = 10ms;
constexpr auto kStartTime = 4s;  // for the world to come up, before the time of events begins
constexpr auto kStartLimit = 60s;
constexpr auto kEndLimit = 120s;
constexpr auto kLongestDeadline = 10s;  // of an operation, for one whose process was stopped

}  // namespace

ChaosRun::ChaosRun(ChaosSettings settings)
    : settings_(std::move(settings)),
      events_(make_schedule(settings_.schedule)),
      book_(CallBook::make()),
      processes_(static_cast<std::size_t>(settings_.schedule.workers)) {}

ChaosRun::~ChaosRun() {
  for (const Process& process : processes_) {
    if (process.pid == 0) continue;
    ::kill(process.pid, SIGKILL);
    ::waitpid(process.pid, nullptr, 0);
  }
}

void ChaosRun::say(const std::string& line) const {
  if (!settings_.verbose) return;
  std::printf("%8.2f s  %s\n", std::chrono::duration<double>(Clock::now() - begin_).count(),
              line.c_str());
  std::fflush(stdout);
}

std::filesystem::path ChaosRun::log_of(int rank, int life) const {
  return folder_.path() / ("worker" + std::to_string(rank) + ".life" + std::to_string(life));
}

void ChaosRun::start(int rank) {
  Process& process = processes_.at(static_cast<std::size_t>(rank));
  process = Process{};
  process.life = ++lives_;
  book_.lives.at(static_cast<std::size_t>(process.life)).rank = rank;
  WorkerSettings worker{.rank = rank,
                        .workers = settings_.schedule.workers,
                        .life = process.life,
                        .threads = settings_.threads,
                        .store = (folder_.path() / "store").string(),
                        .fault = settings_.fault,
                        .traffic = settings_.traffic};
  const auto& spaces = settings_.namespaces;
  const std::string space =
      spaces.empty() ? std::string() : spaces[static_cast<std::size_t>(rank) % spaces.size()];
  process.pid = start_process(
      [&] {
        const std::string partitions =
            partitions_for(events_, worker.workers, Clock::now() - begin_);
        if (!partitions.empty()) worker.fault += (worker.fault.empty() ? "" : ",") + partitions;
        return live(worker);
      },
      log_of(rank, process.life), space);
}

void ChaosRun::kill(int rank, Clock::time_point restart) {
  Process& process = processes_.at(static_cast<std::size_t>(rank));
  if (process.pid == 0) return;
  book_.up.at(static_cast<std::size_t>(rank)) = 0;
  ::kill(process.pid, SIGKILL);
  ::waitpid(process.pid, nullptr, 0);
  book_.lives.at(static_cast<std::size_t>(process.life)).end = End::killed;
  for (Waiting& waiting : book_.waiting.at(static_cast<std::size_t>(rank))) waiting.number = 0;
  process.pid = 0;
  process.starts = restart;
}

void ChaosRun::strike(const Event& event) {
  Process& process = processes_.at(static_cast<std::size_t>(event.victim));
  const auto now = Clock::now();
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.1f s",
                std::chrono::duration<double>(event.lasts).count());
  say("worker" + std::to_string(event.victim) + ": " + to_string(event.type) + ", " + seconds +
      (process.pid == 0 ? " (it is down)" : ""));
  ++counts_.events.at(static_cast<std::size_t>(event.type));
  switch (event.type) {
    case Event::Type::kill:
    case Event::Type::restart:
      kill(event.victim, now + event.lasts);
      break;
    case Event::Type::stop:
      if (process.pid == 0) break;
      ::kill(process.pid, SIGSTOP);
      process.stopped = true;
      process.continues = std::max(process.continues, now + event.lasts);
      break;
    case Event::Type::partition:  // its own and the others' Options::fault have it
      break;
  }
}

void ChaosRun::reap(int rank, Clock::time_point now) {
  Process& process = processes_.at(static_cast<std::size_t>(rank));
  int status = 0;
  if (::waitpid(process.pid, &status, WNOHANG) != process.pid) return;
  process.pid = 0;
  book_.up.at(static_cast<std::size_t>(rank)) = 0;
  for (Waiting& waiting : book_.waiting.at(static_cast<std::size_t>(rank))) waiting.number = 0;
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  process.finished = code == kFinished;
  process.starts = now;
  if (code == kFinished) return;
  if (code == kLeft) {
    ++counts_.came_back_by_themselves;
    say("worker" + std::to_string(rank) + " has left, to come back");
    return;
  }
  if (code == kNotJoined) {
    ++counts_.failed_starts;
  } else {
    ++counts_.crashes;
    book_.lives.at(static_cast<std::size_t>(process.life)).end = End::killed;
  }
  const std::string how =
      code >= 0 ? "status " + std::to_string(code) : "signal " + std::to_string(WTERMSIG(status));
  std::printf("worker%d ended with %s:\n%s", rank, how.c_str(),
              read_file(log_of(rank, process.life)).c_str());
}

void ChaosRun::look_for_hangs(int rank, Clock::time_point now) {
  Process& process = processes_.at(static_cast<std::size_t>(rank));
  if (process.stopped || now < process.continues + kLongestDeadline + settings_.traffic.slack)
    return;
  for (Waiting& waiting : book_.waiting.at(static_cast<std::size_t>(rank))) {
    const std::uint64_t number = waiting.number;
    const std::int64_t due = waiting.due;
    if (number == 0 || now_ns() <= due || waiting.number != number) continue;
    ++counts_.hung;
    const char* const what = number == WaitScope::kRound ? "a round"
                             : number == WaitScope::kShutdown
                                 ? "shutdown()"
                                 : to_string(book_.operation(number).kind);
    std::printf("worker%d hangs in %s (number %llu); its threads:\n", rank, what,
                static_cast<unsigned long long>(number));
    for (const auto& task :
         std::filesystem::directory_iterator("/proc/" + std::to_string(process.pid) + "/task")) {
      std::printf("  %s in %s\n", read_file(task.path() / "comm").c_str(),
                  read_file(task.path() / "wchan").c_str());
    }
    // It writes a dump (STITCH_DUMP_DIR), and the system a core file where it keeps them.
    ::kill(process.pid, SIGABRT);
    std::this_thread::sleep_for(500ms);  // for the dump, before the process is killed
    kill(rank, now);
    return;
  }
}

void ChaosRun::look(Clock::time_point now) {
  for (int rank = 0; rank < settings_.schedule.workers; ++rank) {
    Process& process = processes_[static_cast<std::size_t>(rank)];
    if (process.finished) continue;
    if (process.pid != 0) reap(rank, now);
    if (process.pid != 0 && process.stopped && now >= process.continues) {
      ::kill(process.pid, SIGCONT);
      process.stopped = false;
    }
    if (process.pid != 0) look_for_hangs(rank, now);
    if (process.pid == 0 && !process.finished && now >= process.starts) {
      start(rank);
      ++counts_.restarts;
    }
  }
}

bool ChaosRun::all_up() const {
  for (int rank = 0; rank < settings_.schedule.workers; ++rank) {
    if (book_.up.at(static_cast<std::size_t>(rank)) == 0) return false;
  }
  return true;
}

template <class Condition>
bool ChaosRun::until(Condition condition, std::chrono::seconds limit) {
  const auto end = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() > end) return false;
    look(Clock::now());
    std::this_thread::sleep_for(kTick);
  }
  return true;
}

ChaosCounts ChaosRun::run() {
  // The times of events count from here: partitions are given to workers before they start.
  begin_ = Clock::now() + (events_.empty() ? 0s : kStartTime);
  for (int rank = 0; rank < settings_.schedule.workers; ++rank) start(rank);
  if (!until([this] { return all_up(); }, kStartLimit))
    throw std::runtime_error("the world has not come up within 60 s");
  say("all workers are up");
  for (const Event& event : events_) {
    until([&] { return Clock::now() >= begin_ + event.at; }, std::chrono::hours(24));
    strike(event);
  }
  until([this] { return Clock::now() >= begin_ + settings_.schedule.duration; },
        std::chrono::hours(24));
  // All are to be there at the end, for 3 s: then they can leave together.
  const auto calm = [this, since = Clock::now()]() mutable {
    const bool up = all_up() && std::none_of(processes_.begin(), processes_.end(),
                                             [](const Process& each) { return each.stopped; });
    if (!up) since = Clock::now();
    return Clock::now() > since + 3s;
  };
  if (!until(calm, kEndLimit)) std::printf("not all workers came back within 120 s\n");
  book_.over = true;
  say("all are asked to finish");
  const auto all_finished = [this] {
    return std::all_of(processes_.begin(), processes_.end(),
                       [](const Process& each) { return each.finished; });
  };
  if (!until(all_finished, kEndLimit)) {
    std::printf("not all workers have finished within 120 s\n");
    ++counts_.hung;
  }
  counts_.seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
  for (const auto& log : std::filesystem::directory_iterator(folder_.path())) {
    if (!log.path().filename().string().starts_with("worker")) continue;
    const std::string text = read_file(log.path());
    counts_.stderr_lines += static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
  }
  return counts_;
}

}  // namespace stitch_reliability
