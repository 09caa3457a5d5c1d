#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstdlib>
#include <map>
#include <string>

extern char** environ;  // NOLINT: declared by POSIX

namespace stitch::testing {

// This program once more as another process that runs one disabled test, "Suite.DISABLED_Name". It
// is killed and reaped by the destructor. Thread contract: one thread.
class DisabledTestProcess {
 public:
  // `variables` are set in its environment.
  DisabledTestProcess(const std::string& test,
                      const std::map<std::string, std::string>& variables) {
    // That test is to run whichever part of the tests this process runs.
    for (const char* shard : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) ::unsetenv(shard);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    std::string program = "/proc/self/exe";
    std::string filter = "--gtest_filter=" + test;
    std::string disabled = "--gtest_also_run_disabled_tests";
    char* const arguments[] = {program.data(), filter.data(), disabled.data(), nullptr};
    EXPECT_EQ(::posix_spawn(&pid_, program.c_str(), nullptr, nullptr, arguments, environ), 0);
    for (const auto& [name, value] : variables) ::unsetenv(name.c_str());
  }
  ~DisabledTestProcess() { kill(); }
  DisabledTestProcess(const DisabledTestProcess&) = delete;
  DisabledTestProcess& operator=(const DisabledTestProcess&) = delete;

  [[nodiscard]] pid_t id() const { return pid_; }
  // Waits for its end, once. The exit status, or 128 + the signal that ended it.
  int wait() {
    int status = 0;
    EXPECT_EQ(::waitpid(pid_, &status, 0), pid_);
    pid_ = 0;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  void kill() {
    if (pid_ == 0) return;
    EXPECT_EQ(::kill(pid_, SIGKILL), 0);
    EXPECT_EQ(::waitpid(pid_, nullptr, 0), pid_);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
};

}  // namespace stitch::testing
