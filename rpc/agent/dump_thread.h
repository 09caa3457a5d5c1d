#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"

namespace stitch::rpc {

class Agent;

// The thread of this process that writes dumps: of all its workers when SIGUSR1 or a fatal signal
// comes, and whatever is posted. Made with the first worker that has a dump folder, and never
// ended. Knows which files of dumps the workers of this process have. Thread contract: any thread.
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

  // ---- files; of a process without such a worker, too
  // Another number each time: workers of several worlds in one process may have one name.
  [[nodiscard]] std::uint64_t next_number() noexcept { return ++numbers_; }
  // Takes a file, by its name without the folder, for a worker of this process. False if one of
  // them has it.
  [[nodiscard]] bool take_file(const std::string& name) STITCH_EXCLUDES(mutex_);
  void give_back_file(std::string_view name) noexcept STITCH_EXCLUDES(mutex_);

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
  std::atomic<std::uint64_t> numbers_{0};
  std::set<std::string, std::less<>> files_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
