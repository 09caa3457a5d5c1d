// Agent: messages that bring tensors to devices. They are routed once these have arrived, and
// answers once these are where their calls want them.
#include <memory>
#include <string>
#include <utility>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

void Agent::on_device_message(const std::shared_ptr<transport::Connection>& connection,
                              InMessage&& message, std::uint64_t call_id) {
  // A request whose tensors are on their way is held here, as one that waits for its turn.
  std::shared_ptr<PeerFlow> held;
  if (message.view.kind() == wire::kRequest) {
    PeerFlow& flow = sender_.flow(message.from);
    const std::size_t bytes = total_bytes(message.raw);
    const auto end = [bytes](PeerFlow* at) { at->end_held(bytes); };
    const char* const exceeded = flow.hold(bytes);
    held = std::shared_ptr<PeerFlow>(&flow, end);
    if (exceeded != nullptr) {
      on_arrived(connection, std::move(message), call_id,
                 Error(ErrorCode::overloaded,
                       std::string("requests whose tensors have not come exceed ") + exceeded));
      return;
    }
  }
  device_tensors_.receive(
      std::move(message), [agent = shared_from_this(), connection, call_id, held = std::move(held)](
                              InMessage&& arrived, const std::optional<Error>& failure) mutable {
        held.reset();  // from here on on_request() counts it
        if (!failure && !arrived.arrival->error && arrived.view.kind() == wire::kReply &&
            agent->store_later(connection, arrived, call_id))
          return;
        agent->on_arrived(connection, std::move(arrived), call_id, failure);
      });
}

std::optional<c10::Stream> OutgoingCalls::store_later(std::uint64_t call_id,
                                                      const InMessage& reply) {
  const auto pending = table_.find(call_id, reply.from);
  return pending ? pending->store_later(reply) : std::nullopt;
}

bool Agent::store_later(const std::shared_ptr<transport::Connection>& connection, InMessage& reply,
                        std::uint64_t call_id) {
  auto gate = std::make_unique<DeviceGate>();
  try {
    const auto stream = outgoing_calls_.store_later(call_id, reply);
    if (!stream) return false;
    for (const auto& tensor : reply.tensors) gate->keep(tensor);
    gate->add(*stream);
  } catch (const std::exception& exception) {
    reply.arrival->error = device_error("its result could not be stored", exception);
    return false;
  }
  device_tensors_.when_open(
      std::move(gate), [agent = shared_from_this(), connection, call_id,
                        message = std::move(reply)](const std::optional<Error>& error) mutable {
        if (error) message.arrival->error = error;
        agent->on_arrived(connection, std::move(message), call_id, std::nullopt);
      });
  return true;
}

void Agent::on_arrived(const std::shared_ptr<transport::Connection>& connection,
                       InMessage&& message, std::uint64_t call_id,
                       const std::optional<Error>& failure) {
  const WorkerInfo from = message.from;
  const std::uint16_t kind = message.view.kind();
  try {
    // Nothing waits any more for what a life that is lost sent, also if its worker is back.
    if (!stopped() && !peers_->lost(from)) {
      if (failure) throw *failure;
      route(connection, std::move(message));
      if (peers_->lost(from)) served_calls_.on_peer_lost(from);  // in the meantime
    }
  } catch (...) {
    on_failed_message(connection, from, kind, call_id);
  }
  // Also if it was dropped; once everything that it starts is counted as busy.
  received_.fetch_add(1);
}

}  // namespace stitch::rpc
