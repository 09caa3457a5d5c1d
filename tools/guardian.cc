#include "guardian.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <vector>

namespace stitch_run {
namespace {

constexpr pid_t kDismissed = 0;

[[noreturn]] void guard(int socket, const std::filesystem::path& folder) {
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
    const ssize_t got = ::read(socket, &word, sizeof(word));
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
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
    throw std::system_error(errno, std::generic_category(), "cannot make a pair of sockets");
  pid_ = ::fork();
  if (pid_ < 0)
    throw std::system_error(errno, std::generic_category(), "cannot start another process");
  if (pid_ == 0) {
    ::close(ends[1]);
    guard(ends[0], folder);
  }
  ::close(ends[0]);
  socket_ = ends[1];
}

Guardian::~Guardian() {
  tell(kDismissed);
  ::close(socket_);
  ::waitpid(pid_, nullptr, 0);
}

void Guardian::watch(pid_t group) { tell(group); }

void Guardian::tell(pid_t word) {
  // A guardian that somebody killed is not worth failing for, nor dying of SIGPIPE.
  ssize_t sent = 0;
  do {
    sent = ::send(socket_, &word, sizeof(word), MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
}

}  // namespace stitch_run
