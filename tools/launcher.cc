#include "launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <system_error>
#include <utility>

#include "free_port.h"

namespace stitch_run {
namespace {

constexpr int kTimeoutStatus = 124;
constexpr int kNotFoundStatus = 127;
constexpr int kNotExecutableStatus = 126;

int watch_signals() {
  sigset_t watched;
  ::sigemptyset(&watched);
  // SIGUSR1 asks workers for dumps; `pkill -USR1 -f ./app` sends it to this process, too. It is not
  // ignored (SIG_IGN) because workers would inherit that.
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGUSR1}) ::sigaddset(&watched, signal);
  ::sigprocmask(SIG_BLOCK, &watched, nullptr);
  const int fd = ::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "cannot watch signals");
  return fd;
}

// Two pipes per process exceed the usual limit of 1024 files with a few hundred processes.
void allow_many_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
}

// Milliseconds for poll, rounded up so that it does not return repeatedly just before the deadline.
int until(std::chrono::steady_clock::time_point deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now())
          .count();
  return static_cast<int>(std::clamp<long>(left, 0, 1'000'000));
}

std::string seconds(std::chrono::milliseconds time) {
  std::string text = std::to_string(static_cast<double>(time.count()) / 1000);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) text.pop_back();
  return text + " s";
}

}  // namespace

Launcher::Launcher(RunOptions options)
    : options_(std::move(options)),
      guardian_(rendezvous_.folder()),
      signals_(watch_signals()),
      out_(STDOUT_FILENO),
      err_(STDERR_FILENO) {
  allow_many_files();
  // Orphans of our processes become our children, so that they can be found.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

Launcher::~Launcher() { ::close(signals_); }

int Launcher::run() {
  if (!start_all()) {
    send_to_groups(SIGKILL);
    sweep();
    return exit_code_;
  }
  if (options_.timeout) timeout_at_ = Clock::now() + *options_.timeout;
  while (running_ > 0) wait_for_events();
  sweep();
  report();
  return exit_code_;
}

bool Launcher::start_all() {
  port_ = find_free_port();
  for (int rank = 0; rank < options_.processes; ++rank) {
    const std::string name = options_.name + std::to_string(rank);
    const std::string prefix = options_.prefix ? "[" + name + "] " : "";
    try {
      workers_.push_back(
          std::make_unique<Worker>(Worker{rank, name, start(rank), LineSplitter(out_, prefix),
                                          LineSplitter(err_, prefix), std::nullopt}));
      ++running_;
    } catch (const std::system_error& error) {
      const std::string& program = options_.command.front();
      std::string text = "stitch-run: cannot start \"" + program + "\": " + error.code().message();
      if (error.code().value() == ENOENT && program.find('/') == std::string::npos &&
          ::access(program.c_str(), X_OK) == 0) {
        text += "; did you mean \"./" + program + "\"?";
      }
      err_.write_line("", text);
      exit_code_ = error.code().value() == ENOENT ? kNotFoundStatus : kNotExecutableStatus;
      return false;
    }
  }
  return true;
}

ChildProcess Launcher::start(int rank) {
  // The guardian gets the group before the program runs: stitch-run may be killed at any time.
  return start_process(options_.command, worker_environment(options_, rank, port_, rendezvous_),
                       options_.prefix, [this](pid_t group) { guardian_.watch(group); });
}

void Launcher::say(const Worker& worker, const std::string& consequence) {
  err_.write_line("", "stitch-run: " + worker.name + " " + worker.status->text() + consequence);
}

bool Launcher::restart(Worker& worker) {
  // Where another has ended well, the world is over: one of fixed size, and an elastic one with too
  // few workers left.
  const bool ended_well = std::ranges::any_of(
      workers_, [](const auto& each) { return each->status && each->status->success(); });
  const bool over =
      ended_well && (!options_.elastic || running_beside(worker) + 1 < options_.elastic->min);
  if (ending_ || over || worker.restarts >= options_.restarts) return false;
  // What the former process has left behind. It stays a zombie until the sweep: see note_exits().
  ::kill(-worker.process.pid, SIGKILL);
  drain(worker.process.out, worker.out);
  drain(worker.process.err, worker.err);
  try {
    worker.process = start(worker.rank);
  } catch (const std::system_error& error) {
    err_.write_line(
        "", "stitch-run: cannot start " + worker.name + " again: " + error.code().message());
    return false;
  }
  ++worker.restarts;
  say(worker, "; restarted (" + std::to_string(worker.restarts) + " of " +
                  std::to_string(options_.restarts) + ")");
  worker.status.reset();
  return true;
}

int Launcher::running_beside(const Worker& worker) const {
  return static_cast<int>(std::ranges::count_if(
      workers_, [&](const auto& each) { return each.get() != &worker && !each->status; }));
}

bool Launcher::enough_without(const Worker& failed) const {
  return !ending_ && options_.elastic && running_beside(failed) >= options_.elastic->min;
}

void Launcher::wait_for_events() {
  std::vector<pollfd> polled{{signals_, POLLIN, 0}};
  for (const auto& worker : workers_) {
    // poll skips negative descriptors.
    polled.push_back({worker->process.out, POLLIN, 0});
    polled.push_back({worker->process.err, POLLIN, 0});
  }
  int wait = -1;
  if (kill_at_) wait = until(*kill_at_);
  if (timeout_at_ && !ending_) wait = until(*timeout_at_);
  ::poll(polled.data(), polled.size(), wait);

  // Output first, so that a process's last lines are printed before its end is reported.
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    if (polled[1 + 2 * i].revents != 0) read_output(workers_[i]->process.out, workers_[i]->out);
    if (polled[2 + 2 * i].revents != 0) read_output(workers_[i]->process.err, workers_[i]->err);
  }
  if (polled[0].revents != 0) read_signals();
  if (timeout_at_ && !ending_ && Clock::now() >= *timeout_at_) {
    stop({.timeout = true, .still_running = running_names()}, SIGTERM);
  }
  if (kill_at_ && Clock::now() >= *kill_at_) {
    kill_at_.reset();
    send_to_groups(SIGKILL);
  }
}

void Launcher::read_signals() {
  signalfd_siginfo info{};
  bool exits = false;
  while (::read(signals_, &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGUSR1) continue;  // the workers have got it themselves
    if (signal == SIGCHLD) {
      exits = true;
    } else if (ending_ && ending_->signal != 0) {
      send_to_groups(SIGKILL);
    } else {
      stop({.signal = signal}, signal);
    }
  }
  if (exits) note_exits();
}

void Launcher::note_exits() {
  std::vector<std::pair<Worker*, ExitStatus>> failed;
  for (const auto& worker : workers_) {
    if (worker->status) continue;
    // The process stays a zombie until the sweep, so that its id, which is its group's, is not
    // reused.
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(worker->process.pid), &info,
                 WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid == 0)
      continue;
    const ExitStatus status{info.si_code != CLD_EXITED, info.si_status};
    if (!status.success()) {
      failed.emplace_back(worker.get(), status);
      continue;
    }
    worker->status = status;
    --running_;
  }
  // Those that have ended well are known by now: they do not count as running.
  for (const auto& [worker, status] : failed) {
    worker->status = status;
    if (restart(*worker)) continue;
    --running_;
    if (enough_without(*worker)) {
      say(*worker, "; the others go on");
    } else {
      stop({.failed = worker}, SIGTERM);
    }
  }
}

bool Launcher::read_output(int& fd, LineSplitter& lines) {
  std::array<char, 65536> buffer;
  for (;;) {
    const ssize_t got = ::read(fd, buffer.data(), buffer.size());
    if (got > 0) {
      lines.feed({buffer.data(), static_cast<std::size_t>(got)});
      return false;  // the others wait, too
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return true;
    lines.finish();
    ::close(fd);
    fd = -1;
    return true;
  }
}

void Launcher::stop(Ending ending, int signal) {
  const bool asked_before = ending_.has_value();
  if (!asked_before) ending_ = std::move(ending);
  // Ctrl-C during the shutdown after a failure counts as the first one.
  else if (ending.signal != 0 && ending_->signal == 0)
    ending_->signal = ending.signal;
  else
    return;
  send_to_groups(signal);
  if (!asked_before) kill_at_ = Clock::now() + options_.grace;
}

void Launcher::send_to_groups(int signal) {
  for (const auto& worker : workers_) ::kill(-worker->process.pid, signal);
}

std::string Launcher::running_names() const {
  std::string names;
  for (const auto& worker : workers_) {
    if (!worker->status) names += (names.empty() ? "" : ", ") + worker->name;
  }
  return names;
}

void Launcher::sweep() {
  // Processes that are left in the groups of ended ones are not waited for.
  send_to_groups(SIGKILL);
  for (const auto& worker : workers_) ::waitpid(worker->process.pid, nullptr, 0);
  // Processes that left their group have become our children. When one ends, its children become
  // ours.
  const std::string children = "/proc/self/task/" + std::to_string(::getpid()) + "/children";
  for (;;) {
    std::ifstream list(children);
    bool any = false;
    for (pid_t pid = 0; list >> pid;) {
      if (pid == guardian_.pid()) continue;
      any = true;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    if (!any) break;
  }
  // No writer is left: the pipes have all remaining output.
  for (const auto& worker : workers_) {
    drain(worker->process.out, worker->out);
    drain(worker->process.err, worker->err);
  }
}

void Launcher::drain(int& fd, LineSplitter& lines) {
  while (fd >= 0 && !read_output(fd, lines)) {
  }
  if (fd < 0) return;
  // A process that is not our descendant has the pipe; it is not waited for.
  lines.finish();
  ::close(fd);
  fd = -1;
}

void Launcher::report() {
  if (!ending_) return;
  if (ending_->failed != nullptr) {
    const Worker& failed = *ending_->failed;
    exit_code_ = failed.status->code();
    err_.write_line("", "stitch-run: " + failed.name + " " + failed.status->text());
  } else if (ending_->timeout) {
    exit_code_ = kTimeoutStatus;
    err_.write_line("", "stitch-run: stopped after " + seconds(*options_.timeout) +
                            " (--timeout); still running were: " + ending_->still_running);
  } else {
    exit_code_ = 128 + ending_->signal;
    err_.write_line("", std::string("stitch-run: stopped by ") +
                            (ending_->signal == SIGINT ? "Ctrl-C" : "a signal"));
  }
}

}  // namespace stitch_run
