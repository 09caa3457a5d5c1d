// One file, though long: what each kind of message is counted as, and what sends it or keeps it,
// stand side by side.
#include "stitch/rpc/calls/sender.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/gpu/tensor_transfers.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/tensor_codec.h"
#include "stitch/rpc/message/time_left.h"

namespace stitch::rpc {

namespace {
// The call that `frame` answers; nothing if it is no reply.
std::optional<std::uint64_t> reply_to(const base::Bytes& frame) {
  const auto head = transport::peek_frame(frame);
  if (!head || head->kind != wire::kReply) return std::nullopt;
  std::uint64_t id = 0;
  std::memcpy(&id, head->body.data(), sizeof(id));
  return base::to_wire_order(id);
}
}  // namespace

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

void Sender::send_while_possible(const WorkerInfo& to, OutMessage&& message) noexcept {
  try {
    send(to, std::move(message), Traffic::control, nullptr);
  } catch (const Error&) {
    // The peer is lost or this worker has stopped, of which all are told.
  }
}

bool Sender::send_frame(const WorkerInfo& to, OutMessage&& message, transport::SendDone done,
                        const void* owner) {
  if (!done) done = [](const std::optional<Error>&) {};
  LaidOut out = lay_out(to, message, Traffic::frame);
  FrameQueue& frames = out.in_flight.counted().flow->frames;
  const std::size_t bytes = out.in_flight.counted().bytes;
  if (frames.try_begin(bytes)) {
    out.in_flight.begun();
    transmit(to, nullptr, std::move(out), std::move(done));
    return true;
  }
  struct QueuedFrame {
    WorkerInfo to;
    std::optional<LaidOut> out;
    transport::SendDone done;
    void complete(const std::optional<Error>& error) {
      if (done) std::exchange(done, nullptr)(error);
    }
  };
  auto queued = std::shared_ptr<QueuedFrame>(new QueuedFrame{to, std::move(out), std::move(done)});
  // What is counted as sent keeps the agent alive, and with it this.
  frames.wait(bytes, owner, [this, queued = std::move(queued)](bool sent) {
    if (!sent) {
      const std::shared_ptr<Sender> alive(self_);
      queued->out.reset();
      queued->complete(
          Error(ErrorCode::cancelled, "it was not wanted any more before it was sent"));
      return;
    }
    queued->out->in_flight.begun();
    transmit(queued->to, nullptr, std::move(*queued->out),
             [queued](const std::optional<Error>& error) { queued->complete(error); });
  });
  return !frames.many();
}

void Sender::drop_frames(const void* owner) noexcept {
  peers_->for_each([owner](PeerLife& life) { life.flow->frames.drop(owner); });
}

void Sender::send_reply(const WorkerInfo& to,
                        const std::shared_ptr<transport::Connection>& connection,
                        OutMessage&& message) {
  const auto nothing = [](const std::optional<Error>&) {};
  if (message.frame.kind() == wire::kErrorReply) {
    send(to, connection, std::move(message), Traffic::error_reply, nothing);
    return;
  }
  send(to, connection, std::move(message), Traffic::reply, nothing);
}

Sender::LaidOut Sender::lay_out(const WorkerInfo& to, OutMessage& message, Traffic traffic) {
  const bool control = traffic == Traffic::control || traffic == Traffic::error_reply;
  const bool hooks = traffic != Traffic::frame && traffic != Traffic::control;
  PeerFlow& flow = this->flow(to);
  const PeerLimits& limits = flow.limits();
  try {
    const auto kind = message.frame.kind();
    // Refused before an extension records that the message is sent, if it is too large already.
    check_frame(kind, message.frame.body().size(), limits);
    if (!control) check_bytes(message.frame.body().size(), limits);
    message.frame.end_body();
    message.frame.set_inline_bytes(options_.inline_bytes);
    DeviceParts tensors;
    if (device_tensors_.concerns(message, to.id)) [[unlikely]] {
      tensors = encode_staged(message, to);
    } else {
      encode_tensors(message);
    }
    // Who has an answer finds done what the handler has queued on its streams.
    if (const auto& streams = ExecutionContext::current().streams; streams && kind == wire::kReply)
        [[unlikely]]
      tensors.gate = DeviceTensors::gate_of(*streams, std::move(tensors.gate));
    if (hooks) {
      for (const auto& extension : extensions_) extension->on_send(message, to);
    }
    transport::Message laid_out = std::move(message.frame).finish();
    check_frame(kind, laid_out.frame.size(), limits);
    std::size_t bytes = total_bytes(laid_out);
    if (!control) check_bytes(bytes, limits);
    Counted counted;
    counted.flow = &flow;
    if (tensors.transfers) [[unlikely]] {
      const std::size_t beside = tensors.transfers->bytes();
      bytes = traffic == Traffic::request ? flow.counted(bytes, beside)
                                          : flow.counted_data(bytes, beside);
    }
    counted.bytes = bytes + (control ? kControlFrameCost : 0);
    counted.kind = control                     ? Counted::control
                   : traffic == Traffic::reply ? Counted::reply
                                               : Counted::nothing;
    counted.in_sent = wire::is_work(kind);
    count(to, counted);
    if (counted.in_sent) sent_.fetch_add(1);
    return {std::move(laid_out), InFlight(std::shared_ptr<Sender>(self_), counted),
            std::move(tensors.gate), std::move(tensors.transfers),
            DepartingAttachments(std::move(message.attachments))};
  } catch (...) {
    DepartingAttachments(std::move(message.attachments)).notify(to_error(std::current_exception()));
    throw;
  }
}

Sender::DeviceParts Sender::encode_staged(OutMessage& message, const WorkerInfo& to) const {
  StagedTensors staged = device_tensors_.stage(message, to);
  if (staged.few_bytes) {
    const std::size_t fits = std::min(DeviceTensors::kInlineBytes, options_.max_frame_bytes / 16);
    message.frame.set_inline_bytes(std::max(options_.inline_bytes, fits));
  }
  encode_copies(message, staged.copies, staged.gate == nullptr);
  if (staged.section.size() != 0) message.frame.add_section(wire::kDevices, staged.section.span());
  if (staged.transfers) message.frame.add_section(wire::kTransfers, staged.transfer_section.span());
  return {std::move(staged.gate), std::move(staged.transfers)};
}

void Sender::send_transfer_frame(const WorkerInfo& to, base::Bytes frame) noexcept {
  constexpr std::size_t kInBody = 4096;
  transport::FrameBuilder builder(wire::kTransfer);
  if (frame.size() <= kInBody) builder.body().append(frame.data(), frame.size());
  builder.end_body();
  if (frame.size() > kInBody) {
    auto held = std::make_shared<base::Bytes>(std::move(frame));
    builder.add_buffer({{}, held->data(), held->size(), held});
  }
  transport::Message message = std::move(builder).finish();
  // It keeps the agent alive, as every message does.
  peers_->send(to, nullptr, std::move(message),
               [self = std::shared_ptr<Sender>(self_), to](const std::optional<Error>& error) {
                 if (error) self->give_up_transfers(to, *error);
               });
}

// A frame that is missing would be waited for without end.
void Sender::give_up_transfers(const WorkerInfo& to, const Error& error) noexcept {
  if (peers_->closing() || peers_->lost(to)) return;
  peers_->give_up(to, error.with_prefix("a frame of device transfers cannot be sent"));
}

// A message that waits for a device. Owned by the wait, then by the connection, and where it counts
// as in flight until its tensors have been transferred, by their transfers.
struct Sender::GatedMessage {
  WorkerInfo to;
  std::shared_ptr<transport::Connection> connection;
  transport::Message message;
  InFlight in_flight;
  DepartingAttachments attachments;
  transport::SendDone done;
  std::shared_ptr<OutgoingTransfers> transfers;
  std::uint64_t call_id;                 // of a request, else 0
  std::optional<std::uint64_t> answers;  // the call, of a reply
  bool transferring = false;             // written, and in flight until the last transfer ends

  ~GatedMessage() {
    if (!transferring) return;
    // Not on a lane, which must not end the worker.
    auto sender = in_flight.finish(std::nullopt);
    DeviceTensors& devices = sender->device_tensors_;
    devices.when_open(nullptr, [sender = std::move(sender)](const std::optional<Error>&) {});
  }
  void complete(const std::optional<Error>& error) {
    const auto alive = in_flight.finish(error);
    attachments.notify(error);
    done(error);
  }
};

void Sender::send_when_open(const WorkerInfo& to,
                            const std::shared_ptr<transport::Connection>& connection, LaidOut out,
                            transport::SendDone done, std::uint64_t call_id) {
  const auto answers = reply_to(out.message.frame);  // before the frame is moved
  std::unique_ptr<DeviceGate> gate = std::move(out.gate);
  std::shared_ptr<GatedMessage> gated(new GatedMessage{
      to, connection, std::move(out.message), std::move(out.in_flight), std::move(out.attachments),
      std::move(done), std::move(out.transfers), call_id, answers});
  if (!gate) return send_gated(std::move(gated), std::nullopt);
  device_tensors_.when_open(
      std::move(gate), [this, gated = std::move(gated)](const std::optional<Error>& error) mutable {
        send_gated(std::move(gated), error);
      });
}

void Sender::send_gated(std::shared_ptr<GatedMessage> gated, std::optional<Error> error) {
  // The caller may have given up meanwhile, and the call's deadline has come nearer.
  if (!error && gated->call_id != 0) {
    const auto deadline = peers_->deadline(gated->call_id);
    put_time_left(gated->message.frame, time_left(deadline));
    if (!deadline)
      error.emplace(ErrorCode::cancelled, "it was not wanted any more before it was sent");
  }
  if (error) {
    const std::shared_ptr<Sender> alive(self_);
    gated->complete(error);
    if (gated->answers)
      send_error_reply(gated->to, gated->connection, *gated->answers,
                       error->with_prefix("its result cannot be sent"));
    return;
  }
  const WorkerInfo peer = gated->to;  // `gated` may end inside send()
  const auto connection = gated->connection;
  const std::uint64_t call_id = gated->call_id;
  transport::Message message = std::move(gated->message);
  peers_->send(
      peer, connection, std::move(message),
      [gated = std::move(gated)](const std::optional<Error>& why) {
        const auto transfers = std::move(gated->transfers);
        if (why || !transfers) return gated->complete(why);
        // Now, so that a transfer never begins whose message does not come.
        const auto kind = gated->in_flight.counted().kind;
        if (kind != Counted::reply && kind != Counted::frame) {
          transfers->begin(gated->to, nullptr);
          return gated->complete(why);
        }
        gated->transferring = true;
        gated->connection.reset();
        gated->attachments.notify(why);
        auto done = std::move(gated->done);
        transfers->begin(gated->to, gated);
        done(why);
      },
      call_id);
}

void Sender::send_error_reply(const WorkerInfo& to,
                              const std::shared_ptr<transport::Connection>& connection,
                              std::uint64_t call_id, const Error& error) noexcept {
  try {
    OutMessage message(wire::kErrorReply);
    base::ByteWriter(message.frame.body()).write(call_id);
    OutArchive archive(message);
    archive(sendable(to, error));
    send_reply(to, connection, std::move(message));
  } catch (const Error& why) {  // the caller must not wait without end
    connection->close(why.with_prefix("an error could not be reported"));
  }
}

Error Sender::sendable(const WorkerInfo& to, const Error& error) {
  const std::string_view text = error.what();
  const std::size_t limit = flow(to).limits().frame_bytes / 2;
  if (text.size() <= limit) return error;
  return Error(error.code(), std::string(text.substr(0, limit)))
      .with_remote(error.remote())
      .with_worker(error.worker())
      .with_function(error.function());
}

void Sender::check_frame(std::uint16_t kind, std::size_t bytes, const PeerLimits& limits) {
  const std::size_t limit = wire::max_frame_bytes(kind, limits.frame_bytes);
  if (bytes > limit) {
    throw Error(ErrorCode::out_of_range, "message of " + std::to_string(bytes) +
                                             " bytes exceeds max_frame_bytes " +
                                             std::to_string(limit));
  }
}

void Sender::check_bytes(std::size_t bytes, const PeerLimits& limits) {
  if (bytes > limits.bytes) {
    throw Error(ErrorCode::overloaded, "message of " + std::to_string(bytes) +
                                           " bytes would exceed max_inflight_bytes " +
                                           std::to_string(limits.bytes));
  }
}

void Sender::count(const WorkerInfo& to, const Counted& counted) {
  if (counted.kind == Counted::nothing) return;
  if (counted.kind == Counted::reply) {
    counted.flow->replies.add(counted.bytes);
    return;
  }
  auto& queued = counted.flow->control_bytes;
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
  switch (counted.kind) {
    case Counted::reply:
      counted.flow->replies.written(counted.bytes);
      return;
    case Counted::frame:
      counted.flow->frames.written(counted.bytes);
      return;
    case Counted::control:
      counted.flow->control_bytes.fetch_sub(counted.bytes);
      return;
    case Counted::request:
    case Counted::one_way:
      counted.flow->budget.written(counted.bytes);
      return;
    default:
      return;
  }
}

void Sender::count_unsent(const Counted& counted) noexcept {
  if (counted.kind == Counted::one_way && counted.flow->one_way.failed(counted.bytes))
    counted.flow->budget.give_back(counted.bytes);
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

void Sender::give_up_all() {
  peers_->for_each([](PeerLife& life) { life.flow->give_up(); });
}

void Sender::debug_info(std::map<std::string, std::int64_t>& numbers) const {
  std::map<std::string, std::size_t> all;
  peers_->for_each([&](const PeerLife& life) {
    const PeerFlow& flow = *life.flow;
    const PeerBudget::Numbers budget = flow.budget.numbers();
    const auto add = [&](const char* name, std::size_t number) {
      all[name] += number;
      if (number == 0) return;
      numbers.emplace("rpc.peer." + life.info().name + '.' + name,
                      static_cast<std::int64_t>(number));
    };
    add("calls_sent", budget.calls);
    add("calls_sent_bytes", budget.bytes);
    add("calls_waiting", budget.waiting);
    add("calls_waiting_bytes", budget.waiting_bytes);
    add("calls_unwritten_bytes", budget.unwritten_bytes);
    add("replies_unwritten_bytes", flow.replies.bytes());
    add("gradients_unwritten_bytes", flow.frames.unwritten_bytes());
    add("gradients_waiting", flow.frames.waiting());
    add("gradients_waiting_bytes", flow.frames.waiting_bytes());
    add("calls_held", budget.received_calls);
    add("calls_held_bytes", budget.received_bytes);
    all["control_bytes"] += flow.control_bytes.load();
  });
  const auto total = [&](const char* name, std::size_t value) {
    numbers.emplace(name, static_cast<std::int64_t>(value));
  };
  total("rpc.messages_sent", sent_.load());
  total("rpc.outgoing_bytes", all["calls_unwritten_bytes"] + all["replies_unwritten_bytes"] +
                                  all["gradients_unwritten_bytes"] + all["calls_waiting_bytes"] +
                                  all["gradients_waiting_bytes"]);
  total("rpc.incoming_bytes", all["calls_held_bytes"]);
  total("rpc.calls_waiting", all["calls_waiting"]);
  total("rpc.control_bytes", all["control_bytes"]);
}

}  // namespace stitch::rpc
