#include "child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

namespace stitch_run {
namespace {

struct Pipe {
  int read = -1;
  int write = -1;
};

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0)
    throw std::system_error(errno, std::generic_category(), "cannot make a pipe");
  return {ends[0], ends[1]};
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (const std::string& string : strings) result.push_back(const_cast<char*>(string.c_str()));
  result.push_back(nullptr);
  return result;
}

// Runs in the child, between fork and exec; returns the error that kept it from becoming the
// program.
int become(const std::vector<char*>& command, const std::vector<char*>& environment, pid_t parent,
           int out, int err, const std::function<void(pid_t)>& announce) {
  ::setpgid(0, 0);
  // Death of the parent before this call would go unnoticed, hence the comparison.
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return errno;
  if (::getppid() != parent) ::_exit(1);
  announce(::getpid());

  const int in = ::open("/dev/null", O_RDONLY);
  if (in < 0 || ::dup2(in, STDIN_FILENO) < 0) return errno;
  if (out >= 0 && ::dup2(out, STDOUT_FILENO) < 0) return errno;
  if (::dup2(err, STDERR_FILENO) < 0) return errno;
  if (in > STDERR_FILENO) ::close(in);

  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::execvpe(command[0], command.data(), environment.data());
  return errno;
}

}  // namespace

std::string ExitStatus::text() const {
  if (!signalled) return "exited with status " + std::to_string(value);
  const char* name = ::strsignal(value);
  return "was killed by signal " + std::to_string(value) +
         (name != nullptr ? " (" + std::string(name) + ")" : "");
}

ChildProcess start_process(const std::vector<std::string>& command,
                           const std::vector<std::string>& environment, bool pipe_stdout,
                           const std::function<void(pid_t group)>& announce) {
  const auto command_pointers = pointers(command);
  const auto environment_pointers = pointers(environment);
  Pipe out;
  if (pipe_stdout) out = make_pipe();
  const Pipe err = make_pipe();
  const Pipe failure = make_pipe();
  const pid_t parent = ::getpid();

  const pid_t pid = ::fork();
  if (pid < 0)
    throw std::system_error(errno, std::generic_category(), "cannot start another process");
  if (pid == 0) {
    const int error =
        become(command_pointers, environment_pointers, parent, out.write, err.write, announce);
    [[maybe_unused]] const ssize_t told = ::write(failure.write, &error, sizeof(error));
    ::_exit(127);
  }
  ::setpgid(pid, pid);  // both sides set it, so that neither can be too late
  if (pipe_stdout) ::close(out.write);
  ::close(err.write);
  ::close(failure.write);

  // exec closes the child's end: nothing to read means that the program runs.
  int error = 0;
  ssize_t got = 0;
  do {
    got = ::read(failure.read, &error, sizeof(error));
  } while (got < 0 && errno == EINTR);
  ::close(failure.read);
  if (got == static_cast<ssize_t>(sizeof(error))) {
    ::waitpid(pid, nullptr, 0);
    if (pipe_stdout) ::close(out.read);
    ::close(err.read);
    throw std::system_error(error, std::generic_category());
  }
  for (int fd : {out.read, err.read}) {
    if (fd >= 0) ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  }
  return {pid, out.read, err.read};
}

}  // namespace stitch_run
