// How the calls of OutgoingCalls end without an answer.
#include <string>
#include <utility>

#include "stitch/rpc/agent/outgoing_calls.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

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
  for (const OutstandingCall& call : calls) {
    note("call failed: peer lost", call);
    complete_with_error(call, about(call, Error(ErrorCode::disconnected, ""),
                                    std::string("failed: the worker is gone: ") + reason.what()));
  }
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
  for (const OutstandingCall& call : calls)
    complete_with_error(call, about(call, Error(ErrorCode::shutting_down, ""),
                                    "failed: this worker is shutting down"));
}

void OutgoingCalls::expire() {
  completing_.fetch_add(1);  // before they leave the table: see busy()
  auto expired = table_.take_expired(Clock::now());
  watch_->watch(expired.next);
  if (expired.calls.empty()) {
    completing_.fetch_sub(1);
    return;
  }
  for (OutstandingCall& call : expired.calls) {
    note("call timed out", call);
    if (leave_flow(call)) send_cancel(*call.to, call.id);
  }
  if (on_timeout_) on_timeout_(expired.calls);
  base::UniqueFunction<void()> complete = [this, alive = std::shared_ptr<Runtime>(owner_),
                                           calls = std::move(expired.calls)] {
    for (const OutstandingCall& call : calls) {
      complete_with_error(
          call, about(call, Error(ErrorCode::timeout, ""), timed_out_after(call) + known_of(call)));
    }
    completing_.fetch_sub(1);
  };
  // Never queued behind handlers, which may be waiting for these calls.
  if (!pool_.post_if_free(complete)) callbacks_->run(std::move(complete));
}

std::string OutgoingCalls::known_of(const OutstandingCall& call) const {
  std::string text = peers_->condition(*call.to) + "; the request ";
  if (!call.begun) return text + "waits for room";
  if (!call.queued || call.sent) return text + "was sent";
  return text + (peers_->connected(*call.to) ? "is being written" : "waits for a connection");
}

}  // namespace stitch::rpc
