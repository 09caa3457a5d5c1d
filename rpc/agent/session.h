#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/received_numbers.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

// What two lives of workers have to say to each other, over one connection after another: the
// connection that outlives the connections. Messages are numbered and kept until the peer has said
// that it has received them; attach() sends over a new connection what is still kept, in order, and
// receive() tells what has arrived before. So each message is delivered once, unless the session
// ends (PROTOCOL.md, section 6). Small messages and large ones are numbered apart, since small ones
// overtake.
//
// A kept message is held by the session's list and by each transport that is sending it; the
// transport gets the bytes, not the message, and the last holder frees it. Its SendDone runs when a
// connection has passed it on, when the peer says that it has it, or with the error when it never
// will be passed on: once.
//
// The layers above use it as their Connection; PeerTable attaches, detaches and ends it. Thread
// contract: receive() by one thread at a time, the others by any thread. No lock is held while a
// connection or a callback is called. Connections that have been attached are kept until the
// session is destroyed, so that a thread may be using one while another replaces it.
class Session final : public transport::Connection {
 public:
  using ConnectionPtr = std::shared_ptr<transport::Connection>;
  using Received = std::array<std::uint64_t, transport::FrameNumbers::kStreams>;
  struct Events {
    // Whether the call of a request that has not been sent yet is still outstanding.
    std::function<bool(std::uint64_t call_id)> wanted;
    // close() has been called: the peer is to be given up.
    std::function<void(const Error& reason)> on_close;
    // A message waits, and there is no connection.
    std::function<void()> on_unconnected;
  };
  // What keeps its order: as the transports' kSmallMessageBytes and kSmallMessageBuffers.
  static constexpr std::size_t kSmallBytes = std::size_t{32} << 10;
  static constexpr std::size_t kSmallBuffers = 8;
  struct Statistics {
    std::uint64_t reconnects = 0;  // connections after the first
    std::uint64_t resent = 0;      // messages that more than one connection was given
    std::uint64_t duplicates_dropped = 0;
    std::size_t kept_messages = 0;
    std::size_t kept_bytes = 0;
  };

  explicit Session(Events events) : events_(std::move(events)) {}
  ~Session() override;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // ---- sending
  void send(transport::Message message, transport::SendDone done) override {
    send(std::move(message), std::move(done), 0);
  }
  // `call_id` as in PeerTable::send.
  void send(transport::Message message, transport::SendDone done, std::uint64_t call_id)
      STITCH_EXCLUDES(mutex_);

  // ---- receiving: what a bound connection has brought
  enum class Arrival : std::uint8_t { deliver, drop, unnumbered };
  // Throws Error(protocol) for numbers that no session sends.
  [[nodiscard]] Arrival receive(const transport::Message& message) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] Received received() const noexcept {
    return {received_[0].cumulative(), received_[1].cumulative()};
  }
  // Grows with what has been received, and with what the peer has said that it has.
  [[nodiscard]] std::uint64_t progress() const noexcept {
    return received_sum() + acknowledged_[0].load() + acknowledged_[1].load();
  }
  // Tells the peer what has been received unless it knows, and frees what it has received. To be
  // called some time after receive(); acknowledge_later() says once that this is due.
  void acknowledge() STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool acknowledge_later() noexcept {
    return !acknowledging_.load(std::memory_order_relaxed) && !acknowledging_.exchange(true);
  }

  // ---- its connections
  // Sends over `connection` from now on, first what is kept beyond what the peer says it has. Of
  // several, the one with the highest `generation` counts. Throws Error(protocol) when the peer
  // has more than was sent.
  void attach(const ConnectionPtr& connection, std::uint64_t generation,
              const Received& received_by_peer) STITCH_EXCLUDES(mutex_);
  // The connection has ended: what is sent from now on is kept for the next one.
  void detach(const ConnectionPtr& connection) STITCH_EXCLUDES(mutex_);
  // Fails what waits for the first connection; does nothing once there has been one.
  void fail_waiting(const Error& why) STITCH_EXCLUDES(mutex_);
  // Ends the session: what is kept fails with `reason`, what is sent later with `later`.
  void end(const Error& reason, const Error& later) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] Statistics statistics() const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool keeps_something() const STITCH_EXCLUDES(mutex_);

  // ---- as a Connection: those of the connection in use
  [[nodiscard]] const transport::Hello& peer() const override;
  [[nodiscard]] bool defer(base::UniqueFunction<bool(bool here)>& work) override;
  void pause_reading(bool paused) override STITCH_EXCLUDES(mutex_);
  void blocking_work_done() override;
  void close(const Error& reason) override { events_.on_close(reason); }
  [[nodiscard]] std::string describe() const override;

 private:
  static constexpr std::size_t kStreams = transport::FrameNumbers::kStreams;
  // What may be received before the peer is told, if nothing is sent to it: so much is kept there.
  static constexpr std::uint64_t kMaxUntoldMessages = 256;
  static constexpr std::size_t kMaxUntoldBytes = std::size_t{256} << 10;
  // Messages that a peer may leave unacknowledged after they have been passed on, far beyond what a
  // transport holds and kMaxUntoldMessages: it never will.
  static constexpr std::size_t kMaxPassedOn = std::size_t{1} << 19;

  struct Kept;
  struct Stream {
    std::uint64_t last = 0;  // number of the last message
    Kept* first = nullptr;   // of those that are kept, in order
    Kept* newest = nullptr;
    Kept* unsent = nullptr;  // the first that the connection has not got; only while !usable_
  };

  void keep(Kept& kept) STITCH_REQUIRES(mutex_);
  // Takes out what the peer has received; settle() ends it, without the lock.
  [[nodiscard]] Kept* take_acknowledged() STITCH_REQUIRES(mutex_);
  static void settle(Kept* list);
  void free_acknowledged() STITCH_EXCLUDES(mutex_);
  void acknowledged(std::size_t stream, std::uint64_t number) STITCH_EXCLUDES(mutex_);
  void send_kept(std::uint64_t generation) STITCH_EXCLUDES(mutex_);
  void transmit(Kept& kept, transport::Connection& connection);
  void transmitted(Kept& kept, const std::optional<Error>& error) STITCH_EXCLUDES(mutex_);
  // The message will never be sent: its number is sent without it.
  void withdraw(Kept& kept, const Error& why) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool peer_is_silent() const STITCH_REQUIRES(mutex_);
  static void tell(Kept& kept, const std::optional<Error>& error);
  static void release(Kept& kept) noexcept;
  [[nodiscard]] std::uint64_t received_sum() const noexcept {
    return received_[0].cumulative() + received_[1].cumulative();
  }
  void note_untold(std::size_t bytes) STITCH_EXCLUDES(mutex_);

  const Events events_;
  // The receiving thread only, but for cumulative().
  std::array<ReceivedNumbers, kStreams> received_;
  std::size_t untold_bytes_ = 0;
  std::atomic<std::uint64_t> duplicates_{0};
  std::atomic<std::uint64_t> told_{0};  // received_sum() when something was last sent
  std::atomic<bool> acknowledging_{false};
  // Written by the receiving thread, and by attach().
  std::array<std::atomic<std::uint64_t>, kStreams> acknowledged_{};
  // The connection in use, if any: written under mutex_; in used_.
  std::atomic<transport::Connection*> current_{nullptr};

  mutable base::Mutex mutex_;
  std::array<Stream, kStreams> streams_ STITCH_GUARDED_BY(mutex_);
  std::vector<ConnectionPtr> used_ STITCH_GUARDED_BY(mutex_);
  bool usable_ STITCH_GUARDED_BY(mutex_) = false;  // the connection has got all that was kept
  bool paused_ STITCH_GUARDED_BY(mutex_) = false;
  std::uint64_t generation_ STITCH_GUARDED_BY(mutex_) = 0;
  std::optional<Error> ended_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t resent_ STITCH_GUARDED_BY(mutex_) = 0;
  std::size_t kept_messages_ STITCH_GUARDED_BY(mutex_) = 0;
  std::size_t kept_bytes_ STITCH_GUARDED_BY(mutex_) = 0;
};

}  // namespace stitch::rpc
