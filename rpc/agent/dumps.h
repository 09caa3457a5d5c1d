#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/call_table.h"
#include "stitch/rpc/agent/report.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

class Agent;

// The dumps of one worker: files that hold its report() as JSON, for stitch-run --diagnose. Written
// when a call or a backward pass times out (at most one in kInterval), or the shutdown; the workers
// that were called, or waited for, are asked to write theirs, and ask in turn those for which they
// wait. Also on a signal (DumpThread), and when asked. None of this needs a user-function thread.
// The last kMaxFiles are kept, those of former lives of the worker included that were on this host
// and have ended. While the worker runs, a small file "<name>.<pid>.<number>.running.json" says
// that it should be there: of a worker that is stopped or dead, nothing else may be; that of a dead
// one stays until its next life starts. No number is used twice in a process, which may have
// workers of one name in several worlds. Part of its Agent. Thread contract: any thread once
// start() has been called.
class Dumps {
 public:
  static constexpr std::size_t kMaxFiles = 16;
  static constexpr std::chrono::seconds kInterval{10};
  static constexpr std::chrono::milliseconds kTimeToWrite{300};

  // Keeps a reference.
  explicit Dumps(Agent& agent) : agent_(agent) {}

  // Before the agent's messages. Does nothing without Options::dump_dir. Throws
  // Error(invalid_argument) naming a folder that cannot be written to.
  void start(const std::shared_ptr<Agent>& agent);
  // Takes the worker out of what signals have written.
  void stop() noexcept;

  // Writes a dump into `folder`, if empty into Options::dump_dir; returns its path. Throws
  // Error(invalid_argument) without a folder, Error(internal) naming the file and the reason.
  std::string write(const std::string& folder, const std::string& reason = "asked for",
                    const Table& timed_out = {}) STITCH_EXCLUDES(mutex_);
  // The same into Options::dump_dir; failures are said once, on stderr.
  void write_quietly(const std::string& reason, const Table& timed_out = {}) noexcept;
  // Something else than a call has timed out: writes a dump soon, and asks `awaited`, for which it
  // waited, and the workers of all pending calls to write theirs. `rows` are what it was, as a
  // table of the report: in the dump they are part of the table of that name. Does nothing without
  // a folder, or within kInterval of the last time.
  void on_timeout(const std::string& reason, Table rows,
                  const std::vector<WorkerId>& awaited) noexcept;
  // The shutdown of this worker has timed out: the same, always, and the dump is written on return
  // (unless that takes longer than kTimeToWrite, and there was a thread for it): the worker ends.
  void on_shutdown_timeout(Table rows, const std::vector<WorkerId>& awaited) noexcept;
  // A frame kDump has come: something that `from` waits for has timed out there.
  void on_asked(const WorkerInfo& from);

 private:
  void on_timeout(const std::vector<OutstandingCall>& calls);
  // Whether a dump for a timeout may be written now; the next one after kInterval.
  [[nodiscard]] bool due() STITCH_EXCLUDES(mutex_);
  void write_soon(const std::string& reason, Table rows);
  // Asks these workers, and those of all pending calls, to write dumps.
  void ask_others(std::set<const WorkerInfo*> others);
  void ask(const std::vector<WorkerId>& awaited);  // and those of all pending calls
  [[nodiscard]] std::string head(const std::string& reason) const;
  // The name of a file that no worker of this process has, without its folder.
  [[nodiscard]] std::string take_name(const std::string& reason) const;
  // Of this worker in dump_dir, by lives on this host that have ended.
  void take_over_files() noexcept STITCH_EXCLUDES(mutex_);
  // Whether an ended process of this host, or this one, has written it as this worker.
  [[nodiscard]] bool is_of_former_life(const std::string& path) const;

  Agent& agent_;
  std::string host_;          // constant after start()
  std::string running_file_;  // likewise: its path
  bool running_ = false;      // likewise
  base::Mutex mutex_;
  std::chrono::steady_clock::time_point next_ STITCH_GUARDED_BY(mutex_){};
  // Oldest first. Their names belong to this worker: DumpThread::take_file(), whose lock is taken
  // within this one.
  std::deque<std::string> files_ STITCH_GUARDED_BY(mutex_);
  bool failed_ STITCH_GUARDED_BY(mutex_) = false;  // that has been said
};

}  // namespace stitch::rpc
