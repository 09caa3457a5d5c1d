#include "stitch/rpc/agent/sender.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/tensor_codec.h"

namespace stitch::rpc {

void Sender::start(const std::shared_ptr<void>& owner, PeerTable& peers) {
  self_ = std::shared_ptr<Sender>(owner, this);
  peers_ = &peers;
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
    std::unique_ptr<DeviceGate> gate;
    if (device_tensors_.concerns(message, to.id)) [[unlikely]] {
      gate = encode_staged(message, to);
    } else {
      encode_tensors(message);
    }
    // Who has an answer finds done what the handler has queued on its streams.
    if (const auto& streams = ExecutionContext::current().streams; streams && kind == wire::kReply)
        [[unlikely]]
      gate = DeviceTensors::gate_of(*streams, std::move(gate));
    if (hooks) {
      for (const auto& extension : extensions_) extension->on_send(message, to);
    }
    LaidOut out{std::move(message.frame).finish(), {}, std::move(gate)};
    check_frame(out.message.frame.size());
    out.counted = {total_bytes(out.message) + (control ? kControlFrameCost : 0),
                   control ? &peers_->known(to) : nullptr, kind != wire::kLeave};
    count(to, out.counted);
    if (out.counted.in_sent) sent_.fetch_add(1);
    return out;
  } catch (...) {
    DepartingAttachments(std::move(message.attachments)).tell(to_error(std::current_exception()));
    throw;
  }
}

std::unique_ptr<DeviceGate> Sender::encode_staged(OutMessage& message, const WorkerInfo& to) const {
  StagedTensors staged = device_tensors_.stage(message, to);
  if (staged.few_bytes) {
    const std::size_t fits = std::min(DeviceTensors::kInlineBytes, options_.max_frame_bytes / 16);
    message.frame.set_inline_bytes(std::max(options_.inline_bytes, fits));
  }
  encode_copies(message, staged.copies, staged.gate == nullptr);
  if (staged.section.size() != 0) message.frame.add_section(wire::kDevices, staged.section.span());
  return std::move(staged.gate);
}

void Sender::send_when_open(const WorkerInfo& to,
                            const std::shared_ptr<transport::Connection>& connection, LaidOut out,
                            InFlight in_flight, DepartingAttachments attachments,
                            transport::SendDone done, std::uint64_t call_id) {
  // Of a reply; read before the frame is passed on.
  std::optional<std::uint64_t> answered;
  if (const auto head = transport::peek_frame(out.message.frame);
      head && head->kind == wire::kReply) {
    std::uint64_t id = 0;
    std::memcpy(&id, head->body.data(), sizeof(id));
    answered = base::to_wire_order(id);
  }
  struct Waiting {
    WorkerInfo to;
    std::shared_ptr<transport::Connection> connection;
    transport::Message message;
    InFlight in_flight;
    DepartingAttachments attachments;
    transport::SendDone done;
  };
  auto waiting = std::make_unique<Waiting>(Waiting{to, connection, std::move(out.message),
                                                   std::move(in_flight), std::move(attachments),
                                                   std::move(done)});
  device_tensors_.when_open(
      std::move(out.gate), [this, waiting = std::move(waiting), answered,
                            call_id](const std::optional<Error>& error) mutable {
        const auto end = [](Waiting& sent, const std::optional<Error>& why) {
          const auto self = sent.in_flight.finish(why);
          sent.attachments.tell(why);
          sent.done(why);
        };
        if (error) {
          const std::shared_ptr<Sender> alive(self_);
          end(*waiting, error);
          if (answered) send_error_reply(waiting->to, waiting->connection, *answered, *error);
          return;
        }
        const WorkerInfo peer = waiting->to;  // `waiting` ends inside send()
        const auto over = waiting->connection;
        transport::Message ready = std::move(waiting->message);
        peers_->send(
            peer, over, std::move(ready),
            [waiting = std::move(waiting), end](const std::optional<Error>& why) {
              end(*waiting, why);
            },
            call_id);
      });
}

void Sender::send_error_reply(const WorkerInfo& to,
                              const std::shared_ptr<transport::Connection>& connection,
                              std::uint64_t call_id, const Error& error) noexcept {
  try {
    OutMessage message(wire::kErrorReply);
    base::ByteWriter(message.frame.body()).write(call_id);
    OutArchive archive(message);
    archive(error.with_prefix("its result cannot be sent"));
    send_reply(to, connection, std::move(message));
  } catch (...) {
    // The caller must not wait without end.
    connection->close(
        to_error(std::current_exception()).with_prefix("an error could not be reported"));
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
  if (counted.to == nullptr) {
    const auto before = outgoing_bytes_.fetch_add(counted.bytes);
    try {
      check_inflight(before, counted.bytes);
    } catch (...) {
      end_count(counted);
      throw;
    }
    return;
  }
  auto& queued = counted.to->control_bytes;
  if (queued.fetch_add(counted.bytes) + counted.bytes <= kMaxControlBytes) return;
  end_count(counted);
  // To drop the frame would make its receiver wait without end; the loss of the peer is reported to
  // all that wait for it.
  const Error error(ErrorCode::overloaded, to_string(to) + " does not read: control messages of " +
                                               std::to_string(kMaxControlBytes >> 20) +
                                               " MiB wait for it");
  peers_->give_up(to, error);
  throw error;
}

void Sender::end_count(const Counted& counted) noexcept {
  (counted.to != nullptr ? counted.to->control_bytes : outgoing_bytes_).fetch_sub(counted.bytes);
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
  peers_->for_each([&](const Life& life) { control_bytes += life.control_bytes.load(); });
  numbers.emplace("rpc.messages_sent", static_cast<std::int64_t>(sent_.load()));
  numbers.emplace("rpc.outgoing_bytes", static_cast<std::int64_t>(outgoing_bytes_.load()));
  numbers.emplace("rpc.control_bytes", static_cast<std::int64_t>(control_bytes));
}

}  // namespace stitch::rpc
