#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "stitch/rpc/calls/extension.h"
#include "stitch/rpc/gpu/device_tensors.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/options/options.h"
#include "stitch/rpc/peers/peer_flow.h"
#include "stitch/rpc/peers/peer_table.h"

namespace stitch::rpc {

// Sends the messages of one worker: encodes tensors, shows calls to the extensions, enforces
// the limits of its peer, counts what is in flight and passes it to the peer's connection; what
// waits for a device is passed on later, by another thread. When a request may be sent, its caller
// has asked PeerBudget. Part of its Agent, which every message in flight keeps alive. Thread
// contract: any thread once start() has been called; no lock of its own.
class Sender {
 public:
  enum class Traffic : std::uint8_t {
    request,      // seen by extensions, counted in the peer's budget
    reply,        // seen by extensions, never held back: send_reply()
    error_reply,  // seen by extensions, counted in the peer's control budget
    frame,        // an extension's own frames with data: send_frame()
    control,      // small frames that must arrive, counted in the peer's control budget
  };
  // The budget of each peer for control traffic that waits to be sent: bytes, and
  // kControlFrameCost per frame. A peer that exceeds it is given up.
  static constexpr std::size_t kMaxControlBytes = std::size_t{64} << 20;
  static constexpr std::size_t kControlFrameCost = 512;

  // Keeps references to all of them.
  Sender(const Options& options, const Extensions& extensions, DeviceTensors& device_tensors)
      : options_(options), extensions_(extensions), device_tensors_(device_tensors) {}
  [[nodiscard]] DeviceTensors& device_tensors() noexcept { return device_tensors_; }
  // `owner` holds this; it and `peers` may still have to be started.
  void start(const std::shared_ptr<void>& owner, PeerTable& peers);

  // What is counted of a message.
  struct Counted {
    enum Kind : std::uint8_t {
      nothing,  // a request or a frame that waits
      reply,
      frame,
      control,
      request,
      one_way,  // a request
    };
    PeerFlow* flow = nullptr;
    std::uint64_t bytes : 56 = 0;
    std::uint64_t kind : 7 = nothing;
    std::uint64_t in_sent : 1 = 0;
  };
  // A counted message until finish(). If destroyed before, the message was never sent. Moved, not
  // copied.
  class InFlight {
   public:
    InFlight(std::shared_ptr<Sender> sender, const Counted& counted) noexcept
        : sender_(std::move(sender)), counted_(counted) {}
    InFlight(InFlight&&) noexcept = default;
    InFlight& operator=(InFlight&&) = delete;
    ~InFlight() {
      if (sender_) sender_->count_unsent(counted_);
    }
    // A frame: FrameQueue has counted it.
    void begun() noexcept { counted_.kind = Counted::frame; }
    // A request: PeerBudget has counted it as unwritten.
    void begun(bool one_way) noexcept {
      counted_.kind = one_way ? Counted::one_way : Counted::request;
    }
    [[nodiscard]] const Counted& counted() const noexcept { return counted_; }
    // Returns what keeps the agent alive.
    std::shared_ptr<Sender> finish(const std::optional<Error>& error) noexcept;

   private:
    std::shared_ptr<Sender> sender_;
    Counted counted_;
  };
  // A message laid out for the wire.
  struct LaidOut {
    transport::Message message;
    InFlight in_flight;
    std::unique_ptr<DeviceGate> gate;              // null: it can be sent now
    std::shared_ptr<OutgoingTransfers> transfers;  // begin when it has been sent; null: none
    DepartingAttachments attachments;
  };

  // Lays a message out and counts it; a request or a frame is not counted yet. Its attachments are
  // told when the result is dropped. Throws `out_of_range` or `overloaded` when a limit refuses the
  // message, and what extensions throw; the attachments have then been notified.
  [[nodiscard]] LaidOut lay_out(const WorkerInfo& to, OutMessage& message, Traffic traffic);
  // As lay_out() and transmit().
  template <class Done>
  void send(const WorkerInfo& to, const std::shared_ptr<transport::Connection>& connection,
            OutMessage&& message, Traffic traffic, Done done) {
    transmit(to, connection, lay_out(to, message, traffic), std::move(done));
  }
  // Sends over `connection`, or if null over the peer's. When the transport has completed the
  // message, or dropped it: ends its counting, notifies its attachments, calls `done(error)`.
  template <class Done>
  void transmit(const WorkerInfo& to, const std::shared_ptr<transport::Connection>& connection,
                LaidOut&& out, Done done, std::uint64_t call_id = 0) {
    if (out.gate || out.transfers) [[unlikely]] {
      send_when_open(to, connection, std::move(out), transport::SendDone(std::move(done)), call_id);
      return;
    }
    if (out.attachments.empty()) {
      // For requests this fits into a SendDone without an allocation.
      peers_->send(
          to, connection, std::move(out.message),
          [in_flight = std::move(out.in_flight),
           done = std::move(done)](const std::optional<Error>& error) mutable {
            const auto self = in_flight.finish(error);
            done(error);
          },
          call_id);
      return;
    }
    peers_->send(
        to, connection, std::move(out.message),
        [in_flight = std::move(out.in_flight), attachments = std::move(out.attachments),
         done = std::move(done)](const std::optional<Error>& error) mutable {
          const auto self = in_flight.finish(error);
          attachments.notify(error);
          done(error);
        },
        call_id);
  }
  // The same with a `done` that may be empty; called once unless this throws.
  void send(const WorkerInfo& to, OutMessage&& message, Traffic traffic, transport::SendDone done);
  // A control frame, of which the peer has no need where it is lost or this worker has stopped.
  void send_while_possible(const WorkerInfo& to, OutMessage&& message) noexcept;
  // A frame, which is sent once FrameQueue has room for it. It waits for that in a queue: this
  // thread does not. `done` (may be empty) is called once unless this throws. False: those that
  // wait for that peer exceed half of max_inflight_bytes, this one is kept all the same, and
  // `owner` should make no more until its own are written.
  bool send_frame(const WorkerInfo& to, OutMessage&& message, transport::SendDone done,
                  const void* owner);
  // Drops the frames of `owner` that wait: their `done` gets the error `cancelled`.
  void drop_frames(const void* owner) noexcept;
  // A reply or an error reply.
  void send_reply(const WorkerInfo& to, const std::shared_ptr<transport::Connection>& connection,
                  OutMessage&& message);
  // Answers that call with `error`; closes the connection where that cannot be sent.
  void send_error_reply(const WorkerInfo& to,
                        const std::shared_ptr<transport::Connection>& connection,
                        std::uint64_t call_id, const Error& error) noexcept;
  // A frame of device transfers, in no budget: their protocol bounds how many wait. It counts as no
  // message either, since the message that it belongs to is received after all of them. The peer is
  // given up if it cannot be sent, perhaps at once.
  void send_transfer_frame(const WorkerInfo& to, base::Bytes frame) noexcept;

  // `error`, its text cut to what a frame to `to` may have: that of an exception has any length.
  [[nodiscard]] Error sendable(const WorkerInfo& to, const Error& error);

  // Messages sent or queued, except those of graceful shutdown.
  [[nodiscard]] std::uint64_t sent() const noexcept { return sent_.load(); }
  [[nodiscard]] std::size_t control_bytes(const WorkerInfo& to) const {
    const PeerLife* life = peers_->life(to);
    return life == nullptr ? 0 : life->flow->control_bytes.load();
  }
  // The counts and the queue of one life of a peer; as long as this.
  [[nodiscard]] PeerLife& life(const WorkerInfo& peer) { return peers_->known_life(peer); }
  [[nodiscard]] PeerFlow& flow(const WorkerInfo& peer) { return *life(peer).flow; }
  // As PeerFlow::give_up(), for each.
  void give_up_all();
  void debug_info(std::map<std::string, std::int64_t>& numbers) const;

 private:
  // What the tensors of a message that concerns devices still wait for; both may be null.
  struct DeviceParts {
    std::unique_ptr<DeviceGate> gate;
    std::shared_ptr<OutgoingTransfers> transfers;
  };
  [[nodiscard]] DeviceParts encode_staged(OutMessage& message, const WorkerInfo& to) const;
  void send_when_open(const WorkerInfo& to,
                      const std::shared_ptr<transport::Connection>& connection, LaidOut out,
                      transport::SendDone done, std::uint64_t call_id);
  struct GatedMessage;
  // Its device is done, or has failed with `error`.
  void send_gated(std::shared_ptr<GatedMessage> gated, std::optional<Error> error);
  void give_up_transfers(const WorkerInfo& to, const Error& error) noexcept;
  static void check_frame(std::uint16_t kind, std::size_t bytes, const PeerLimits& limits);
  static void check_bytes(std::size_t bytes, const PeerLimits& limits);
  void count(const WorkerInfo& to, const Counted& counted);
  void end_count(const Counted& counted) noexcept;
  // The same, and takes it out of sent(): graceful shutdown would wait for its arrival.
  void count_unsent(const Counted& counted) noexcept;

  const Options& options_;
  const Extensions& extensions_;
  DeviceTensors& device_tensors_;
  std::weak_ptr<Sender> self_;  // constant after start()
  PeerTable* peers_ = nullptr;  // likewise
  std::atomic<std::uint64_t> sent_{0};
};

}  // namespace stitch::rpc
