#pragma once

#include <memory>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"

namespace stitch::rpc {

class Agent;

// The thread of this process that writes dumps: of all its workers when SIGUSR1 or a fatal signal
// comes, and whatever is posted. Made with the first worker that has a dump folder, and never
// ended. Thread contract: any thread.
//
// Signals. SIGUSR1 and the fatal ones (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT) are taken only
// where their action is the default: a program's own handler stays, and for SIGUSR1 that is said
// once on stderr. Handlers only write a byte to a pipe. After a fatal signal the crashed thread
// waits for the dumps, at most kFatalWait, and then dies of the signal as it would have.
class DumpThread {
 public:
  static constexpr int kFatalWaitMilliseconds = 2000;

  [[nodiscard]] static DumpThread& of_this_process();

  // Includes a worker in what signals have written. Starts the thread and takes the signals.
  void add(const std::shared_ptr<Agent>& agent) STITCH_EXCLUDES(mutex_);
  void remove(const Agent* agent) STITCH_EXCLUDES(mutex_);
  // Runs `task` on the thread. REQUIRES: add() has been called.
  void post(base::UniqueFunction<void()> task) STITCH_EXCLUDES(mutex_);

 private:
  struct Record {
    const Agent* address;
    std::weak_ptr<Agent> agent;
  };
  explicit DumpThread(std::uint32_t fork) : fork_(fork) {}
  void start() STITCH_REQUIRES(mutex_);
  void run();
  void dump_all(int signal) STITCH_EXCLUDES(mutex_);

  const std::uint32_t fork_;  // base::fork_count() of its process
  base::Mutex mutex_;
  bool started_ STITCH_GUARDED_BY(mutex_) = false;
  int read_end_ = -1;  // constant once started_
  std::vector<Record> agents_ STITCH_GUARDED_BY(mutex_);
  std::vector<base::UniqueFunction<void()>> tasks_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
