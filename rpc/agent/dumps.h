#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <span>
#include <string>

#include "stitch/base/mutex.h"
#include "stitch/rpc/calls/call_table.h"
#include "stitch/rpc/calls/report.h"

namespace stitch::rpc {

class Agent;

// The dumps of one worker: files that hold its report() as JSON, for stitch-run --diagnose. Written
// when a call or a backward pass times out (at most one in kInterval), or the shutdown; on a signal
// (DumpThread), and when asked for. None of this needs a user-function thread. The last kMaxFiles
// of this life are kept. Part of its Agent. Thread contract: any thread once start() has been
// called.
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
  // Something else than a call has timed out: writes a dump soon. `rows` are what it was, as a
  // table of the report: in the dump they are part of the table of that name. Does nothing without
  // a folder, or within kInterval of the last time.
  void on_timeout(const std::string& reason, Table rows) noexcept;
  // The shutdown of this worker has timed out: the same, always, and the dump is written on return
  // (unless that takes longer than kTimeToWrite): the worker ends.
  void on_shutdown_timeout(Table rows) noexcept;

 private:
  void on_timeout(std::span<const OutstandingCall> calls) noexcept;
  // Whether a dump for a timeout may be written now; the next one after kInterval.
  [[nodiscard]] bool due() STITCH_EXCLUDES(mutex_);
  void write_soon(const std::string& reason, Table rows);
  [[nodiscard]] std::string head(const std::string& reason) const;

  Agent& agent_;
  std::string host_;      // constant after start()
  bool running_ = false;  // likewise
  base::Mutex mutex_;
  std::chrono::steady_clock::time_point next_ STITCH_GUARDED_BY(mutex_){};
  std::deque<std::string> files_ STITCH_GUARDED_BY(mutex_);  // oldest first
  bool failed_ STITCH_GUARDED_BY(mutex_) = false;            // that has been said
};

}  // namespace stitch::rpc
