#include "tests/support/forked_world.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

namespace stitch::testing {

ForkedWorld::ForkedWorld(int size, const Body& body, std::chrono::seconds limit)
    : body_(body), limit_(limit), processes_(static_cast<std::size_t>(size)) {
  for (int rank = 0; rank < size; ++rank) start(rank);
}

ForkedWorld::~ForkedWorld() {
  for (const Process& each : processes_) {
    if (each.pid == 0) continue;
    ::kill(each.pid, SIGKILL);
    ::waitpid(each.pid, nullptr, 0);
  }
}

std::filesystem::path ForkedWorld::stderr_of(int rank) const {
  const Process& process = processes_[static_cast<std::size_t>(rank)];
  return folder() / ("stderr" + std::to_string(rank) + "." + std::to_string(process.generation));
}

void ForkedWorld::start(int rank) {
  Process& process = processes_.at(static_cast<std::size_t>(rank));
  ASSERT_EQ(process.pid, 0) << "rank " << rank << " has not been waited for";
  ++process.generation;
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0) << "fork failed";
  if (pid == 0) run(rank);
  process.pid = pid;
}

void ForkedWorld::run(int rank) const {
  const int file = ::open(stderr_of(rank).c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
  ::dup2(file, STDERR_FILENO);
  ::alarm(static_cast<unsigned>(limit_.count()));
  Options options;
  options.rank = rank;
  options.world_size = static_cast<int>(processes_.size());
  options.init_method = "file://" + (folder() / "store").string();
  // As main() would: what leaves the body ends the process with std::terminate().
  const auto leave = [&]() noexcept { std::exit(body_(std::move(options))); };
  leave();
  std::abort();  // not reached: std::exit() does not return
}

void ForkedWorld::signal(int rank, int number) const {
  EXPECT_EQ(::kill(processes_.at(static_cast<std::size_t>(rank)).pid, number), 0);
}

ForkedWorld::Outcome ForkedWorld::wait(int rank) {
  Process& process = processes_.at(static_cast<std::size_t>(rank));
  Outcome outcome;
  int status = 0;
  EXPECT_EQ(::waitpid(process.pid, &status, 0), process.pid);
  process.pid = 0;
  if (WIFEXITED(status)) outcome.status = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
  std::ifstream file(stderr_of(rank));
  outcome.said.assign(std::istreambuf_iterator<char>(file), {});
  return outcome;
}

}  // namespace stitch::testing
