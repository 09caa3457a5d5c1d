#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

// Graceful shutdown: no worker closes before all live workers have called shutdown and nothing is
// in flight between them. The live worker with the lowest id leads:
//
//   follower                          leader
//   READY   ------------------------>            shutdown was called here
//           <------------------------ POLL r     once all live workers are READY: round r
//   STATUS r ----------------------->            operations pending, messages sent and received
//           <------------------------ GO         nothing is in flight: close
//   GONE    ------------------------>            the leader closes when it has all of these
//
// A worker that is lost is not waited for any longer; one that comes back, or joins, before GO is
// waited for like all others, and leads if its id is the lowest. rpc/PROTOCOL.md, section 7, says
// which messages are obeyed, what is repeated, and why two equal rounds suffice.
//
// Pure state: has no thread and no clock, sends nothing, returns what is to be done. Owned by
// GracefulShutdown, or by a simulation. Not thread-safe.
class ShutdownProtocol {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;
  enum class Step : std::uint8_t { ready = 1, poll, status, go, gone };
  struct Status {
    std::uint64_t busy = 0;
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
    std::uint64_t lost = 0;  // peers
    friend bool operator==(const Status&, const Status&) = default;
  };
  struct Message {
    Step step = Step::ready;
    std::uint64_t round = 0;  // of POLL and STATUS
    Status status{};          // of STATUS
  };
  struct Send {
    WorkerId to;
    Message message;
  };
  // What is to be done, in this order. What cannot be sent need not be.
  struct Effects {
    bool expect_closing = false;  // from now on the loss of a peer is nothing to report
    std::vector<Send> sends;      // a STATUS among them with this worker's own, read then
    std::vector<WorkerId> reach;  // a connection to these, if there is none: do they live?
    bool may_close = false;       // on_answered() is to be called
    bool sample = false;          // on_sample() is to be called, with a status read after this
  };
  // What its worker knew about the others at one moment.
  struct View {
    std::uint64_t changes = 0;  // changes(), read before `live`: one in between must count
    std::set<WorkerId> live;    // this worker included
  };
  // For what it waits, for reports.
  struct AwaitedWorkers {
    const char* what = "";  // "shutdown to be called", ...
    std::set<WorkerId> missing;
    Time since;
  };

  // `worker` names the workers in errors: a pure function.
  ShutdownProtocol(WorkerInfo self, std::function<WorkerInfo(WorkerId)> worker);

  // shutdown() was called; on_time() is to be called next. Others are waited for until `wait`
  // (max(): without end). Once all live workers have called it, the end takes at most `limit`.
  void begin(Time wait, Clock::duration limit);
  // Others are waited for until `wait` at the latest.
  void wait_until(Time wait) { wait_ = std::min(wait_, wait); }
  // To be called at next() or later, and after on_message, on_peer_lost, on_peer_joined and
  // on_answered. Nothing happens before begin() and after the end. What it and the on_sample()
  // after it ask to be sent is for the lives that the view was taken of.
  [[nodiscard]] Effects on_time(Time now, const View& view);
  // This worker's own status, read after the Effects that asked for it.
  [[nodiscard]] Effects on_sample(Time now, const Status& own);
  // Throws Error(protocol) for a message that is not allowed now. Also before begin() and after
  // the end.
  [[nodiscard]] Effects on_message(const WorkerInfo& from, const Message& message);
  // GO was answered: this worker may close.
  void on_answered() { answered_ = true; }
  // Also all lives of the worker before this one; a later one has said nothing yet. Without memory
  // nothing has changed. After expect_closing it need not be called before a later one has joined.
  void on_peer_lost(const WorkerInfo& peer);
  // A worker is live that was not, or another life of one that was lost; after the views show it.
  void on_peer_joined();

  // How many have been lost or have joined.
  [[nodiscard]] std::uint64_t changes() const { return changes_; }
  [[nodiscard]] Time next() const { return next_; }
  [[nodiscard]] bool ended() const { return phase_ == Phase::ended; }
  // For whom it waits, while live workers have not called shutdown: "worker "ps0" waits in shutdown
  // for worker "trainer1", which is alive and has not called shutdown".
  [[nodiscard]] std::optional<std::string> waits_for_others() const;
  // When it ends at the latest; max() while others are waited for without a limit.
  [[nodiscard]] Time deadline() const { return ends_by_.value_or(wait_); }
  // Why it ended before all were ready to close; names the workers that were waited for.
  [[nodiscard]] const std::optional<Error>& error() const { return error_; }
  [[nodiscard]] const std::optional<AwaitedWorkers>& waiting() const { return waiting_; }
  // For what it waited when it ended with an error.
  [[nodiscard]] const std::optional<AwaitedWorkers>& waited() const { return waited_; }

 private:
  enum class Phase : std::uint8_t {
    not_begun,
    choosing,   // a leader
    following,  // until GO
    gathering,  // leads from here on: until all have said READY
    polling,    // until all have answered, and this worker's own status is read
    pausing,    // between two rounds
    closing,    // until all have said GONE
    ended,
  };
  [[nodiscard]] bool is_over(const WorkerInfo& life) const;
  void check_leads(const WorkerInfo& from, const char* what) const;
  void choose(Time now, const View& view, Effects& effects);
  void follow(Time now, Effects& effects);
  void lead(Time now, const View& view, Effects& effects);
  void gather(Time now);
  void all_are_ready(Time now);
  void begin_round(Time now, Effects& effects);
  void start_waiting(Time now);
  // Whether those that are live and waited for have all arrived. Else the message to those that
  // were missing the last time is repeated when it is time.
  [[nodiscard]] bool all(Time now, const char* what,
                         const std::function<bool(WorkerId)>& has_arrived,
                         const std::function<void(WorkerId)>& repeat);
  void send_to_all(Step step, std::uint64_t round, Effects& effects) const;
  void now_waiting(Time now, const char* what, std::set<WorkerId> missing);
  void end(std::optional<Error> error);
  [[nodiscard]] Error not_graceful(const std::string& why) const;
  [[nodiscard]] Error timed_out(const std::string& what, const std::set<WorkerId>& missing) const;

  const WorkerInfo self_;
  const std::function<WorkerInfo(WorkerId)> worker_;
  Phase phase_ = Phase::not_begun;
  Time wait_{};
  Clock::duration limit_{};
  std::optional<Time> ends_by_;  // set once all live workers have called shutdown
  bool polled_ = false;          // by the leader: all are ready
  Time next_{};
  std::optional<Error> error_;
  std::optional<AwaitedWorkers> waiting_;
  std::optional<AwaitedWorkers> waited_;
  std::uint64_t changes_ = 0;
  std::map<WorkerId, std::uint64_t> lost_;  // the epoch of the last life that was

  // ---- as a follower
  std::uint64_t chosen_at_ = 0;     // changes when the leader was chosen
  std::set<WorkerId> ready_sent_;   // to these, which are not lost
  std::optional<WorkerId> leader_;  // the last of those
  bool answered_ = false;           // GO

  // ---- as a leader
  std::uint64_t looked_at_ = 0;  // changes at the last look
  std::set<WorkerId> others_;    // live then; from GO on those that were told
  std::set<WorkerId> missing_;   // those of them that had not answered then
  Clock::duration interval_{};   // between repetitions
  Time repeat_at_{};             // also as a follower
  std::set<WorkerId> ready_;     // READY received from these
  std::set<WorkerId> gone_;      // GONE likewise
  bool go_sent_ = false;
  std::uint64_t round_ = 0;
  std::map<WorkerId, Status> statuses_;  // of this round
  std::map<WorkerId, Status> previous_;  // of the last one, if none was busy
  std::set<WorkerId> busy_;              // at the end of the last round
  Clock::duration pause_{};
  Time pause_until_{};
};

}  // namespace stitch::rpc
