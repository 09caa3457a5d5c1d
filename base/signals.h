#pragma once

#include <csignal>
#include <ctime>
#include <initializer_list>

namespace stitch::base {

// Blocks signals on this thread for a block of code, all but those of its own errors. A thread that
// is started in it inherits the blocked signals and keeps them: for threads that must not run the
// program's signal handlers, and those of libraries that write to sockets without MSG_NOSIGNAL
// (with SIGPIPE blocked they get EPIPE, and the program keeps its own handling of the signal).
// Thread contract: used by the thread that makes it; blocks may nest.
class SignalsBlocked {
 public:
  // All signals that come from elsewhere. One that the thread itself raises by an error would end
  // the process, blocked, without the handler that writes what has happened.
  SignalsBlocked() noexcept {
    sigset_t all;
    sigfillset(&all);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&all, own);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  // One signal.
  explicit SignalsBlocked(int signal) noexcept {
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, signal);
    pthread_sigmask(SIG_BLOCK, &one, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// Writing beyond the limit of the sizes of files (RLIMIT_FSIZE, `ulimit -f`) fails with EFBIG in a
// block of code, and does not end the process by SIGXFSZ. Thread contract: as SignalsBlocked.
class FileSizeSignalBlocked {
 public:
  FileSizeSignalBlocked() noexcept = default;
  ~FileSizeSignalBlocked() {
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, SIGXFSZ);
    const timespec now{};
    if (!was_pending_) static_cast<void>(sigtimedwait(&one, nullptr, &now));
  }
  FileSizeSignalBlocked(const FileSizeSignalBlocked&) = delete;
  FileSizeSignalBlocked& operator=(const FileSizeSignalBlocked&) = delete;

 private:
  [[nodiscard]] static bool is_pending() noexcept {
    sigset_t pending;
    return sigpending(&pending) == 0 && sigismember(&pending, SIGXFSZ) == 1;
  }
  const bool was_pending_ = is_pending();
  const SignalsBlocked blocked_{SIGXFSZ};
};

}  // namespace stitch::base
