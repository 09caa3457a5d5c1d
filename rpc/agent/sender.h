#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/rpc/agent/extension.h"
#include "stitch/rpc/agent/peer_table.h"
#include "stitch/rpc/gpu/device_tensors.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/options/options.h"

namespace stitch::rpc {

// Sends the messages of one worker: encodes tensors, shows calls to the extensions, enforces
// max_frame_bytes and the two budgets below, counts what is in flight and passes it to the peer's
// connection; what waits for a device is passed on later, by another thread. Part of its Agent,
// which every message in flight keeps alive. Thread contract: any thread once start() has been
// called; no lock of its own.
class Sender {
 public:
  enum class Traffic : std::uint8_t {
    call,         // requests and replies: seen by extensions, counted in max_inflight_bytes
    error_reply,  // seen by extensions, counted in the peer's control budget
    frame,        // an extension's own frames with data, counted in max_inflight_bytes
    control,      // small frames that must arrive, counted in the peer's control budget
  };
  // The budget of each peer for control traffic that waits to be sent: bytes, and
  // kControlFrameCost per frame. A peer that exceeds it is given up.
  static constexpr std::size_t kMaxControlBytes = std::size_t{64} << 20;
  static constexpr std::size_t kControlFrameCost = 512;

  // Keeps references to all of them.
  Sender(const Options& options, const Extensions& extensions, DeviceTensors& device_tensors)
      : options_(options), extensions_(extensions), device_tensors_(device_tensors) {}
  // `owner` holds this; it and `peers` may still have to be started.
  void start(const std::shared_ptr<void>& owner, PeerTable& peers);

  // Sends over `connection`, or if null over the peer's. When the transport has completed the
  // message, or dropped it: ends its counting, notifies its attachments, calls `done(error)`.
  // Throws `out_of_range` or `overloaded` when a limit refuses the message, and what extensions
  // throw; the attachments have then been notified, and `done` is not called.
  template <class Done>
  void send(const WorkerInfo& to, const std::shared_ptr<transport::Connection>& connection,
            OutMessage&& message, Traffic traffic, Done done, std::uint64_t call_id = 0) {
    LaidOut out = lay_out(to, message, traffic);
    InFlight in_flight(std::shared_ptr<Sender>(self_), out.counted);
    if (out.gate) [[unlikely]] {
      send_when_open(to, connection, std::move(out), std::move(in_flight),
                     DepartingAttachments(std::move(message.attachments)),
                     transport::SendDone(std::move(done)), call_id);
      return;
    }
    if (message.attachments.empty()) {
      // For requests this fits into a SendDone without an allocation.
      peers_->send(
          to, connection, std::move(out.message),
          [in_flight = std::move(in_flight),
           done = std::move(done)](const std::optional<Error>& error) mutable {
            const auto self = in_flight.finish(error);
            done(error);
          },
          call_id);
      return;
    }
    peers_->send(
        to, connection, std::move(out.message),
        [in_flight = std::move(in_flight),
         attachments = DepartingAttachments(std::move(message.attachments)),
         done = std::move(done)](const std::optional<Error>& error) mutable {
          const auto self = in_flight.finish(error);
          attachments.tell(error);
          done(error);
        },
        call_id);
  }
  // The same with a `done` that may be empty.
  void send(const WorkerInfo& to, OutMessage&& message, Traffic traffic, transport::SendDone done);
  // A reply or an error reply.
  void send_reply(const WorkerInfo& to, const std::shared_ptr<transport::Connection>& connection,
                  OutMessage&& message);

  // Messages sent or queued, except those of graceful shutdown.
  [[nodiscard]] std::uint64_t sent() const noexcept { return sent_.load(); }
  [[nodiscard]] std::size_t control_bytes(const WorkerInfo& to) const {
    const Life* life = peers_->life(to);
    return life == nullptr ? 0 : life->control_bytes.load();
  }
  void debug_info(std::map<std::string, std::int64_t>& numbers) const;

 private:
  struct Counted {
    std::size_t bytes = 0;
    Life* to = nullptr;  // whose control_bytes it is in; null: in outgoing_bytes_
    bool in_sent = false;
  };
  struct LaidOut {
    transport::Message message;
    Counted counted;
    std::unique_ptr<DeviceGate> gate{};  // null: it can be sent now
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
    // Returns what keeps the agent alive.
    std::shared_ptr<Sender> finish(const std::optional<Error>& error) noexcept;

   private:
    std::shared_ptr<Sender> sender_;
    Counted counted_;
  };
  // Lays the message out for the wire and counts it.
  [[nodiscard]] LaidOut lay_out(const WorkerInfo& to, OutMessage& message, Traffic traffic);
  // The tensors of the message, which concern devices.
  [[nodiscard]] std::unique_ptr<DeviceGate> encode_staged(OutMessage& message,
                                                          const WorkerInfo& to) const;
  void send_when_open(const WorkerInfo& to,
                      const std::shared_ptr<transport::Connection>& connection, LaidOut out,
                      InFlight in_flight, DepartingAttachments attachments,
                      transport::SendDone done, std::uint64_t call_id);
  // Answers a call with `error` in place of a reply that could not be made.
  void send_error_reply(const WorkerInfo& to,
                        const std::shared_ptr<transport::Connection>& connection,
                        std::uint64_t call_id, const Error& error) noexcept;
  void check_frame(std::size_t bytes) const;
  void check_inflight(std::size_t queued, std::size_t bytes) const;
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
  std::atomic<std::size_t> outgoing_bytes_{0};
};

}  // namespace stitch::rpc
