#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

class Agent;

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
// Two successive rounds with equal answers, no operation pending, and as many messages received as
// sent, prove that nothing is in flight (Mattern's four counters). A worker that is lost is not
// waited for any longer. READY, POLL and GO are repeated after a while, because they may be lost
// with a connection.
//
// Why two equal rounds suffice. Assumptions about each worker that has sent READY:
//   A1 while it is idle it sends nothing, and only a message makes it busy: the program's own
//      threads can begin no call any more (AgentState::throw_if_stopped). The exception are
//      continuations that are not waited for; they count as nothing until they make a call;
//   A2 a message is counted as sent before it is sent, and as received only when what it started is
//      counted as busy, or is over;
//   A3 it reads its busy count before its message counts.
// Let r1 and r2 be a worker's two equal answers. Between reading r1 and r2 it counted no message,
// and at some moment in between it was not busy (A3): from then until r2 it was idle (A1, A2).
// Every second answer is read after every first one, because a round begins when the previous one
// is complete. So at the moment between the rounds all counters are as reported, and as many
// messages were received as sent: none was in flight, no worker was busy, and none can become busy
// again. Messages over a connection that was lost, between any two workers, are in the sums of one
// side only: the sums are not compared once a worker has lost a peer, and a message that is in
// flight between two others for longer than a round is then missed.
//
// Who is obeyed. POLL and GO are accepted only from the worker to which this one has sent READY
// last. A leader polls only workers whose READY it has, so POLL or GO from any other worker is not
// a matter of timing: its connection is closed with `protocol`. From a former leader, which this
// worker takes for lost, they are ignored. This matters because GO makes the loss of peers silent.
//
// Part of its Agent. Thread contract: on_message and on_peer_lost on reader threads; run() on the
// thread that shuts down. Sends without its lock.
class GracefulShutdown {
 public:
  explicit GracefulShutdown(Agent& agent) : agent_(agent) {}

  // Takes part until GO or the deadline. The error names the workers that were waited for.
  std::optional<Error> run(std::chrono::steady_clock::time_point deadline) STITCH_EXCLUDES(mutex_);
  // Throws Error(protocol) for a message that is malformed, or not allowed now.
  void on_message(InMessage message) STITCH_EXCLUDES(mutex_);
  // A later life of `peer` has said nothing yet.
  void on_peer_lost(const WorkerInfo& peer) STITCH_EXCLUDES(mutex_);
  // For what run() waits now, for reports; nothing outside of it.
  struct Waiting {
    const char* what = "";  // "shutdown to be called", ...
    std::set<WorkerId> missing;
    std::chrono::steady_clock::time_point since;
  };
  [[nodiscard]] std::optional<Waiting> waiting() const STITCH_EXCLUDES(mutex_);

 private:
  enum class Step : std::uint8_t { ready = 1, poll, status, go, gone };
  struct Status {
    std::uint64_t busy = 0;
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
    std::uint64_t lost = 0;  // peers
    friend bool operator==(const Status&, const Status&) = default;
  };
  [[nodiscard]] std::set<WorkerId> live() const;
  // Whether `from` is this worker's leader. Throws if it never was.
  [[nodiscard]] bool follows(WorkerId from, const char* what) STITCH_EXCLUDES(mutex_);
  void send(WorkerId to, Step step, std::uint64_t round, Status status);
  [[nodiscard]] Status own_status() const;
  std::optional<Error> lead(std::chrono::steady_clock::time_point deadline,
                            const std::set<WorkerId>& others) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] Error timed_out(const std::string& what, const std::set<WorkerId>& missing) const;

  Agent& agent_;
  void now_waiting(const char* what, std::set<WorkerId> missing) STITCH_REQUIRES(mutex_);

  mutable base::Mutex mutex_;
  std::optional<Waiting> waiting_ STITCH_GUARDED_BY(mutex_);
  base::CondVar changed_;
  bool go_received_ STITCH_GUARDED_BY(mutex_) = false;
  std::uint64_t losses_ STITCH_GUARDED_BY(mutex_) = 0;
  std::set<WorkerId> ready_sent_ STITCH_GUARDED_BY(mutex_);   // to these
  std::optional<WorkerId> leader_ STITCH_GUARDED_BY(mutex_);  // the last of those
  std::set<WorkerId> ready_ STITCH_GUARDED_BY(mutex_);        // READY received from these
  bool go_sent_ STITCH_GUARDED_BY(mutex_) = false;
  std::set<WorkerId> gone_ STITCH_GUARDED_BY(mutex_);  // GONE likewise
  std::uint64_t round_ STITCH_GUARDED_BY(mutex_) = 0;
  std::map<WorkerId, Status> statuses_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
