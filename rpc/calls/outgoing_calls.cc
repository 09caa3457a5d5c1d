// One file, though long: the steps of a call, from its request to its answer, stand side by side.
#include "stitch/rpc/calls/outgoing_calls.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "stitch/base/answer_wait.h"
#include "stitch/base/byte_io.h"
#include "stitch/base/callback_scope.h"
#include "stitch/base/deadline.h"
#include "stitch/rpc/calls/unknown_function.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/placed_tensor.h"
#include "stitch/rpc/message/tensor_codec.h"

namespace stitch::rpc {

namespace {

// Fills in what begin_request() left open.
void complete_header(transport::Message& message, std::uint64_t call_id, const TimeLeft& time) {
  std::byte* const header = message.frame.data() + transport::FrameBuilder::body_offset();
  const auto id = base::to_wire_order(call_id);
  std::memcpy(header, &id, sizeof(id));
  put_time_left(message.frame, time);
}

// With the error's text behind `how`.
void fail(const OutstandingCall& call, const Error& error, const char* how, const char* why = "") {
  complete_with_error(call, about(call, error, std::string(how) + why + error.what()));
}

// The request that this thread is sending, the innermost one. Most requests are written before the
// sender returns: these were never queued, which is noted here without the table's lock.
class SendingRequest {
 public:
  SendingRequest(const OutgoingCalls& calls, std::uint64_t id) noexcept
      : calls_(&calls), id_(id), outer_(std::exchange(current, this)) {}
  ~SendingRequest() { current = outer_; }
  SendingRequest(const SendingRequest&) = delete;
  SendingRequest& operator=(const SendingRequest&) = delete;
  [[nodiscard]] bool sent() const noexcept { return sent_; }
  // Whether this thread is sending that request.
  [[nodiscard]] static bool note_sent(const OutgoingCalls& calls, std::uint64_t id) noexcept {
    if (current == nullptr || current->calls_ != &calls || current->id_ != id) return false;
    current->sent_ = true;
    return true;
  }

 private:
  static thread_local SendingRequest* current;
  const OutgoingCalls* const calls_;
  const std::uint64_t id_;
  SendingRequest* const outer_;
  bool sent_ = false;
};

thread_local SendingRequest* SendingRequest::current = nullptr;

}  // namespace

void OutgoingCalls::start(const std::shared_ptr<Runtime>& owner, PeerTable& peers,
                          const std::shared_ptr<base::EventLoop>& loop, StopCallbacks& callbacks) {
  owner_ = owner;
  peers_ = &peers;
  callbacks_ = &callbacks;
  watch_ = std::make_shared<DeadlineWatch>(loop, [this, weak = owner_] {
    if (const auto alive = weak.lock()) expire();
  });
}

OutMessage OutgoingCalls::begin_request(std::uint64_t function_id) {
  OutMessage message(wire::kRequest);
  base::ByteWriter out(message.frame.body());
  out.write(std::uint64_t{0});
  out.write(function_id);
  out.write(std::int64_t{0});
  out.write(std::int64_t{0});
  return message;
}

std::chrono::nanoseconds OutgoingCalls::effective_timeout(
    std::optional<std::chrono::nanoseconds> timeout) const {
  if (timeout && timeout->count() < 0) {
    throw Error(ErrorCode::invalid_argument,
                "timeout of " + std::to_string(timeout->count()) + " ns is negative");
  }
  const std::chrono::nanoseconds limit = timeout.value_or(options_.rpc_timeout);
  const auto deadline = ExecutionContext::current().deadline;
  if (deadline == Clock::time_point::max()) return limit;
  const auto left =
      std::max(std::chrono::nanoseconds(1),
               std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()));
  return limit.count() == 0 ? left : std::min(limit, left);
}

PeerBudget::Caller OutgoingCalls::caller(const OutMessage& message) noexcept {
  const bool waits =
      !message.ahead && !ThreadPool::on_any_pool_thread() && !base::CallbackScope::on_this_thread();
  return waits ? PeerBudget::Caller::program : PeerBudget::Caller::handler;
}

std::uint64_t OutgoingCalls::start_call(const WorkerInfo& to, std::string_view function,
                                        std::chrono::nanoseconds timeout, OutMessage&& message,
                                        std::shared_ptr<PendingCall> pending) {
  if (state_.stopped()) state_.throw_if_stopped();
  base::AnswerWait::give_up();  // of a call before this one
  PeerLife& life = peers_->known_life(to);
  PeerBudget& budget = life.flow->budget;
  OutstandingCall call{std::move(pending),
                       &life.info(),
                       function,
                       timeout,
                       base::deadline_or_none(timeout),
                       &budget};
  const bool limited = call.deadline != Clock::time_point::max();
  call.made = limited ? call.deadline - timeout : Clock::now();
  if (const auto& stop = ExecutionContext::current().stop) call.under = stop->call();
  std::optional<Sender::LaidOut> out;
  try {
    out.emplace(sender_.lay_out(to, message, Sender::Traffic::request));
  } catch (...) {
    fail(call, to_error(std::current_exception()), "was not made: ");
    return 0;
  }
  const std::size_t bytes = out->in_flight.counted().bytes;
  const auto who = caller(message);
  const bool has_room = budget.try_take(bytes, who);
  if (has_room) [[likely]] {
    call.room = Room(budget, bytes);
  } else if (who == PeerBudget::Caller::handler || message.refuse_when_full) {
    out.reset();
    fail(call, full(to), "was not made: ");
    return 0;
  }
  call.queued = !has_room;
  const Clock::time_point deadline = call.deadline;
  const Clock::time_point expires = limited ? call.expires() : deadline;
  const bool begins = has_room && budget.try_send(bytes);
  call.begun = begins;
  const std::uint64_t id = add(std::move(call));
  watch_->watch(expires);
  if (begins) [[likely]] {
    out->in_flight.begun(false);
    const SendingRequest sending(*this, id);
    base::AnswerWait::request_follows();
    transmit(to, std::move(*out), id, time_left(timeout, deadline));
    if (!sending.sent()) table_.note_queued(id);
  } else if (has_room ||
             (await_room(to, bytes, deadline) && table_.give_room(id, Room(budget, bytes)))) {
    send_request(life.info(), std::move(*out), id, deadline);
  }  // else expire() completes the call
  // stop() may have run between the first check and the entry in the table, and missed this call.
  if (state_.stopped())
    fail_call(id, Error(ErrorCode::shutting_down, "this worker is shutting down"), "failed: ");
  return id;
}

bool OutgoingCalls::await_room(const WorkerInfo& to, std::size_t bytes,
                               Clock::time_point deadline) {
  PeerFlow& flow = sender_.flow(to);
  return flow.budget.wait(bytes, deadline, [&] { ask_room(to, flow.one_way.to_ask()); });
}

void OutgoingCalls::send_request(const WorkerInfo& to, Sender::LaidOut&& out, std::uint64_t id,
                                 Clock::time_point deadline) {
  const std::size_t bytes = out.in_flight.counted().bytes;
  table_.note_queued(id);
  sender_.flow(to).budget.send_later(id, bytes,
                                     [this, &to, id, deadline, out = std::move(out)]() mutable {
                                       const TimeLeft time = time_left(deadline);
                                       if (time.left < 0 || !table_.begin(id))
                                         return false;  // expire() completes it
                                       out.in_flight.begun(false);
                                       transmit(to, std::move(out), id, time);
                                       return true;
                                     });
}

// What is in flight keeps the agent alive, and with it this.
void OutgoingCalls::transmit(const WorkerInfo& to, Sender::LaidOut&& out, std::uint64_t id,
                             const TimeLeft& time) noexcept {
  complete_header(out.message, id, time);
  out.attachments.begin(out.message.frame);
  sender_.transmit(
      to, nullptr, std::move(out),
      [this, id](const std::optional<Error>& error) { on_request_sent(id, error); }, id);
}

Error OutgoingCalls::full(const WorkerInfo& peer) {
  const PeerBudget& budget = sender_.flow(peer).budget;
  const auto numbers = budget.numbers();
  return Error(ErrorCode::overloaded,
               std::to_string(numbers.calls) + " calls of " + std::to_string(numbers.bytes) +
                   " bytes are unanswered there and " + std::to_string(numbers.waiting) +
                   " wait here; the limits are max_inflight_bytes " +
                   std::to_string(budget.limits().bytes) + " and max_inflight_calls " +
                   std::to_string(budget.limits().calls));
}

void OutgoingCalls::start_notify(const WorkerInfo& to, std::string_view function,
                                 std::chrono::nanoseconds timeout, OutMessage message) {
  base::AnswerWait::give_up();
  state_.throw_if_stopped();
  PeerLife& life = peers_->known_life(to);
  PeerBudget& budget = life.flow->budget;
  Sender::LaidOut out = sender_.lay_out(to, message, Sender::Traffic::request);
  complete_header(out.message, 0, {});
  const std::size_t bytes = out.in_flight.counted().bytes;
  const auto who = caller(message);
  if (!budget.try_take(bytes, who)) {
    const bool waits = who == PeerBudget::Caller::program && !message.refuse_when_full;
    if (!waits || !await_room(to, bytes, base::deadline_or_none(timeout))) {
      const Error why = full(to);
      throw Error(why.code(), "one-way call " + std::string(function) + "() to " + to_string(to) +
                                  " was not made: " + why.what())
          .with_worker(to.name)
          .with_function(std::string(function));
    }
  }
  Room room(budget, bytes);
  state_.throw_if_stopped();
  if (budget.try_send(bytes)) [[likely]] {
    room.release();
    transmit_one_way(to, bytes, std::move(out));
    return;
  }
  budget.send_later(
      table_.new_id(), bytes,
      [this, &peer = life.info(), bytes, room = std::move(room), out = std::move(out)]() mutable {
        room.release();
        transmit_one_way(peer, bytes, std::move(out));
        return true;
      });
}

// Its room is in the credits from here on.
void OutgoingCalls::transmit_one_way(const WorkerInfo& to, std::size_t bytes,
                                     Sender::LaidOut&& out) {
  out.in_flight.begun(true);
  PeerFlow& flow = sender_.flow(to);
  std::uint64_t ask = flow.one_way.begun(bytes);
  if (ask == 0 && flow.budget.any_wait()) ask = flow.one_way.to_ask();
  out.attachments.begin(out.message.frame);
  sender_.transmit(to, nullptr, std::move(out), [](const std::optional<Error>&) {});
  ask_room(to, ask);
}

void OutgoingCalls::on_give_room(const InMessage& message) {
  base::ByteReader in(message.view.body(), "room");
  OneWayCredits::Handled handled;
  handled.calls = in.read<std::uint64_t>();
  handled.bytes = in.read<std::uint64_t>();
  PeerFlow& flow = sender_.flow(message.from);
  const auto fresh = flow.one_way.given_back(handled);
  flow.budget.give_back(fresh.bytes, fresh.calls);
  // More has been sent meanwhile: while threads wait, for that too.
  if (flow.budget.any_wait()) ask_room(message.from, flow.one_way.to_ask());
}

std::uint64_t OutgoingCalls::add(OutstandingCall&& call) {
  const Clock::time_point made = call.made;
  const WorkerInfo& to = *call.to;
  const std::string_view function = call.function;
  const std::uint64_t id = table_.add(std::move(call));
  state_.events().record_at(made, "call made", to.id.value(), to.epoch, id, function);
  return id;
}

void OutgoingCalls::note(const char* what, const OutstandingCall& call) const noexcept {
  state_.events().record(what, call.to->id.value(), call.to->epoch, call.id, call.function);
}

void OutgoingCalls::on_request_sent(std::uint64_t call_id, const std::optional<Error>& error) {
  const bool immediately = SendingRequest::note_sent(*this, call_id);
  if (error) {
    fail_call(call_id, *error, "failed: ");
  } else if (!immediately) {
    table_.note_sent(call_id, Clock::now());
    state_.events().record("call sent", base::EventRing::kNoPeer, 0, call_id);
  }
}

void OutgoingCalls::fail_call(std::uint64_t call_id, const Error& error, const char* how) noexcept {
  if (auto call = table_.take(call_id)) {
    note("call failed", *call);
    static_cast<void>(leave_flow(*call));
    fail(*call, error, how);
  }
}

void OutgoingCalls::send_number(const WorkerInfo& to, std::uint16_t kind,
                                std::uint64_t number) noexcept {
  OutMessage message(kind);
  base::ByteWriter(message.frame.body()).write(number);
  sender_.send_while_possible(to, std::move(message));
}

transport::Buffer OutgoingCalls::place(const WorkerInfo& from, const base::Bytes& frame,
                                       std::size_t bytes) noexcept {
  const auto head = transport::peek_frame(frame);
  std::uint64_t call_id = 0;
  if (!head || head->kind != wire::kReply || head->body.size() < sizeof(call_id)) return {};
  std::memcpy(&call_id, head->body.data(), sizeof(call_id));
  const auto pending = table_.find(base::to_wire_order(call_id), from);
  IntoTensor* const into = pending ? pending->into() : nullptr;
  return into == nullptr ? transport::Buffer{} : into->place(bytes);
}

std::optional<c10::Stream> OutgoingCalls::store_later(std::uint64_t call_id,
                                                      const InMessage& reply) {
  const auto pending = table_.find(call_id, reply.from);
  IntoTensor* const into = pending ? pending->into() : nullptr;
  return into == nullptr ? std::nullopt : into->store_later(reply);
}

void OutgoingCalls::on_answer(InMessage&& message) {
  for (const auto& extension : extensions_) extension->on_receive(message);
  base::ByteReader in(message.view.body(), "reply");
  const auto call_id = in.read<std::uint64_t>();
  if (!takes_long_to_decode(message)) {
    take_and_complete(call_id, message);
    return;
  }
  if (!table_.find(call_id, message.from)) return;
  // All connections share the reader threads. Until another thread begins to decode, the call stays
  // in the table, where its deadline, the loss of the peer and shutdown can complete it.
  base::UniqueFunction<void()> task = [this, alive = std::shared_ptr<Runtime>(owner_), call_id,
                                       message = std::move(message)]() mutable {
    completing_.fetch_add(1);  // before the call leaves the table: see busy()
    const std::unique_ptr<OutgoingCalls, void (*)(OutgoingCalls*)> decoded(
        this, [](OutgoingCalls* calls) { calls->completing_.fetch_sub(1); });
    take_and_complete(call_id, message);
  };
  // Never queued behind handlers, which may be waiting for this very answer: without a free thread
  // it is decoded here.
  if (state_.forked() || !pool_.post_if_free(task)) task();
}

void OutgoingCalls::take_and_complete(std::uint64_t call_id, InMessage& message) {
  // Not there: it timed out, was cancelled or was answered before.
  const bool failed = message.view.kind() == wire::kErrorReply;
  if (auto call = table_.take(call_id, message.from)) {
    note(failed ? "call failed there" : "call answered", *call);
    call->room.end();  // before what the outcome sets off makes the next call
    complete_call(*call, message);
  }
}

void OutgoingCalls::complete_call(const OutstandingCall& call, InMessage& message) {
  if (message.arrival && message.arrival->error) [[unlikely]] {
    return fail(call, *message.arrival->error, "failed: ");
  }
  const char* why = "its result does not match its type on the caller: ";
  try {
    ExecutionContext context;
    context.runtime = std::shared_ptr<Runtime>(owner_);
    decode_tensors(message);
    const char* const later = std::exchange(why, "");
    for (const auto& extension : extensions_) extension->on_decode(message, context);
    why = later;
    if (message.view.kind() == wire::kReply) {
      call.pending->on_reply(message);
      return;
    }
    InArchive archive(message, message.view.body().subspan(sizeof(std::uint64_t)));
    Error error;
    archive(error);
    // Without a function it concerns this call, not one that its handler made.
    const bool own = error.function().empty();
    if (own && error.code() == ErrorCode::timeout && Clock::now() >= call.deadline) {
      note("call timed out", call);
      if (on_timeout_) on_timeout_({&call, 1});
      return call.pending->on_error(
          about(call, Error(error.code(), ""), timed_out_after(call) + error.what()));
    }
    const bool unknown = own && error.code() == ErrorCode::unimplemented;
    const std::string text = unknown ? "the function is not registered there" +
                                           near_function_names(call.function, error.what())
                                     : error.what();
    call.pending->on_error(about(call, error.with_remote(true), "failed: " + text));
  } catch (...) {
    fail(call, to_error(std::current_exception()), "failed: ", why);
  }
}

void OutgoingCalls::fail_answered(std::uint64_t call_id, const WorkerInfo& from,
                                  const Error& error) {
  if (const auto call = table_.take(call_id, from)) fail(*call, error, "failed: ");
}

// ---- the end of calls without an answer

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
  peers_->for_each([&](const PeerLife& life) {
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
