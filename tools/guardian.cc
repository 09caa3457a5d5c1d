#include "guardian.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <vector>

namespace stitch_run {
namespace {

constexpr pid_t kDismissed = 0;

[[noreturn]] void guard(int pipe, const std::filesystem::path& folder) {
  ::setsid();  // the terminal's Ctrl-C is not for the guardian
  ::prctl(PR_SET_NAME, "stitch-guardian");
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  // Whoever reads stitch-run's output waits for its end, and must not wait for us.
  const int null = ::open("/dev/null", O_RDWR);
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(null, fd);

  std::vector<pid_t> groups;
  for (;;) {
    pid_t word = kDismissed;
    const ssize_t got = ::read(pipe, &word, sizeof(word));
    if (got < 0 && errno == EINTR) continue;
    if (got != static_cast<ssize_t>(sizeof(word))) break;  // stitch-run is gone
    if (word == kDismissed) ::_exit(0);
    groups.push_back(word);
  }
  for (pid_t group : groups) ::kill(-group, SIGKILL);
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  ::_exit(0);
}

}  // namespace

Guardian::Guardian(const std::filesystem::path& folder) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "cannot make a pipe");
  pid_ = ::fork();
  if (pid_ < 0) throw std::system_error(errno, std::generic_category(), "cannot start another process");
  if (pid_ == 0) {
    ::close(ends[1]);
    guard(ends[0], folder);
  }
  ::close(ends[0]);
  pipe_ = ends[1];
}

Guardian::~Guardian() {
  tell(kDismissed);
  ::close(pipe_);
  ::waitpid(pid_, nullptr, 0);
}

void Guardian::watch(pid_t group) { tell(group); }

void Guardian::tell(pid_t word) {
  // Shorter than PIPE_BUF, so it goes as one piece. A guardian that somebody killed is not worth failing for.
  ssize_t written = 0;
  do {
    written = ::write(pipe_, &word, sizeof(word));
  } while (written < 0 && errno == EINTR);
}

}  // namespace stitch_run
