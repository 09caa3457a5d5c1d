#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "stitch/rpc/message.h"
#include "stitch/transport/error.h"
#include "stitch/transport/mutex.h"

namespace stitch {

class Agent;

// Graceful shutdown: nobody closes before everybody wants to leave and nothing is in flight
// anywhere. The live worker with the lowest id leads. When all live workers have said READY it
// polls them in rounds; each answers with how many calls it still has to do with and how many
// messages it has sent and received. Two rounds in a row that agree, with nobody busy and as many
// messages received as sent, prove that nothing is in flight (Mattern's four counters); then it
// says GO, and closes when every GO has been acknowledged. A worker that is lost meanwhile is no
// longer waited for. Thread contract: on_message and on_peer_lost on reader threads; run() on the
// thread that shuts down.
class Leave {
 public:
  explicit Leave(Agent& agent) : agent_(agent) {}

  // Takes part until GO or the deadline; the error says who was waited for.
  std::optional<Error> run(std::chrono::steady_clock::time_point deadline) STITCH_EXCLUDES(mutex_);
  void on_message(InMessage message) STITCH_EXCLUDES(mutex_);
  void on_peer_lost() STITCH_EXCLUDES(mutex_);

 private:
  enum class Step : std::uint8_t { ready = 1, poll, status, go, gone };
  struct Status {
    std::uint64_t busy = 0;
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
    friend bool operator==(const Status&, const Status&) = default;
  };
  [[nodiscard]] std::set<WorkerId> live() const;
  void send(WorkerId to, Step step, std::uint64_t round, Status status);
  [[nodiscard]] Status own_status() const;
  std::optional<Error> lead(std::chrono::steady_clock::time_point deadline,
                            const std::set<WorkerId>& others) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] Error late(const std::string& what, const std::set<WorkerId>& missing) const;

  Agent& agent_;
  Mutex mutex_;
  CondVar changed_;
  bool go_ STITCH_GUARDED_BY(mutex_) = false;
  std::uint64_t losses_ STITCH_GUARDED_BY(mutex_) = 0;
  std::set<WorkerId> ready_ STITCH_GUARDED_BY(mutex_);
  std::set<WorkerId> gone_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t round_ STITCH_GUARDED_BY(mutex_) = 0;
  std::map<WorkerId, Status> statuses_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch
