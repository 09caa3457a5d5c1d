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
// A lost worker is not waited for. A worker that joins or comes back before GO takes part, and
// leads if its id is the lowest. rpc/PROTOCOL.md, section 7, has the messages that are obeyed and
// repeated, and the proof that two equal rounds suffice.
//
// Pure state without a thread or a clock; events return effects. Owned by GracefulShutdown, or by a
// simulation. Not thread-safe.
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
  // Actions, in this order. A message that cannot be sent may be dropped.
  struct Effects {
    bool expect_closing = false;  // the loss of a peer is no news from now on
    std::vector<Send> sends;      // a STATUS among them with this worker's own, read then
    std::vector<WorkerId> reach;  // workers to connect to, which shows whether they live
    bool may_close = false;       // on_answered() is to be called
    bool sample = false;          // on_sample() is to be called, with a status read after this
  };
  // The live workers, as this worker knows them at one moment.
  struct View {
    std::uint64_t changes = 0;  // changes(), read before `live`: one in between must count
    std::set<WorkerId> live;    // this worker included
  };
  // The workers that shutdown waits for, for reports.
  struct AwaitedWorkers {
    const char* what = "";  // "shutdown to be called", ...
    std::set<WorkerId> missing;
    Time since;
  };

  // `worker` names the workers in errors: a pure function.
  ShutdownProtocol(WorkerInfo self, std::function<WorkerInfo(WorkerId)> worker);

  // The program has called shutdown(); on_time() follows. Other workers have until `wait` to call
  // it (max(): no limit). After the last call, the shutdown takes at most `limit`.
  void begin(Time wait, Clock::duration limit);
  // Shortens the wait for other workers to `wait`.
  void wait_until(Time wait) { wait_ = std::min(wait_, wait); }
  // The caller calls this at next() or later, and after on_message, on_peer_lost, on_peer_joined
  // and on_answered. Does nothing before begin() and after the end. Messages of its effects, and of
  // the next on_sample(), are for the lives of the view.
  [[nodiscard]] Effects on_time(Time now, const View& view);
  // The status of this worker, read after the Effects with `sample`.
  [[nodiscard]] Effects on_sample(Time now, const Status& own);
  // Throws Error(protocol) for a message that is not allowed now. Also before begin() and after
  // the end.
  [[nodiscard]] Effects on_message(const WorkerInfo& from, const Message& message);
  // GO was answered: this worker may close.
  void on_answered() { answered_ = true; }
  // That life and all earlier lives of the worker are lost. After expect_closing the caller may
  // skip this until a later life joins.
  void on_peer_lost(const WorkerInfo& peer);
  // A worker, or a new life of a lost one, has joined, and the views show it.
  void on_peer_joined();

  // The number of losses and joins.
  [[nodiscard]] std::uint64_t changes() const { return changes_; }
  [[nodiscard]] Time next() const { return next_; }
  [[nodiscard]] bool ended() const { return phase_ == Phase::ended; }
  // The text of a wait for live workers that have not called shutdown: "worker "ps0" waits in
  // shutdown for worker "trainer1", which is alive and has not called shutdown".
  [[nodiscard]] std::optional<std::string> waits_for_others() const;
  // The latest end of the shutdown; max() while the wait for other workers has no limit.
  [[nodiscard]] Time deadline() const { return ends_by_.value_or(wait_); }
  // The error of a shutdown that ended before all workers were ready; names the missing workers.
  [[nodiscard]] const std::optional<Error>& error() const { return error_; }
  [[nodiscard]] const std::optional<AwaitedWorkers>& waiting() const { return waiting_; }
  // The last wait of a shutdown that ended with an error.
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
  // Whether all live workers have arrived. Repeats the message to workers that were missing before
  // when repeat_at_ has come.
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
