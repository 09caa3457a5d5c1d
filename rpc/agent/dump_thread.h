#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"

namespace stitch::rpc {

class Agent;

// The thread of this process that writes dumps: of all its workers when SIGUSR1 comes, and whatever
// is posted. Made with the first worker that has a dump folder, and never ended. SIGUSR1 is taken
// only where its action is the default: a program's own handler stays, and that is said once on
// stderr. The handler only writes a byte to a pipe. Thread contract: any thread.
class DumpThread {
 public:
  [[nodiscard]] static DumpThread& of_this_process();

  // Includes a worker in what the signal has written. Starts the thread and takes the signal.
  void add(const std::shared_ptr<Agent>& agent) STITCH_EXCLUDES(mutex_);
  void remove(const Agent* agent) STITCH_EXCLUDES(mutex_);
  // Runs `task` on the thread. REQUIRES: add() has been called.
  void post(base::UniqueFunction<void()> task) STITCH_EXCLUDES(mutex_);

  // For the name of a file: another one each time, and others than those of a former process that
  // had the same id, as the first one of a container has.
  [[nodiscard]] static std::uint64_t next_number() noexcept;

 private:
  struct Record {
    const Agent* address;
    std::weak_ptr<Agent> agent;
  };
  explicit DumpThread(std::uint32_t fork) : fork_(fork) {}
  void start() STITCH_REQUIRES(mutex_);
  void run();
  void dump_all() STITCH_EXCLUDES(mutex_);

  const std::uint32_t fork_;  // base::fork_count() of its process
  base::Mutex mutex_;
  bool started_ STITCH_GUARDED_BY(mutex_) = false;
  int read_end_ = -1;  // constant once started_
  std::vector<Record> agents_ STITCH_GUARDED_BY(mutex_);
  std::vector<base::UniqueFunction<void()>> tasks_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
