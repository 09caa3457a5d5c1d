// How a worker asks the members of a running world to make it known.
#include <algorithm>
#include <utility>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/membership_service.h"

namespace stitch::rpc {

void MembershipService::join(Clock::time_point deadline) {
  struct Waiting {
    base::Mutex mutex;
    base::CondVar changed;
    std::optional<Inquiry::Outcome> outcome STITCH_GUARDED_BY(mutex);
    bool answered STITCH_GUARDED_BY(mutex) = false;  // the handshake
    bool passed_over STITCH_GUARDED_BY(mutex) = false;
  };
  std::vector<MemberCard> cards = hooks_.members;
  std::sort(cards.begin(), cards.end(),
            [](const MemberCard& a, const MemberCard& b) { return a.info.id < b.info.id; });
  joining_.store(true);
  std::string tried;
  for (const MemberCard& card : cards) {
    if (card.info.id == agent_.self().id) continue;
    const auto waiting = std::make_shared<Waiting>();
    Inquiry inquiry;
    inquiry.addresses = see(card).addresses;
    inquiry.objection = [waiting,
                         info = card.info](const transport::Hello& hello) -> std::optional<Error> {
      if (hello.id != info.id.value() || hello.epoch != info.epoch)
        return Error(ErrorCode::disconnected, Members::claimed_identity(hello) + " answers now");
      base::MutexLock lock(waiting->mutex);
      if (waiting->passed_over)
        return Error(ErrorCode::disconnected, "another member was asked meanwhile");
      waiting->answered = true;
      return std::nullopt;
    };
    inquiry.question = [this] {
      return bare_message({Notice::Step::join, agent_.self(), agent_.self(), {}, {{hooks_.self}}});
    };
    // All of its acknowledgements are bounded by twice the timeout, a probe by one. One that does
    // not answer the handshake within a timeout is lost to the others by then, too.
    const std::chrono::nanoseconds timeout = agent_.options().heartbeat_timeout;
    inquiry.deadline = std::min(deadline, Clock::now() + 4 * timeout);
    const auto open_deadline = std::min(deadline, Clock::now() + timeout);
    inquiry.done = [waiting](Inquiry::Outcome outcome) {
      base::MutexLock lock(waiting->mutex);
      waiting->outcome = std::move(outcome);
      waiting->changed.notify_all();
    };
    agent_.peers().inquire(std::move(inquiry));
    Inquiry::Outcome outcome;
    {
      base::MutexLock lock(waiting->mutex);
      while (!waiting->outcome && (waiting->answered || Clock::now() < open_deadline)) {
        if (waiting->answered) {
          waiting->changed.wait(waiting->mutex);
        } else {
          waiting->changed.wait_until(waiting->mutex, open_deadline);
        }
      }
      waiting->passed_over = !waiting->outcome.has_value();
      if (waiting->outcome) outcome = std::move(*waiting->outcome);
    }
    if (outcome.answer) {
      const Notice notice = notice_in(*outcome.answer);
      const bool no_member = (notice.step == Notice::Step::refusal && !notice.lives.empty()) ||
                             (notice.step == Notice::Step::dead && notice.about == card.info);
      if (no_member) {
        tried += (tried.empty() ? "" : ", ") + to_string(card.info) + ": " + notice.text;
        continue;
      }
      if (notice.step == Notice::Step::refusal || notice.step == Notice::Step::dead)
        throw Error(ErrorCode::invalid_argument, notice.text).with_worker(agent_.self().name);
      if (notice.step != Notice::Step::welcome)
        throw Error(ErrorCode::protocol, to_string(card.info) + " answers a join with nonsense");
      take_in(notice, deadline);
      joining_.store(false);
      return;
    }
    if (Clock::now() >= deadline) {
      throw Error(ErrorCode::timeout, to_string(agent_.self()) +
                                          " was not admitted within the time limit; asked was " +
                                          to_string(card.info));
    }
    tried += (tried.empty() ? "" : ", ") + to_string(card.info) +
             (outcome.failure ? std::string(": ") + outcome.failure->what() : ": no answer");
  }
  throw Error(ErrorCode::disconnected,
              to_string(agent_.self()) + " reached no member of its world: " + tried);
}

}  // namespace stitch::rpc
