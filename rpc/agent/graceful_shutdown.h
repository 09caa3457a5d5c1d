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

// Graceful shutdown: nobody closes before everybody wants to leave and nothing is in flight
// anywhere. The live worker with the lowest id leads. When all live workers have said READY to it,
// it polls them in rounds; each answers with how many calls it still has to do with and how many
// messages it has sent and received. Two rounds in a row that agree, with nobody busy and as many
// messages received as sent, prove that nothing is in flight (Mattern's four counters); then it
// says GO, and closes when every GO has been acknowledged. A worker that is lost meanwhile is no
// longer waited for. What may have got lost with a connection is said again after a while: READY,
// a poll of the same round and GO may come twice.
//
// Why two equal rounds are enough. Assumptions about each worker that has said READY:
//   A1 while it is idle it sends nothing, and it becomes busy only by a message: the program's own
//      threads can begin no call any more (Agent::throw_if_stopped). The exception are
//      continuations that nobody waits for, which count as nothing until they make a call;
//   A2 a message is counted as sent before it leaves, and as received only when what it brought
//      about is counted as busy, or is over;
//   A3 it reads its busy count before its message counts.
// Let r1 and r2 be a worker's two equal answers. Between the reading of r1 and of r2 it counted no
// message, and it was not busy at some moment in between (A3): so from that moment on it was idle
// until r2 (A1, A2). Every worker's second answer is read after every first one, because a round
// begins when the last one is complete. At the moment between the rounds, then, all counters stand
// as reported, and as many messages were received as sent: none was on its way, nobody was busy,
// and nobody can become busy again. With a connection lost, between whichever two workers, messages
// over it are in the sums of one side only: the sums are not compared when anybody has lost a peer,
// and what is on its way between two others for
// longer than a round is missed.
//
// Who is obeyed. A poll and GO are for the worker alone to which this one has said READY last. A
// leader polls only those whose READY it has, so one that comes from anybody else is no mistake of
// timing: it ends its connection with `protocol`. One from a former leader, which this worker takes
// for lost, is ignored. GO makes the loss of peers silent, which is why it must not be had by
// asking.
//
// Thread contract: on_message and on_peer_lost on reader threads; run() on the thread that shuts
// down.
class GracefulShutdown {
 public:
  explicit GracefulShutdown(Agent& agent) : agent_(agent) {}

  // Takes part until GO or the deadline; the error says who was waited for.
  std::optional<Error> run(std::chrono::steady_clock::time_point deadline) STITCH_EXCLUDES(mutex_);
  // Throws Error(protocol) for what nobody may say, or not now.
  void on_message(InMessage message) STITCH_EXCLUDES(mutex_);
  void on_peer_lost() STITCH_EXCLUDES(mutex_);

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
  // Whether `from` is the worker that this one follows. Throws when it never was.
  [[nodiscard]] bool follows(WorkerId from, const char* what) STITCH_EXCLUDES(mutex_);
  void send(WorkerId to, Step step, std::uint64_t round, Status status);
  [[nodiscard]] Status own_status() const;
  std::optional<Error> lead(std::chrono::steady_clock::time_point deadline,
                            const std::set<WorkerId>& others) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] Error late(const std::string& what, const std::set<WorkerId>& missing) const;

  Agent& agent_;
  base::Mutex mutex_;
  base::CondVar changed_;
  bool go_ STITCH_GUARDED_BY(mutex_) = false;
  std::uint64_t losses_ STITCH_GUARDED_BY(mutex_) = 0;
  std::set<WorkerId> told_ STITCH_GUARDED_BY(mutex_);         // READY, by this worker
  std::optional<WorkerId> leader_ STITCH_GUARDED_BY(mutex_);  // the last of those
  std::set<WorkerId> ready_ STITCH_GUARDED_BY(mutex_);
  bool released_ STITCH_GUARDED_BY(mutex_) = false;  // GO has been said, by this worker
  std::set<WorkerId> gone_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t round_ STITCH_GUARDED_BY(mutex_) = 0;
  std::map<WorkerId, Status> statuses_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
