#include "stitch/rpc/agent/sender.h"

#include "stitch/rpc/message/tensor_codec.h"

namespace stitch::rpc {

void Sender::start(const std::shared_ptr<void>& owner, PeerTable& peers, std::size_t world_size) {
  self_ = std::shared_ptr<Sender>(owner, this);
  peers_ = &peers;
  control_bytes_ = std::vector<std::atomic<std::size_t>>(world_size);
}

void Sender::send(const WorkerInfo& to, OutMessage&& message, Traffic traffic,
                  transport::SendDone done) {
  if (done) {
    send(to, nullptr, std::move(message), traffic, std::move(done));
  } else {
    send(to, nullptr, std::move(message), traffic, [](const std::optional<Error>&) {});
  }
}

void Sender::send_reply(const WorkerInfo& to,
                        const std::shared_ptr<transport::Connection>& connection,
                        OutMessage&& message) {
  const bool error = message.frame.kind() == wire::kErrorReply;
  send(to, connection, std::move(message), error ? Traffic::error_reply : Traffic::call,
       [](const std::optional<Error>&) {});
}

Sender::LaidOut Sender::lay_out(const WorkerInfo& to, OutMessage& message, Traffic traffic) {
  const bool control = traffic == Traffic::control || traffic == Traffic::error_reply;
  const bool hooks = traffic == Traffic::call || traffic == Traffic::error_reply;
  try {
    const auto kind = message.frame.kind();
    // Refused before an extension records that the message is sent, if it is too large already.
    check_frame(message.frame.body().size());
    if (!control) check_inflight(outgoing_bytes_.load(), message.frame.body().size());
    message.frame.end_body();
    message.frame.set_inline_bytes(options_.inline_bytes);
    encode_tensors(message);
    if (hooks) {
      for (const auto& extension : extensions_) extension->on_send(message, to);
    }
    LaidOut out{std::move(message.frame).finish(), {}};
    check_frame(out.message.frame.size());
    out.counted = {total_bytes(out.message) + (control ? kControlFrameCost : 0), to.id, control,
                   kind != wire::kLeave};
    count(to, out.counted);
    if (out.counted.in_sent) sent_.fetch_add(1);
    return out;
  } catch (...) {
    DepartingAttachments(std::move(message.attachments)).tell(to_error(std::current_exception()));
    throw;
  }
}

void Sender::check_frame(std::size_t bytes) const {
  if (bytes > options_.max_frame_bytes) {
    throw Error(ErrorCode::out_of_range, "message of " + std::to_string(bytes) +
                                             " bytes exceeds max_frame_bytes " +
                                             std::to_string(options_.max_frame_bytes));
  }
}

void Sender::check_inflight(std::size_t queued, std::size_t bytes) const {
  if (queued + bytes > options_.max_inflight_bytes) {
    throw Error(ErrorCode::overloaded, "message of " + std::to_string(bytes) +
                                           " bytes would exceed max_inflight_bytes " +
                                           std::to_string(options_.max_inflight_bytes));
  }
}

void Sender::count(const WorkerInfo& to, const Counted& counted) {
  if (!counted.control) {
    const auto before = outgoing_bytes_.fetch_add(counted.bytes);
    try {
      check_inflight(before, counted.bytes);
    } catch (...) {
      end_count(counted);
      throw;
    }
    return;
  }
  auto& queued = control_bytes_.at(to.id.value());
  if (queued.fetch_add(counted.bytes) + counted.bytes <= kMaxControlBytes) return;
  end_count(counted);
  // To drop the frame would make its receiver wait without end; the loss of the peer is reported to
  // all that wait for it.
  const Error error(ErrorCode::overloaded, to_string(to) + " does not read: control messages of " +
                                               std::to_string(kMaxControlBytes >> 20) +
                                               " MiB wait for it");
  peers_->give_up(to.id, error);
  throw error;
}

void Sender::end_count(const Counted& counted) noexcept {
  (counted.control ? control_bytes_[counted.to.value()] : outgoing_bytes_).fetch_sub(counted.bytes);
}

void Sender::count_unsent(const Counted& counted) noexcept {
  if (counted.in_sent) sent_.fetch_sub(1);
  end_count(counted);
}

std::shared_ptr<Sender> Sender::InFlight::finish(const std::optional<Error>& error) noexcept {
  if (error) {
    sender_->count_unsent(counted_);
  } else {
    sender_->end_count(counted_);
  }
  return std::move(sender_);
}

void Sender::debug_info(std::map<std::string, std::int64_t>& numbers) const {
  std::size_t control_bytes = 0;
  for (const auto& each : control_bytes_) control_bytes += each.load();
  numbers.emplace("rpc.messages_sent", static_cast<std::int64_t>(sent_.load()));
  numbers.emplace("rpc.outgoing_bytes", static_cast<std::int64_t>(outgoing_bytes_.load()));
  numbers.emplace("rpc.control_bytes", static_cast<std::int64_t>(control_bytes));
}

}  // namespace stitch::rpc
