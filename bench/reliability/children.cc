#include "children.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <system_error>

namespace stitch_reliability {

namespace {

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// In the child: what it needs before `body` runs.
void prepare(pid_t parent, const std::filesystem::path& log, const std::string& name) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  const int file = ::open(log.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0 || ::dup2(file, STDERR_FILENO) < 0) ::_exit(1);
  if (name.empty()) return;
  const std::string path = "/var/run/netns/" + name;
  const int space = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (space < 0 || ::setns(space, CLONE_NEWNET) != 0) throw_errno("cannot enter " + path);
  ::close(space);
}

}  // namespace

RunFolder::RunFolder() : maker_(::getpid()) {
  std::string path = std::filesystem::temp_directory_path() / "stitch-reliability-XXXXXX";
  if (::mkdtemp(path.data()) == nullptr) throw_errno("cannot make " + path);
  path_ = path;
}

RunFolder::~RunFolder() {
  if (kept_ || maker_ != ::getpid()) return;
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

pid_t start_process(const std::function<int()>& body, const std::filesystem::path& log,
                    const std::string& network_namespace) {
  const pid_t parent = ::getpid();
  std::fflush(stdout);
  const pid_t pid = ::fork();
  if (pid < 0) throw_errno("cannot start another process");
  if (pid != 0) return pid;
  int status = 70;
  try {
    prepare(parent, log, network_namespace);
    status = body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stitch-reliability: %s\n", error.what());
  }
  std::exit(status);
}

std::size_t raise_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) throw_errno("cannot read the limit of open files");
  limit.rlim_cur = limit.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) throw_errno("cannot raise the limit of open files");
  return static_cast<std::size_t>(std::min<rlim_t>(limit.rlim_cur, 1U << 20));
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace stitch_reliability
