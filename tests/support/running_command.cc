#include "tests/support/running_command.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <stdexcept>

namespace stitch::testing {
namespace {

void read_all(int fd, std::string& text) {
  std::array<char, 4096> buffer;
  for (ssize_t got = 0; (got = ::read(fd, buffer.data(), buffer.size())) > 0;)
    text.append(buffer.data(), static_cast<std::size_t>(got));
  ::close(fd);
}

}  // namespace

RunningCommand::RunningCommand(const std::vector<std::string>& command, std::chrono::seconds limit)
    : deadline_(std::chrono::steady_clock::now() + limit) {
  std::array<int, 2> out{};
  std::array<int, 2> err{};
  if (::pipe2(out.data(), O_CLOEXEC) != 0 || ::pipe2(err.data(), O_CLOEXEC) != 0)
    throw std::runtime_error("no pipe");
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(err[1], STDERR_FILENO);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  ::close(out[1]);
  ::close(err[1]);
  out_reader_ = std::thread([this, fd = out[0]] { read_all(fd, out_); });
  err_reader_ = std::thread([this, fd = err[0]] { read_all(fd, err_); });
}

RunningCommand::~RunningCommand() { wait(); }

void RunningCommand::send_signal(int signal) const { ::kill(pid_, signal); }

int RunningCommand::wait() {
  if (waited_) return status_;
  waited_ = true;
  int status = 0;
  bool late = false;
  while (::waitpid(pid_, &status, WNOHANG) == 0) {
    if (!late && std::chrono::steady_clock::now() > deadline_) {
      late = true;
      ::kill(pid_, SIGKILL);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  out_reader_.join();
  err_reader_.join();
  if (!late) status_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return status_;
}

CommandResult run_command(const std::vector<std::string>& command, std::chrono::seconds limit) {
  RunningCommand running(command, limit);
  const int status = running.wait();
  return {status, running.out(), running.err()};
}

bool gone(pid_t pid, std::chrono::seconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (;;) {
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string number, name, state;
    if (!(stat >> number >> name >> state) || state == "Z") return true;
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace stitch::testing
