// How messages leave an Agent: laid out, counted, handed to the transport, or taken back.
#include "stitch/rpc/agent/agent.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/message/tensor_codec.h"

namespace stitch::rpc {

Agent::Outgoing Agent::lay_out(const WorkerInfo& to, OutMessage& message, bool hooks,
                               bool control) {
  try {
    const auto kind = message.frame.kind();
    const auto check_frame = [this](std::size_t bytes) {
      if (bytes > options_.max_frame_bytes) {
        throw Error(ErrorCode::out_of_range, "message of " + std::to_string(bytes) +
                                                 " bytes exceeds max_frame_bytes " +
                                                 std::to_string(options_.max_frame_bytes));
      }
    };
    // What is too much already is refused before an extension has noted that it leaves.
    check_frame(message.frame.body().size());
    if (!control) check_inflight(outgoing_bytes_.load(), message.frame.body().size());
    message.frame.end_body();
    message.frame.set_inline_bytes(options_.inline_bytes);
    encode_tensors(message);
    if (hooks) for_each_extension([&](Extension& extension) { extension.on_send(message, to); });
    Outgoing out{std::move(message.frame).finish(), {}};
    check_frame(out.message.frame.size());
    out.counted = {total_bytes(out.message) + (control ? kControlFrameCost : 0), to.id, control,
                   kind != wire::kLeave};
    count(to, out.counted);
    if (out.counted.tallied) sent_.fetch_add(1);
    return out;
  } catch (...) {
    DepartingAttachments(std::move(message.attachments)).tell(to_error(std::current_exception()));
    throw;
  }
}

void Agent::check_inflight(std::size_t queued, std::size_t bytes) const {
  if (queued + bytes > options_.max_inflight_bytes) {
    throw Error(ErrorCode::overloaded, "message of " + std::to_string(bytes) +
                                           " bytes would exceed max_inflight_bytes " +
                                           std::to_string(options_.max_inflight_bytes));
  }
}

void Agent::count(const WorkerInfo& to, const Counted& counted) {
  if (!counted.control) {
    const auto before = outgoing_bytes_.fetch_add(counted.bytes);
    try {
      check_inflight(before, counted.bytes);
    } catch (...) {
      uncount(counted);
      throw;
    }
    return;
  }
  auto& queued = control_bytes_.at(to.id.value());
  if (queued.fetch_add(counted.bytes) + counted.bytes <= kMostControlBytes) return;
  uncount(counted);
  // It would have to be dropped, and whoever waits for it would wait for ever: better that
  // everybody learns it.
  const Error error(ErrorCode::overloaded, to_string(to) + " does not read: control messages of " +
                                               std::to_string(kMostControlBytes >> 20) +
                                               " MiB wait for it");
  peers_->give_up(to.id, error);
  throw error;
}

void Agent::uncount(const Counted& counted) noexcept {
  (counted.control ? control_bytes_[counted.to.value()] : outgoing_bytes_).fetch_sub(counted.bytes);
}

void Agent::sent(const Counted& counted, const std::optional<Error>& error) noexcept {
  if (error) {
    uncount_unsent(counted);
  } else {
    uncount(counted);
  }
}

void Agent::uncount_unsent(const Counted& counted) noexcept {
  if (counted.tallied) sent_.fetch_sub(1);
  uncount(counted);
}

void Agent::send(const WorkerInfo& to, const std::shared_ptr<transport::Connection>& connection,
                 OutMessage message, bool hooks, bool control, transport::SendDone done) {
  Outgoing out = lay_out(to, message, hooks, control);
  InFlight in_flight(shared_from_this(), out.counted);
  if (message.attachments.empty() && !done) {
    peers_->send(to, connection, std::move(out.message),
                 [in_flight = std::move(in_flight)](const std::optional<Error>& error) mutable {
                   in_flight.tell(error);
                 });
    return;
  }
  peers_->send(to, connection, std::move(out.message),
               [in_flight = std::move(in_flight),
                attachments = DepartingAttachments(std::move(message.attachments)),
                done = std::move(done)](const std::optional<Error>& error) mutable {
                 const auto self = in_flight.tell(error);
                 attachments.tell(error);
                 if (done) done(error);
               });
}

void Agent::send_frame(const WorkerInfo& to, OutMessage message, transport::SendDone done) {
  send(to, nullptr, std::move(message), false, false, std::move(done));
}

void Agent::send_control(const WorkerInfo& to, OutMessage message, transport::SendDone done) {
  send(to, nullptr, std::move(message), false, true, std::move(done));
}

void Agent::send_reply(const WorkerInfo& to,
                       const std::shared_ptr<transport::Connection>& connection,
                       OutMessage message) {
  const bool control = message.frame.kind() == wire::kErrorReply;
  send(to, connection, std::move(message), true, control, nullptr);
}

void Agent::tell_cancelled(const WorkerInfo& to, std::uint64_t call_id) noexcept {
  try {
    OutMessage message(wire::kCancel);
    base::ByteWriter(message.frame.body()).write(call_id);
    send_control(to, std::move(message));
  } catch (const std::exception&) {
    // Out of memory: the callee goes on for nobody, until its own deadline.
  }
}

}  // namespace stitch::rpc
