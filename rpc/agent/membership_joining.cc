// How a worker asks the members of a running world: to make it known, or whether they are there.
#include <algorithm>
#include <utility>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/membership_service.h"

namespace stitch::rpc {

std::vector<MemberCard> MembershipService::other_members() const {
  std::vector<MemberCard> cards = hooks_.members;
  std::erase_if(cards, [this](const auto& card) { return card.info.id == agent_.self().id; });
  std::sort(cards.begin(), cards.end(),
            [](const MemberCard& a, const MemberCard& b) { return a.info.id < b.info.id; });
  return cards;
}

MembershipService::Asked MembershipService::ask(const MemberCard& card, const Notice* question,
                                                Clock::time_point deadline) {
  struct Waiting {
    base::Mutex mutex;
    base::CondVar changed;
    std::optional<Inquiry::Outcome> outcome STITCH_GUARDED_BY(mutex);
    bool answered STITCH_GUARDED_BY(mutex) = false;  // the handshake
    bool passed_over STITCH_GUARDED_BY(mutex) = false;
  };
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
    waiting->changed.notify_all();
    return std::nullopt;
  };
  if (question != nullptr) inquiry.question = [notice = *question] { return bare_message(notice); };
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
  Asked asked;
  base::MutexLock lock(waiting->mutex);
  while (!waiting->outcome && (waiting->answered || Clock::now() < open_deadline)) {
    if (!waiting->answered) {
      waiting->changed.wait_until(waiting->mutex, open_deadline);
    } else if (question != nullptr) {
      waiting->changed.wait(waiting->mutex);
    } else {
      break;
    }
  }
  asked.is_there = waiting->answered;
  waiting->passed_over = !waiting->outcome.has_value();
  if (waiting->outcome) asked.outcome = std::move(*waiting->outcome);
  return asked;
}

namespace {
// That this worker cannot ask says nothing about the member.
void throw_if_short_here(const Inquiry::Outcome& outcome) {
  const auto& failure = outcome.failure;
  if (failure && !failure->remote() && failure->code() == ErrorCode::overloaded) throw *failure;
}
}  // namespace

bool MembershipService::reaches_a_member(Clock::time_point deadline) {
  joining_.store(true);
  for (const MemberCard& card : other_members()) {
    const Asked asked = ask(card, nullptr, deadline);
    if (asked.is_there) return true;
    throw_if_short_here(asked.outcome);
    if (Clock::now() >= deadline) {
      throw Error(ErrorCode::timeout, to_string(agent_.self()) +
                                          " could not ask all members of its world within the "
                                          "time limit; asked last was " +
                                          to_string(card.info));
    }
  }
  return false;
}

std::optional<Notice> MembershipService::join(Clock::time_point deadline) {
  joining_.store(true);
  const WorkerInfo& self = agent_.self();
  const Notice question{Notice::Step::join, self, self, {}, {{hooks_.self}}};
  std::string tried;
  for (const MemberCard& card : other_members()) {
    const Inquiry::Outcome outcome = ask(card, &question, deadline).outcome;
    if (outcome.answer) {
      Notice notice = notice_in(*outcome.answer);
      const bool refused =
          notice.step == Notice::Step::refusal || notice.step == Notice::Step::dead;
      if (refused && notice.about == self && !notice.lives.empty()) {
        const WorkerInfo& known = notice.lives[0].card.info;
        if (known.id == self.id && known.name == self.name && known.epoch >= self.epoch)
          return notice;
      }
      const bool no_member = (notice.step == Notice::Step::refusal && !notice.lives.empty()) ||
                             (notice.step == Notice::Step::dead && notice.about == card.info);
      if (no_member) {
        tried += (tried.empty() ? "" : ", ") + to_string(card.info) + ": " + notice.text;
        continue;
      }
      if (refused) throw from_refusal_text(notice.text).with_worker(self.name);
      if (notice.step != Notice::Step::welcome)
        throw Error(ErrorCode::protocol, to_string(card.info) + " answers a join with nonsense");
      take_in(notice, deadline);
      joining_.store(false);
      return std::nullopt;
    }
    if (Clock::now() >= deadline) {
      throw Error(ErrorCode::timeout, to_string(self) +
                                          " was not admitted within the time limit; asked was " +
                                          to_string(card.info));
    }
    throw_if_short_here(outcome);
    tried += (tried.empty() ? "" : ", ") + to_string(card.info) +
             (outcome.failure ? std::string(": ") + outcome.failure->what() : ": no answer");
  }
  throw Error(ErrorCode::disconnected,
              to_string(self) + " reached no member of its world: " + tried);
}

}  // namespace stitch::rpc
