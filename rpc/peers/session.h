#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/rpc/membership/digests.h"
#include "stitch/rpc/message/time_left.h"
#include "stitch/rpc/peers/received_numbers.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

// The messages that Session::awaits() asks about: all, or the large ones, which small messages may
// overtake.
enum class Unacknowledged : std::uint8_t { any, large };

// The exchange of messages between two lives, over one connection after another (rpc/PROTOCOL.md,
// section 6). Messages are numbered, and kept until the peer acknowledges them; attach() sends the
// kept messages over a new connection, and receive() tells repeated messages apart. So each message
// is delivered once, unless the session ends.
//
// The session's list and each transport that is sending a kept message hold it; the last holder
// frees it. A message's SendDone runs once: when a connection has passed the message on, when the
// peer acknowledges it, or with the error when no connection will ever pass it on.
//
// The layers above use a session as their Connection; PeerTable attaches, detaches and ends it.
// Thread contract: receive() by one thread at a time, the other methods by any thread. No lock is
// held while a connection or a callback is called. The session keeps its first connection until its
// own end, so threads that use that connection need not count themselves.
class Session final : public transport::Connection {
 public:
  using ConnectionPtr = std::shared_ptr<transport::Connection>;
  using Received = std::array<std::uint64_t, transport::FrameNumbers::kStreams>;
  struct Events {
    // The deadline of the call whose request has waited, or is sent again: max() for none, nothing
    // for a call that is over.
    std::function<std::optional<std::chrono::steady_clock::time_point>(std::uint64_t call_id)>
        deadline;
    // A layer above has called close(): the peer is to be given up.
    std::function<void(const Error& reason)> on_close;
    // A message waits while the session has no connection.
    std::function<void()> on_unconnected;
  };
  // Small messages keep their order: the transports' kSmallMessageBytes and kSmallMessageBuffers.
  static constexpr std::size_t kSmallBytes = std::size_t{32} << 10;
  static constexpr std::size_t kSmallBuffers = 8;
  struct Statistics {
    std::uint64_t reconnects = 0;  // connections after the first
    std::uint64_t resent = 0;      // messages that went to more than one connection
    std::uint64_t duplicates_dropped = 0;
    std::size_t kept_messages = 0;
    std::size_t kept_bytes = 0;
    std::uint64_t sent = 0;  // messages, each counted once
    std::uint64_t sent_bytes = 0;
    std::uint64_t received = 0;
    std::uint64_t received_bytes = 0;
  };

  // A peer that leaves more than `max_passed_on_bytes` unacknowledged is given up. This limit must
  // exceed the transports' buffers plus the receiver's acknowledgment threshold,
  // `max_untold_bytes`.
  explicit Session(Events events, std::size_t max_passed_on_bytes = std::size_t{64} << 20,
                   std::size_t max_untold_bytes = std::size_t{1} << 20)
      : events_(std::move(events)),
        max_passed_on_bytes_(max_passed_on_bytes),
        max_untold_bytes_(max_untold_bytes) {}
  ~Session() override;

  // ---- sending
  void send(transport::Message message, transport::SendDone done) override {
    send(std::move(message), std::move(done), 0);
  }
  // `call_id` as in PeerTable::send.
  void send(transport::Message message, transport::SendDone done, std::uint64_t call_id)
      STITCH_EXCLUDES(mutex_);

  // ---- receiving, from a bound connection
  enum class Arrival : std::uint8_t { deliver, drop, unnumbered };
  // Throws Error(protocol) for numbers that no session sends.
  [[nodiscard]] Arrival receive(const transport::Message& message) STITCH_EXCLUDES(mutex_);
  // The frame of a large message has arrived, its buffers have not: frees the messages that the
  // frame acknowledges, so that the buffers get memory that is still in the processor's cache.
  void acknowledged_ahead(const base::Bytes& frame) noexcept STITCH_EXCLUDES(mutex_);
  // The message is delivered or dropped: acknowledges when the last acknowledgment is long ago.
  // True when acknowledge_now() has to be called some time later.
  [[nodiscard]] bool received_one() STITCH_EXCLUDES(mutex_);
  [[nodiscard]] Received received() const noexcept {
    return {received_[0].cumulative(), received_[1].cumulative()};
  }
  // A number that grows with every message received and every message acknowledged.
  [[nodiscard]] std::uint64_t progress() const noexcept {
    return received_sum() + acknowledged_[0].load() + acknowledged_[1].load();
  }
  // The later call that received_one() asks for: acknowledges the messages received unless the peer
  // knows of them, and frees the messages that the peer has acknowledged.
  void acknowledge_now() STITCH_EXCLUDES(mutex_) {
    acknowledging_.store(false);
    acknowledge();
  }
  // Sends HEARTBEAT with these digests over the connection in use, unless the previous HEARTBEAT is
  // still unwritten. Runs no callback of other messages.
  void beat(const Digests& digests) noexcept STITCH_EXCLUDES(mutex_);

  // ---- its connections
  // Sends over `connection` from now on, first the kept messages beyond `received_by_peer`. The
  // connection with the highest `generation` (from 1) counts. Throws Error(protocol) when the peer
  // acknowledges more than was sent.
  void attach(const ConnectionPtr& connection, std::uint64_t generation,
              const Received& received_by_peer) STITCH_EXCLUDES(mutex_);
  // The connection has ended: messages sent from now on wait for the next connection.
  void detach(const ConnectionPtr& connection) STITCH_EXCLUDES(mutex_);
  // Fails the messages that wait for the first connection; does nothing after that connection.
  void fail_waiting(const Error& why) STITCH_EXCLUDES(mutex_);
  // Ends the session: kept messages fail with `reason`, messages sent later with `later`.
  void end(const Error& reason, const Error& later) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] Statistics statistics() const STITCH_EXCLUDES(mutex_);
  // Whether the peer has not acknowledged a message of this kind.
  [[nodiscard]] bool awaits(Unacknowledged what) const STITCH_EXCLUDES(mutex_);

  // ---- as a Connection: forwarded to the connection in use
  // The hello of the first connection; the peer says the same over each.
  [[nodiscard]] const transport::Hello& peer() const override STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool defer(transport::DeferredWork& work) override STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool within_host() const override {
    return within_host_.load(std::memory_order_relaxed);
  }
  void blocking_work_done() override STITCH_EXCLUDES(mutex_);
  void close(const Error& reason) override { events_.on_close(reason); }
  [[nodiscard]] std::string describe() const override STITCH_EXCLUDES(mutex_);

 private:
  static constexpr std::size_t kStreams = transport::FrameNumbers::kStreams;
  // Messages received before an acknowledgment of its own; the peer keeps as many.
  static constexpr std::uint64_t kMaxUntoldMessages = 256;
  // Messages that a peer may leave unacknowledged: far more than a transport holds and
  // kMaxUntoldMessages. A peer beyond this limit does not acknowledge at all.
  static constexpr std::size_t kMaxPassedOn = std::size_t{1} << 18;

  struct KeptMessage;
  struct Stream {
    std::uint64_t last = 0;        // number of the last message
    KeptMessage* first = nullptr;  // of those that are kept, in order
    KeptMessage* newest = nullptr;
    KeptMessage* unsent =
        nullptr;  // the first that the connection has not got; only while !usable_
  };

  void keep(KeptMessage& kept) STITCH_REQUIRES(mutex_);
  // Whether the list has this message: the peer has not acknowledged it.
  [[nodiscard]] bool lists(const KeptMessage& kept) const STITCH_REQUIRES(mutex_);
  // The connection that is attached; `alive` keeps it where the session itself does not.
  [[nodiscard]] transport::Connection* in_use(ConnectionPtr& alive) const STITCH_REQUIRES(mutex_) {
    if (current_ != first_) alive = current_;
    return current_.get();
  }
  [[nodiscard]] ConnectionPtr current() const STITCH_EXCLUDES(mutex_);
  // Takes all messages out of the list.
  [[nodiscard]] KeptMessage* take_all() STITCH_REQUIRES(mutex_);
  // Takes the acknowledged messages out of the list; complete_all() ends them, without the lock.
  [[nodiscard]] KeptMessage* take_acknowledged() STITCH_REQUIRES(mutex_);
  void complete_all(KeptMessage* list) STITCH_EXCLUDES(mutex_);
  void free_acknowledged() STITCH_EXCLUDES(mutex_);
  void acknowledged(std::size_t stream, std::uint64_t number) STITCH_EXCLUDES(mutex_);
  void acknowledge() STITCH_EXCLUDES(mutex_);
  void acknowledgment_sent() STITCH_EXCLUDES(mutex_);
  void send_kept(std::uint64_t generation) STITCH_EXCLUDES(mutex_);
  void transmit(KeptMessage& kept, transport::Connection& connection);
  // `frame` has the bytes of its frame.
  void transmit(KeptMessage& kept, base::Bytes frame, transport::Connection& connection);
  // Writes the time that the call has left into a request that has waited or is sent again. A
  // request whose call is over is withdrawn if no connection has had it. Otherwise the peer may
  // have it, and needs the sections that layers above have added.
  void transmit_request(KeptMessage& kept, bool first, transport::Connection& connection)
      STITCH_EXCLUDES(mutex_);
  // False, and nothing has changed, when another thread may read the message. REQUIRES: the caller
  // is a holder.
  [[nodiscard]] bool change_time_left(KeptMessage& kept, const TimeLeft& time)
      STITCH_EXCLUDES(mutex_);
  void transmitted(KeptMessage& kept, const std::optional<Error>& error) STITCH_EXCLUDES(mutex_);
  // A connection refuses this message: an empty frame with its number takes its place. The peer is
  // given up when another connection has passed the message on, or may.
  void refused(KeptMessage& kept, const Error& why) STITCH_EXCLUDES(mutex_);
  // Puts `skip` in the place of a message that no connection will send. False, and nothing has
  // changed, when another connection holds the message. REQUIRES: the caller is a holder.
  [[nodiscard]] bool replace(KeptMessage& kept, transport::Message& skip) STITCH_REQUIRES(mutex_);
  void withdraw_unwanted(KeptMessage& kept) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] static transport::Message empty_frame(std::uint16_t kind);
  [[nodiscard]] bool peer_is_silent() STITCH_REQUIRES(mutex_);
  static void complete(KeptMessage& kept, const std::optional<Error>& error);
  // One holder less. The last holder of a message without an outcome completes it with the end of
  // the session.
  void release(KeptMessage& kept) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::uint64_t received_sum() const noexcept {
    return received_[0].cumulative() + received_[1].cumulative();
  }

  const Events events_;
  const std::size_t max_passed_on_bytes_;
  const std::size_t max_untold_bytes_;

  // Written by the receiving thread, read by sending threads; acknowledged_ also by attach().
  alignas(64) std::array<ReceivedNumbers, kStreams> received_;
  std::array<std::atomic<std::uint64_t>, kStreams> acknowledged_{};
  // The receiving thread only.
  std::size_t untold_bytes_ = 0;
  bool acknowledgment_due_ = false;  // the last message had a number
  std::atomic<std::uint64_t> duplicates_{0};
  std::atomic<bool> beat_under_way_{false};       // HEARTBEAT is with a transport
  std::atomic<std::uint64_t> received_bytes_{0};  // written by the receiving thread only
  // The call of acknowledge_now() is to come.
  std::atomic<bool> acknowledging_{false};

  // Written by sending threads, under mutex_, read by the receiving thread.
  alignas(64) std::atomic<std::uint64_t> told_{0};  // received_sum() when something was last sent
  std::array<std::atomic<std::uint64_t>, kStreams> last_sent_{};  // numbers

  // The first connection while it is in use, for threads that take no lock.
  alignas(64) std::atomic<transport::Connection*> first_in_use_{nullptr};
  std::atomic<bool> within_host_{false};  // of the connection that was attached last
  mutable base::Mutex mutex_;
  std::array<Stream, kStreams> streams_ STITCH_GUARDED_BY(mutex_);
  bool usable_ STITCH_GUARDED_BY(mutex_) = false;  // the connection has got all that was kept
  std::size_t kept_messages_ STITCH_GUARDED_BY(mutex_) = 0;
  std::size_t kept_bytes_ STITCH_GUARDED_BY(mutex_) = 0;
  std::uint64_t sent_bytes_ STITCH_GUARDED_BY(mutex_) = 0;
  // Counts of kept messages at which peer_is_silent() looks at the acknowledgments again.
  std::size_t look_at_messages_ STITCH_GUARDED_BY(mutex_) = kMaxPassedOn;
  std::size_t look_at_bytes_ STITCH_GUARDED_BY(mutex_) = max_passed_on_bytes_;
  ConnectionPtr first_ STITCH_GUARDED_BY(mutex_);    // constant once set
  ConnectionPtr current_ STITCH_GUARDED_BY(mutex_);  // the one in use, if any
  std::uint64_t generation_ STITCH_GUARDED_BY(mutex_) = 0;
  // RECEIVED is with a transport, and another one is due.
  bool received_under_way_ STITCH_GUARDED_BY(mutex_) = false;
  bool received_again_ STITCH_GUARDED_BY(mutex_) = false;
  std::optional<Error> ended_ STITCH_GUARDED_BY(mutex_);  // for what is sent later
  std::optional<Error> end_reason_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t connections_ STITCH_GUARDED_BY(mutex_) = 0;
  std::uint64_t resent_ STITCH_GUARDED_BY(mutex_) = 0;
};

}  // namespace stitch::rpc
