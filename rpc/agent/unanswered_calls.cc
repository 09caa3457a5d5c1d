// How the calls of OutgoingCalls end without an answer.
#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/agent/outgoing_calls.h"
#include "stitch/rpc/agent/thread_report.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

namespace {

// How long the error of a call waits for the callee's answer: a tenth of the timeout, at most this.
constexpr std::chrono::nanoseconds kMaxAnswerTime = std::chrono::milliseconds(100);
// Questions at a time, and within kMaxAnswerTime those before the deadline: calls that end together
// have one reason.
constexpr std::size_t kMaxQuestions = CallTable::kMaxToAsk;
// Of a question about a call that is still outstanding; the other bits are its id.
constexpr std::uint64_t kBeforeDeadline = std::uint64_t{1} << 63;

std::string milliseconds(std::chrono::nanoseconds duration) {
  const double ms = std::chrono::duration<double, std::milli>(duration).count();
  std::string text = std::to_string(ms);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " ms";
}

}  // namespace

bool OutgoingCalls::abandon_call(std::uint64_t call_id) {
  if (state_.forked()) return false;
  auto call = table_.take(call_id);
  if (!call) return false;
  note("call cancelled", *call);
  if (leave_flow(*call)) send_cancel(*call->to, call_id);
  return true;
}

// Whether it had been sent.
bool OutgoingCalls::leave_flow(OutstandingCall& call) noexcept {
  if (!call.begun) call.budget->drop(call.id);
  call.room.end();
  return call.begun;
}

void OutgoingCalls::on_peer_lost(const WorkerInfo& peer, const Error& reason) {
  const auto calls = table_.take_all(&peer);
  sender_.flow(peer).give_up();
  end_late(&peer);
  for (const OutstandingCall& call : calls) {
    note("call failed: peer lost", call);
    complete_with_error(call, about(call, Error(ErrorCode::disconnected, ""),
                                    std::string("failed: the worker is gone: ") + reason.what()));
  }
}

void OutgoingCalls::end_late(const WorkerInfo* to) noexcept {
  for (auto& call : late_.take_all(to)) complete_late(std::move(call), "");
}

std::uint64_t OutgoingCalls::unhandled() {
  std::uint64_t pending = 0;
  peers_->for_each([&](const Life& life) {
    if (peers_->lost(life.info())) return;
    PeerFlow& flow = sender_.flow(life.info());
    ask_room(life.info(), flow.one_way.to_ask());
    const auto numbers = flow.budget.numbers();
    pending += numbers.calls + numbers.waiting;
  });
  return pending;
}

void OutgoingCalls::stop() {
  const auto calls = table_.take_all(nullptr);
  sender_.give_up_all();
  end_late(nullptr);
  for (const OutstandingCall& call : calls)
    complete_with_error(call, about(call, Error(ErrorCode::shutting_down, ""),
                                    "failed: this worker is shutting down"));
}

void OutgoingCalls::expire() {
  const auto now = Clock::now();
  for (auto& call : late_.take_expired(now).calls) complete_late(std::move(call), "");
  auto expired = table_.take_expired(now);
  ask_early(expired, now);
  for (const auto& call : expired.calls) note("call timed out", call);
  if (on_timeout_ && !expired.calls.empty()) {
    try {
      on_timeout_(expired.calls);
    } catch (const std::exception&) {
      // They end without a report.
    }
  }
  for (auto& call : expired.calls) {
    const std::uint64_t id = call.id;
    const WorkerInfo& to = *call.to;
    const bool begun = leave_flow(call);
    const bool sent = begun && (!call.queued || call.sent);
    if (sent && call.timeout >= OutstandingCall::kAskedLate && late_.size() < kMaxQuestions &&
        !peers_->lost(to) && !state_.stopped()) {
      // The call is over. Its error waits a moment for what the callee's reader says about it.
      call.deadline = now + std::min(kMaxAnswerTime, call.timeout / 10);
      ask_threads(to, late_.add(std::move(call)), id);
    } else {
      static const std::string nothing;
      const auto answered = std::move(call.answered);
      complete_late(std::move(call),
                    answered ? *answered : nothing);  // copies no text: that throws
    }
    if (begun) send_cancel(to, id);  // arrives after the question
  }
  if (state_.stopped()) {  // stop() may have missed the new ones
    end_late(nullptr);
  }
  watch_->watch(std::min(expired.next, late_.first_deadline()));
}

void OutgoingCalls::ask_early(const CallTable::Expired& due, Clock::time_point now) noexcept {
  if (now - asking_since_ >= kMaxAnswerTime) {
    asking_since_ = now;
    asked_early_ = 0;
  }
  for (std::size_t i = 0; i < due.asked && asked_early_ < kMaxQuestions; ++i, ++asked_early_)
    ask_threads(*due.to_ask[i].second, due.to_ask[i].first | kBeforeDeadline, due.to_ask[i].first);
}

void OutgoingCalls::ask_threads(const WorkerInfo& to, std::uint64_t question,
                                std::uint64_t call_id) noexcept {
  try {
    OutMessage message(wire::kAskThreads);
    base::ByteWriter out(message.frame.body());
    out.write(question);
    out.write(call_id);
    sender_.send(to, std::move(message), Sender::Traffic::control, nullptr);
  } catch (const std::exception&) {
    // Then the error does not say it.
  }
}

void OutgoingCalls::on_threads(InMessage& message) {
  base::ByteReader in(message.view.body(), "threads");
  const auto question = in.read<std::uint64_t>();
  if ((question & kBeforeDeadline) != 0) {
    try {
      auto text = std::make_unique<std::string>(ThreadReport::read(message).text());
      table_.note_answered(question & ~kBeforeDeadline, message.from, std::move(text));
    } catch (const std::bad_alloc&) {
      // Then the error does not say it.
    }
    return;
  }
  auto call = late_.take(question, message.from);
  if (!call) return;
  std::string detail;
  try {
    detail = ThreadReport::read(message).text();
  } catch (const std::bad_alloc&) {
    detail.clear();
  } catch (...) {
    complete_late(std::move(*call), "");
    throw;
  }
  complete_late(std::move(*call), detail);
}

void OutgoingCalls::complete_late(OutstandingCall&& call, const std::string& detail) noexcept {
  complete_with_error(call, about(call, Error(ErrorCode::timeout, ""), timeout_text(call, detail)));
}

std::string OutgoingCalls::timeout_text(const OutstandingCall& call,
                                        const std::string& detail) const {
  std::string text =
      "timed out after " + milliseconds(call.timeout) + "; " + peers_->condition(*call.to);
  if (!call.begun) {
    const auto numbers = call.budget->numbers();
    return text + ", call was never sent: " + std::to_string(numbers.calls) + " calls of " +
           std::to_string(numbers.bytes) + " bytes to it are unanswered";
  }
  if (call.queued && !call.sent) return text + ", call was never sent";
  const auto queued = call.sent ? *call.sent - call.made : std::chrono::nanoseconds(0);
  if (queued >= std::chrono::milliseconds(1)) text += ", call was queued " + duration_text(queued);
  if (!detail.empty()) return text + ", " + detail;
  return queued < std::chrono::milliseconds(1) ? text + ", call was sent at once" : text;
}

}  // namespace stitch::rpc
