#include "stitch/base/signals.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <thread>

namespace stitch::base::signals_test {
namespace {

bool is_blocked(int signal) {
  sigset_t blocked;
  pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  return sigismember(&blocked, signal) == 1;
}

TEST(SignalsBlocked, OneIsBlockedUntilTheEndOfTheBlock) {
  ASSERT_FALSE(is_blocked(SIGPIPE));
  {
    const SignalsBlocked pipe(SIGPIPE);
    EXPECT_TRUE(is_blocked(SIGPIPE));
    EXPECT_FALSE(is_blocked(SIGTERM));
    {
      const SignalsBlocked all;
      EXPECT_TRUE(is_blocked(SIGTERM));
      for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS})
        EXPECT_FALSE(is_blocked(own)) << "an error of the thread itself: " << own;
    }
    EXPECT_FALSE(is_blocked(SIGTERM));
    EXPECT_TRUE(is_blocked(SIGPIPE));
  }
  EXPECT_FALSE(is_blocked(SIGPIPE));
}

TEST(SignalsBlocked, AThreadStartedMeanwhileKeepsThemBlocked) {
  bool blocked = false;
  std::thread thread;
  {
    const SignalsBlocked all;
    thread = std::thread([&] { blocked = is_blocked(SIGTERM) && is_blocked(SIGPIPE); });
  }
  thread.join();
  EXPECT_TRUE(blocked);
  EXPECT_FALSE(is_blocked(SIGTERM));
}

}  // namespace
}  // namespace stitch::base::signals_test
