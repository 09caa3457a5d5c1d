// Agent: messages that bring tensors to devices. They are routed once these have arrived, and
// answers once these are where their calls want them.
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

namespace {

// Increments a counter at the end of a block.
class CountedAtEnd {
 public:
  explicit CountedAtEnd(std::atomic<std::uint64_t>& count) noexcept : count_(count) {}
  ~CountedAtEnd() { count_.fetch_add(1); }
  CountedAtEnd(const CountedAtEnd&) = delete;
  CountedAtEnd& operator=(const CountedAtEnd&) = delete;

 private:
  std::atomic<std::uint64_t>& count_;
};

}  // namespace

void Agent::on_device_message(const std::shared_ptr<transport::Connection>& connection,
                              InMessage&& incoming, std::uint64_t call_id) {
  const auto message = std::make_shared<InMessage>(std::move(incoming));
  DeviceTensors::Announced transfers;
  std::size_t bytes = total_bytes(message->raw);
  const auto read = Clock::now();
  std::optional<Error> failure;
  try {
    transfers = device_tensors_.announced(*message);
    if (message->arrival) throw *message->arrival->error;  // its buffers are missing
    // What waits for its tensors is held here, as a request that waits for its turn.
    std::shared_ptr<PeerFlow> held;
    const char* exceeded = nullptr;
    PeerFlow& flow = sender_.flow(message->from);
    if (message->view.kind() == wire::kRequest) {
      bytes = flow.counted(bytes, transfers ? transfers->bytes() : 0);
      const auto end = [bytes](PeerFlow* at) { at->budget.end_held(bytes); };
      exceeded = flow.budget.hold(bytes);
      held = std::shared_ptr<PeerFlow>(&flow, end);
    } else if (transfers && message->view.kind() != wire::kReply) {
      bytes = flow.counted_data(bytes, transfers->bytes());
      const auto end = [bytes](PeerFlow* at) { at->end_held_data(bytes); };
      exceeded = flow.hold_data(bytes) ? nullptr : PeerBudget::kBytesName;
      held = std::shared_ptr<PeerFlow>(&flow, end);
    }
    if (exceeded != nullptr)
      throw Error(ErrorCode::overloaded,
                  std::string("messages whose tensors have not come exceed ") + exceeded);
    if (message->view.kind() == wire::kReply && !outgoing_calls_.awaits(call_id, message->from))
      throw Error(ErrorCode::cancelled, "no call waits for this result");
    device_tensors_.receive(
        message, transfers,
        [agent = shared_from_this(), connection, call_id, bytes, read, held = std::move(held)](
            InMessage&& arrived, const std::optional<Error>& why) mutable {
          held.reset();  // from here on on_request() counts it
          if (arrived.arrival) arrived.arrival->bytes = bytes;
          if (arrived.arrival) arrived.arrival->read = read;
          if (!why && !arrived.arrival->error && arrived.view.kind() == wire::kReply &&
              agent->store_later(connection, arrived, call_id))
            return;
          agent->on_arrived(connection, std::move(arrived), call_id, why);
        });
    return;
  } catch (...) {
    failure = to_error(std::current_exception());
  }
  // One that makes sense is routed without its tensors, as when a device has no memory for them:
  // so what else it brings is taken note of, and its call gets the error.
  if (failure->code() != ErrorCode::protocol) {
    try {
      device_tensors_.refuse_transfers(message->from, transfers, *failure);
      message->tensors.clear();
      message->arrival = std::make_unique<Arrival>();
      message->arrival->error = failure;
      message->arrival->bytes = bytes;
      message->arrival->read = read;
      failure.reset();
    } catch (...) {
      failure = to_error(std::current_exception());
    }
  }
  on_arrived(connection, std::move(*message), call_id, failure);
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
  // Its sender may leave as soon as it hears of the arrival, and then nothing waits any more for
  // what it has sent: so that is after the message has been routed.
  std::shared_ptr<void> acknowledgment;
  if (message.arrival) acknowledgment = std::move(message.arrival->acknowledgment);
  // Also if it was dropped; once everything that it starts is counted as busy.
  const CountedAtEnd received(received_);
  try {
    // Nothing waits any more for what a life that is lost sent, also if its worker is back.
    if (!stopped() && !peers_->lost(from)) {
      if (failure) throw *failure;
      route(connection, std::move(message));
    }
  } catch (...) {
    try {
      on_failed_message(connection, from, kind, call_id);
    } catch (...) {
      // Without memory for an error: what waits for the message ends at its deadline.
    }
  }
}

}  // namespace stitch::rpc
