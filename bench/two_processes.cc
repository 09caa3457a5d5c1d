#include "two_processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

#include "busy.h"
#include "side.h"

namespace stitch_bench {

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void throw_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

sigset_t watched_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&set, signal);
  return set;
}

// A descriptor that is closed at the end of a block.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  void close() {
    if (number_ >= 0) ::close(number_);
    number_ = -1;
  }
  [[nodiscard]] int number() const { return number_; }

 private:
  int number_;
};

// Above the numbers that a child uses, so that its dup2 calls do not overwrite one that is needed.
int moved_up(int descriptor) {
  const int moved = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 10);
  if (moved < 0) throw_errno("cannot duplicate a descriptor");
  ::close(descriptor);
  return moved;
}

// The descriptors of a new process; numbers from 10 on.
struct Inherited {
  int link;  // -1 for none
  int results;
};

// Runs in the child, between fork and exec; returns only with an error.
void become(char* const* arguments, pid_t parent, const Inherited& inherited) {
  ::setpgid(0, 0);  // the terminal's Ctrl-C is for the parent
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  if (::getppid() != parent) ::_exit(1);  // it died before the line above
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null < 0 || ::dup2(null, STDIN_FILENO) < 0 || ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0)
    return;
  if (inherited.link >= 0 && ::dup2(inherited.link, Side::kLink) < 0) return;
  if (::dup2(inherited.results, Side::kResults) < 0) return;
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::execv("/proc/self/exe", arguments);
}

pid_t start(const std::vector<std::string>& arguments, const Inherited& inherited) {
  std::vector<char*> pointers;
  const std::string name = "stitch-bench";
  pointers.push_back(const_cast<char*>(name.c_str()));
  for (const auto& argument : arguments) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw_errno("cannot start another process");
  if (pid == 0) {
    become(pointers.data(), parent, inherited);
    ::_exit(127);
  }
  ::setpgid(pid, pid);  // both sides set it, so that neither can be too late
  return pid;
}

pid_t start_competitor() {
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw_errno("cannot start another process");
  if (pid == 0) {
    ::setpgid(0, 0);
    if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || ::getppid() != parent) ::_exit(1);
    compete();
  }
  ::setpgid(pid, pid);
  return pid;
}

std::string status_text(int status) {
  if (WIFEXITED(status)) return "exited with status " + std::to_string(WEXITSTATUS(status));
  return "was killed by signal " + std::to_string(WTERMSIG(status)) + " (" +
         ::strsignal(WTERMSIG(status)) + ")";
}

// The processes of one run; the destructor kills and reaps those that are left.
class Children {
 public:
  Children() = default;
  ~Children() {
    kill_all();
    for (const Child& child : children_) {
      while (::waitpid(child.pid, nullptr, 0) < 0 && errno == EINTR) {
      }
    }
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  void add(pid_t pid) { children_.push_back({pid, static_cast<int>(children_.size())}); }
  [[nodiscard]] bool empty() const { return children_.empty(); }
  void kill_all() {
    for (const Child& child : children_) ::kill(-child.pid, SIGKILL);
  }
  // Reaps those that have ended; returns the text of the first failure.
  std::string reap() {
    std::string failure;
    std::erase_if(children_, [&](const Child& child) {
      int status = 0;
      if (::waitpid(child.pid, &status, WNOHANG) != child.pid) return false;
      if (status != 0 && failure.empty())
        failure = "process " + std::to_string(child.rank) + " " + status_text(status);
      return true;
    });
    return failure;
  }

 private:
  struct Child {
    pid_t pid;
    int rank;
  };
  std::vector<Child> children_;
};

// Splits the output of a pipe into lines.
class Lines {
 public:
  Lines(int descriptor, const TwoProcesses::OnLine& on_line)
      : descriptor_(descriptor), on_line_(on_line) {}
  // False at the end. REQUIRES: a descriptor that does not block.
  bool read() {
    for (;;) {
      std::array<char, 4096> piece;
      const ssize_t got = ::read(descriptor_, piece.data(), piece.size());
      if (got == 0) return false;
      if (got < 0) return errno == EAGAIN || errno == EINTR;
      text_.append(piece.data(), static_cast<std::size_t>(got));
      for (std::size_t end = 0; (end = text_.find('\n')) != std::string::npos;
           text_.erase(0, end + 1))
        on_line_(text_.substr(0, end));
    }
  }

 private:
  const int descriptor_;
  const TwoProcesses::OnLine& on_line_;
  std::string text_;
};

}  // namespace

TwoProcesses::TwoProcesses() {
  const sigset_t set = watched_signals();
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  signals_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals_ < 0) throw_errno("cannot wait for signals");
}

TwoProcesses::~TwoProcesses() {
  ::close(signals_);
  const sigset_t set = watched_signals();
  ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

std::string TwoProcesses::run(const std::vector<std::vector<std::string>>& arguments,
                              int competitors, std::chrono::seconds limit, const OnLine& on_line) {
  std::array<int, 2> pipe_ends{};
  if (::pipe2(pipe_ends.data(), O_CLOEXEC) != 0) throw_errno("cannot make a pipe");
  const Descriptor results(moved_up(pipe_ends[0]));
  Descriptor results_in(moved_up(pipe_ends[1]));
  ::fcntl(results.number(), F_SETFL, ::fcntl(results.number(), F_GETFL) | O_NONBLOCK);
  std::array<int, 2> link_ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, link_ends.data()) != 0)
    throw_errno("cannot make a socket pair");
  std::array<Descriptor, 2> links{Descriptor(moved_up(link_ends[0])),
                                  Descriptor(moved_up(link_ends[1]))};

  Children competing;
  for (int i = 0; i < competitors; ++i) competing.add(start_competitor());
  Children children;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    children.add(
        start(arguments[i], {arguments.size() == 2 ? links[i].number() : -1, results_in.number()}));
  }
  results_in.close();
  links[0].close();
  links[1].close();

  Lines lines(results.number(), on_line);
  std::string failure;
  const auto deadline = Clock::now() + limit;
  while (!children.empty() && failure.empty()) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) {
      failure = "took longer than " + std::to_string(limit.count()) + " s";
      break;
    }
    std::array<pollfd, 2> ready{{{signals_, POLLIN, 0}, {results.number(), POLLIN, 0}}};
    ::poll(ready.data(), ready.size(), static_cast<int>(std::min<long long>(left, 1000)));
    if ((ready[1].revents & POLLIN) != 0) lines.read();
    signalfd_siginfo info{};
    while (::read(signals_, &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
      if (static_cast<int>(info.ssi_signo) != SIGCHLD)
        interrupted_ = static_cast<int>(info.ssi_signo);
    }
    if (interrupted_ != 0) {
      failure = std::string("was interrupted (") + ::strsignal(interrupted_) + ")";
    } else {
      failure = children.reap();
      // A closed pipe would wake poll() continuously; only the end of the processes is awaited now.
      if ((ready[1].revents & (POLLIN | POLLHUP)) == POLLHUP) ::usleep(1000);
    }
  }
  lines.read();
  return failure;
}

}  // namespace stitch_bench
