// Calls that this worker makes, and the deadlines of those that it makes and serves.
#include "stitch/rpc/agent/agent.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/deadline.h"
#include "stitch/rpc/agent/incoming_call.h"

namespace stitch::rpc {

namespace {

// Callers have that long to say themselves that a call's deadline has passed, which they do unless
// they are stopped or cut off. So a handler does not answer the moment its caller gives up.
constexpr std::chrono::milliseconds kGraceOfCallers{10};

std::string milliseconds(std::chrono::nanoseconds duration) {
  const double ms = std::chrono::duration<double, std::milli>(duration).count();
  std::string text = std::to_string(ms);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " ms";
}

}  // namespace

OutMessage Agent::begin_request(std::uint64_t function_id) {
  OutMessage message(wire::kRequest);
  base::ByteWriter out(message.frame.body());
  out.write(std::uint64_t{0});
  out.write(function_id);
  out.write(std::int64_t{0});
  return message;
}

namespace {

// Fills in what begin_request() left open.
void complete_header(OutMessage& message, std::uint64_t call_id, std::chrono::nanoseconds timeout) {
  std::byte* const header = message.frame.body().data() + transport::FrameBuilder::body_offset();
  const auto id = base::to_wire_order(call_id);
  const auto ns = base::to_wire_order(static_cast<std::int64_t>(timeout.count()));
  std::memcpy(header, &id, sizeof(id));
  std::memcpy(header + 16, &ns, sizeof(ns));
}

}  // namespace

std::chrono::nanoseconds Agent::effective_timeout(
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

namespace {

// The request that this thread is sending, the innermost one. One that is written before the sender
// returns was never queued, which is the rule, and costs the call table nothing.
class Sending {
 public:
  Sending(const Agent& agent, std::uint64_t id) noexcept
      : agent_(&agent), id_(id), outer_(std::exchange(here, this)) {}
  ~Sending() { here = outer_; }
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;
  [[nodiscard]] bool done() const noexcept { return done_; }
  // Whether it is the one that this thread is sending.
  [[nodiscard]] static bool note_done(const Agent& agent, std::uint64_t id) noexcept {
    if (here == nullptr || here->agent_ != &agent || here->id_ != id) return false;
    here->done_ = true;
    return true;
  }

 private:
  static thread_local Sending* here;
  const Agent* const agent_;
  const std::uint64_t id_;
  Sending* const outer_;
  bool done_ = false;
};

thread_local Sending* Sending::here = nullptr;

}  // namespace

std::uint64_t Agent::start_call(const WorkerInfo& to, std::string_view function,
                                std::chrono::nanoseconds timeout, OutMessage message,
                                std::shared_ptr<PendingCall> pending) {
  if (stopped()) throw_if_stopped();
  CallTable::Record record{std::move(pending), &peers_->find(to.id), function, timeout,
                           base::deadline_or_none(timeout)};
  const Clock::time_point deadline = record.deadline;
  const std::uint64_t id = calls_.add(std::move(record));
  const Sending sending(*this, id);
  try {
    calls_watch_->watch(deadline);
    complete_header(message, id, timeout);
    Outgoing out = lay_out(to, message, true, false);
    InFlight in_flight(shared_from_this(), out.counted);
    if (message.attachments.empty()) {
      // Small enough to need no memory of its own: most calls are like this.
      peers_->send(
          to, nullptr, std::move(out.message),
          [in_flight = std::move(in_flight), id](const std::optional<Error>& error) mutable {
            in_flight.tell(error)->request_done(id, error);
          },
          id);
    } else {
      peers_->send(
          to, nullptr, std::move(out.message),
          [in_flight = std::move(in_flight), id,
           attachments = DepartingAttachments(std::move(message.attachments))](
              const std::optional<Error>& error) mutable {
            const auto self = in_flight.tell(error);
            attachments.tell(error);
            self->request_done(id, error);
          },
          id);
    }
  } catch (...) {
    const Error error = to_error(std::current_exception());
    fail_call(id, error, std::string("was not made: ") + error.what());
  }
  if (!sending.done()) calls_.note_queued(id);
  // The worker may have stopped between the first look and the entry in the table: nobody else
  // would complete the call then.
  if (stopped())
    fail_call(id, Error(ErrorCode::shutting_down, ""), "failed: this worker is shutting down");
  return id;
}

void Agent::fail_call(std::uint64_t call_id, const Error& error, const std::string& what) noexcept {
  if (const auto record = calls_.take(call_id))
    record->pending->on_error(about(*record, error, what));
}

void Agent::request_done(std::uint64_t call_id, const std::optional<Error>& error) {
  const bool at_once = Sending::note_done(*this, call_id);
  if (error) {
    fail_call(call_id, *error, std::string("failed: ") + error->what());
  } else if (!at_once) {
    calls_.note_sent(call_id, Clock::now());
  }
}

std::string Agent::timeout_text(const CallTable::Record& record) const {
  std::string text =
      "timed out after " + milliseconds(record.timeout) + "; " + peers_->condition(record.to->id);
  if (record.queued && !record.sent) return text + ", call was never sent";
  const auto queued =
      record.sent ? *record.sent - (record.deadline - record.timeout) : std::chrono::nanoseconds(0);
  if (queued < std::chrono::milliseconds(1)) return text + ", call was sent at once";
  return text + ", call was queued " + duration_text(queued);
}

void Agent::expire_calls() {
  const auto expired = calls_.take_expired(Clock::now());
  calls_watch_->watch(expired.next);
  for (const auto& record : expired.records) {
    complete_with_error(
        record, [&] { return about(record, Error(ErrorCode::timeout, ""), timeout_text(record)); });
    tell_cancelled(*record.to, record.id);
  }
}

void Agent::watch_incoming(Clock::time_point deadline) {
  if (deadline < Clock::time_point::max() - kGraceOfCallers)
    incoming_watch_->watch(deadline + kGraceOfCallers);
}

void Agent::expire_incoming() {
  const auto expired = incoming_.expired(Clock::now() - kGraceOfCallers);
  watch_incoming(expired.next);
  for (const auto& call : expired.calls) call->request_stop();
}

void Agent::start_notify(const WorkerInfo& to, OutMessage message) {
  throw_if_stopped();
  complete_header(message, 0, std::chrono::nanoseconds(0));
  send(to, nullptr, std::move(message), true, false, nullptr);
}

}  // namespace stitch::rpc
