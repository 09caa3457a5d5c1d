#include "stitch/rpc/agent/stop_signals.h"

#include <semaphore.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <string>

#include "stitch/base/error.h"

namespace stitch::rpc {

namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> taken{false};
std::atomic<Clock::rep> requested_at{0};
static_assert(std::atomic<Clock::rep>::is_always_lock_free);

// Handlers may use no other means to wake threads.
sem_t& requested() noexcept {
  static sem_t semaphore = [] {
    sem_t made;
    ::sem_init(&made, 0, 0);
    return made;
  }();
  return semaphore;
}

void on_stop_signal(int) {
  const int saved = errno;
  Clock::rep none = 0;
  if (requested_at.compare_exchange_strong(none, Clock::now().time_since_epoch().count()))
    ::sem_post(&requested());
  errno = saved;
}

void take(int signal, const char* name) {
  sigset_t blocked;
  if (::pthread_sigmask(SIG_BLOCK, nullptr, &blocked) == 0 &&
      ::sigismember(&blocked, signal) == 1) {
    throw Error(ErrorCode::invalid_argument, std::string("stop_on_signals: ") + name +
                                                 " is blocked on the thread that calls init(), "
                                                 "and so it may never arrive: unblock it first");
  }
  struct sigaction before {};
  if (::sigaction(signal, nullptr, &before) != 0) return;
  const bool siginfo = (before.sa_flags & SA_SIGINFO) != 0;
  if (!siginfo && (before.sa_handler == SIG_IGN || before.sa_handler == &on_stop_signal)) return;
  if (requested_at != 0) return;  // a second signal ends the process
  if (siginfo || before.sa_handler != SIG_DFL) {
    throw Error(ErrorCode::invalid_argument,
                std::string("stop_on_signals: this program has its own handler of ") + name);
  }
  struct sigaction action {};
  action.sa_handler = &on_stop_signal;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  ::sigemptyset(&action.sa_mask);
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

void take_stop_signals() {
  static_cast<void>(requested());  // made before a handler runs
  taken = true;
  take(SIGTERM, "SIGTERM");
  take(SIGINT, "SIGINT");
}

bool stop_signals_taken() noexcept { return taken; }

std::optional<Clock::time_point> stop_requested_at() noexcept {
  const Clock::rep at = requested_at;
  if (at == 0) return std::nullopt;
  return Clock::time_point(Clock::duration(at));
}

void await_stop_signal() {
  if (!taken) {
    throw Error(ErrorCode::invalid_argument,
                "wait_for_stop() waits for a signal: set Options::stop_on_signals");
  }
  while (::sem_wait(&requested()) != 0 && errno == EINTR) {
  }
  ::sem_post(&requested());  // for other threads, and the next call
}

}  // namespace stitch::rpc
