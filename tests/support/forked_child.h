#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <type_traits>

namespace stitch::testing {

// A forked child that runs a function. It is killed by a signal after 30 s, and by the destructor
// unless it has been waited for. Thread contract: one thread.
class ForkedChild {
 public:
  // The child exits with what `body` returns, 0 when that is void, or 1 when it throws. No
  // destructor or atexit handler of this process runs in it.
  template <class Body>
  explicit ForkedChild(Body&& body) : pid_(::fork()) {
    EXPECT_GE(pid_, 0) << "fork failed";
    if (pid_ != 0) return;
    ::alarm(30);
    int status = 1;
    try {
      if constexpr (std::is_void_v<std::invoke_result_t<Body&>>) {
        body();
        status = 0;
      } else {
        status = body();
      }
    } catch (...) {
    }
    ::_exit(status);
  }
  ~ForkedChild() {
    if (pid_ <= 0) return;
    kill();
    wait();
  }
  ForkedChild(const ForkedChild&) = delete;
  ForkedChild& operator=(const ForkedChild&) = delete;
  ForkedChild(ForkedChild&& other) noexcept : pid_(other.pid_) { other.pid_ = 0; }

  void kill() const { EXPECT_EQ(::kill(pid_, SIGKILL), 0); }
  // Waits for the end, once. The exit status, or 128 + the signal that killed the child.
  int wait() {
    int status = 0;
    EXPECT_EQ(::waitpid(pid_, &status, 0), pid_);
    pid_ = 0;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  pid_t pid_;
};

}  // namespace stitch::testing
