#include "stitch/rpc/agent/outgoing_calls.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/deadline.h"
#include "stitch/rpc/agent/unknown_function.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/tensor_codec.h"

namespace stitch::rpc {

namespace {

std::string milliseconds(std::chrono::nanoseconds duration) {
  const double ms = std::chrono::duration<double, std::milli>(duration).count();
  std::string text = std::to_string(ms);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " ms";
}

// Fills in what begin_request() left open.
void complete_header(OutMessage& message, std::uint64_t call_id, std::chrono::nanoseconds timeout) {
  std::byte* const header = message.frame.body().data() + transport::FrameBuilder::body_offset();
  const auto id = base::to_wire_order(call_id);
  const auto ns = base::to_wire_order(static_cast<std::int64_t>(timeout.count()));
  std::memcpy(header, &id, sizeof(id));
  std::memcpy(header + 16, &ns, sizeof(ns));
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
                          const std::shared_ptr<base::EventLoop>& loop) {
  owner_ = owner;
  peers_ = &peers;
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

std::uint64_t OutgoingCalls::start_call(const WorkerInfo& to, std::string_view function,
                                        std::chrono::nanoseconds timeout, OutMessage message,
                                        std::shared_ptr<PendingCall> pending) {
  if (state_.stopped()) state_.throw_if_stopped();
  OutstandingCall call{std::move(pending), &peers_->known(to).info(), function, timeout,
                       base::deadline_or_none(timeout)};
  const Clock::time_point deadline = call.deadline;
  const std::uint64_t id = table_.add(std::move(call));
  const SendingRequest sending(*this, id);
  try {
    watch_->watch(deadline);
    complete_header(message, id, timeout);
    // What is in flight keeps the agent alive, and with it this.
    sender_.send(
        to, nullptr, std::move(message), Sender::Traffic::call,
        [this, id](const std::optional<Error>& error) { on_request_sent(id, error); }, id);
  } catch (...) {
    const Error error = to_error(std::current_exception());
    fail_call(id, error, std::string("was not made: ") + error.what());
  }
  if (!sending.sent()) table_.note_queued(id);
  // stop() may have run between the first check and the entry in the table, and missed this call.
  if (state_.stopped())
    fail_call(id, Error(ErrorCode::shutting_down, ""), "failed: this worker is shutting down");
  return id;
}

void OutgoingCalls::start_notify(const WorkerInfo& to, OutMessage message) {
  state_.throw_if_stopped();
  complete_header(message, 0, std::chrono::nanoseconds(0));
  sender_.send(to, std::move(message), Sender::Traffic::call, nullptr);
}

bool OutgoingCalls::abandon_call(std::uint64_t call_id) {
  if (state_.forked()) return false;
  const auto call = table_.take(call_id);
  if (!call) return false;
  send_cancel(*call->to, call_id);
  return true;
}

void OutgoingCalls::on_request_sent(std::uint64_t call_id, const std::optional<Error>& error) {
  const bool immediately = SendingRequest::note_sent(*this, call_id);
  if (error) {
    fail_call(call_id, *error, std::string("failed: ") + error->what());
  } else if (!immediately) {
    table_.note_sent(call_id, Clock::now());
  }
}

void OutgoingCalls::fail_call(std::uint64_t call_id, const Error& error,
                              const std::string& text) noexcept {
  if (const auto call = table_.take(call_id)) call->pending->on_error(about(*call, error, text));
}

void OutgoingCalls::send_cancel(const WorkerInfo& to, std::uint64_t call_id) noexcept {
  try {
    OutMessage message(wire::kCancel);
    base::ByteWriter(message.frame.body()).write(call_id);
    sender_.send(to, std::move(message), Sender::Traffic::control, nullptr);
  } catch (const std::exception&) {
    // Out of memory, for example: the callee continues until the call's deadline.
  }
}

transport::Buffer OutgoingCalls::place(const WorkerInfo& from, const base::Bytes& frame,
                                       std::size_t bytes) noexcept {
  const auto head = transport::peek_frame(frame);
  std::uint64_t call_id = 0;
  if (!head || head->kind != wire::kReply || head->body.size() < sizeof(call_id)) return {};
  std::memcpy(&call_id, head->body.data(), sizeof(call_id));
  const auto pending = table_.find(base::to_wire_order(call_id), from);
  return pending ? pending->place(bytes) : transport::Buffer{};
}

void OutgoingCalls::on_answer(InMessage message) {
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
    decoding_.fetch_add(1);  // before the call leaves the table: see busy()
    const std::unique_ptr<OutgoingCalls, void (*)(OutgoingCalls*)> decoded(
        this, [](OutgoingCalls* calls) { calls->decoding_.fetch_sub(1); });
    take_and_complete(call_id, message);
  };
  // Never queued behind handlers, which may be waiting for this very answer: without a free thread
  // it is decoded here.
  if (state_.forked() || !pool_.post_if_free(task)) task();
}

void OutgoingCalls::take_and_complete(std::uint64_t call_id, InMessage& message) {
  // Not there: it timed out, was cancelled or was answered before.
  if (const auto call = table_.take(call_id, message.from)) complete_call(*call, message);
}

void OutgoingCalls::complete_call(const OutstandingCall& call, InMessage& message) {
  try {
    ExecutionContext context;
    context.runtime = std::shared_ptr<Runtime>(owner_);
    decode_tensors(message);
    for (const auto& extension : extensions_) extension->on_decode(message, context);
    if (message.view.kind() == wire::kReply) {
      call.pending->on_reply(message);
      return;
    }
    InArchive archive(message, message.view.body().subspan(sizeof(std::uint64_t)));
    Error error;
    archive(error);
    // Without a function it concerns this call, not one that its handler made.
    const bool unknown = error.code() == ErrorCode::unimplemented && error.function().empty();
    const std::string text = unknown ? "the function is not registered there" +
                                           near_function_names(call.function, error.what())
                                     : error.what();
    call.pending->on_error(about(call, error.with_remote(true), "failed: " + text));
  } catch (...) {
    const Error error = to_error(std::current_exception());
    call.pending->on_error(about(
        call, error,
        std::string("failed: its result does not match its type on the caller: ") + error.what()));
  }
}

void OutgoingCalls::fail_answered(std::uint64_t call_id, const WorkerInfo& from,
                                  const Error& error) {
  if (const auto call = table_.take(call_id, from))
    call->pending->on_error(about(*call, error, std::string("failed: ") + error.what()));
}

void OutgoingCalls::on_peer_lost(const WorkerInfo& peer, const Error& reason) {
  for (const auto& call : table_.take_all(peer)) {
    complete_with_error(call, [&] {
      return about(call, Error(ErrorCode::disconnected, ""),
                   std::string("failed: the worker is gone: ") + reason.what());
    });
  }
}

void OutgoingCalls::stop() {
  for (const auto& call : table_.take_all()) {
    complete_with_error(call, [&] {
      return about(call, Error(ErrorCode::shutting_down, ""),
                   "failed: this worker is shutting down");
    });
  }
}

void OutgoingCalls::expire() {
  const auto expired = table_.take_expired(Clock::now());
  watch_->watch(expired.next);
  for (const auto& call : expired.calls) {
    complete_with_error(
        call, [&] { return about(call, Error(ErrorCode::timeout, ""), timeout_text(call)); });
    send_cancel(*call.to, call.id);
  }
}

std::string OutgoingCalls::timeout_text(const OutstandingCall& call) const {
  std::string text =
      "timed out after " + milliseconds(call.timeout) + "; " + peers_->condition(*call.to);
  if (call.queued && !call.sent) return text + ", call was never sent";
  const auto queued =
      call.sent ? *call.sent - (call.deadline - call.timeout) : std::chrono::nanoseconds(0);
  if (queued < std::chrono::milliseconds(1)) return text + ", call was sent at once";
  return text + ", call was queued " + duration_text(queued);
}

}  // namespace stitch::rpc
