#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>

#include "stitch/base/mutex.h"
#include "stitch/base/task_thread.h"
#include "stitch/transport/endpoint.h"
#include "stitch/transport/wire/handshake.h"

namespace stitch::transport {

// The common part of all endpoints' connections: the handshake, the queue of sends that wait for
// it, and the guarantee that every callback runs exactly once. A concrete connection moves bytes
// and calls start(), received_handshake(), received() and ended(); it implements
// transmit_handshake(), shut() and finished().
//
//   connecting --both accepted--> opening --queue flushed--> open --close() or ended()--> closed
//   connecting --a side refuses--> refusing --the peer has read the refusal, or a timeout--> closed
//
// Invariants:
//   I1  the queue is empty in open, refusing and, once that is told, in closed.
//   I2  a send that is not queued is transmitted only in open, so it never overtakes a queued one.
//   I3  the reason is set once, on leaving connecting, opening or open.
// Thread contract: as Connection; the calls of the reader side are made one at a time. No lock is
// held in callbacks and hooks.
class HandshakingConnection : public Connection,
                              public std::enable_shared_from_this<HandshakingConnection> {
 public:
  [[nodiscard]] const Hello& peer() const override { return handshake_.peer(); }
  [[nodiscard]] std::chrono::steady_clock::time_point heard() const override {
    return std::chrono::steady_clock::time_point(
        std::chrono::steady_clock::duration(heard_.load(std::memory_order_relaxed)));
  }
  void close(const Error& reason) noexcept override;

 protected:
  // Sends one message (no error), or reports to its sender that it will not be sent.
  using Transmit = base::UniqueFunction<void(const std::optional<Error>& error)>;

  // `whom` is whom the connecting side wants; nothing on the accepting side.
  HandshakingConnection(const EndpointOptions& options, std::optional<Wanted> whom,
                        ConnectionEvents events, std::shared_ptr<base::TaskThread> thread);

  // Runs `transmit` now when the connection is open or closed, else once it is.
  void when_open(Transmit transmit);
  // Whether a send would be transmitted without waiting for the handshake.
  [[nodiscard]] bool is_open() const noexcept { return open_.load(std::memory_order_acquire); }
  [[nodiscard]] bool closed() const;
  // Whether it has neither opened nor ended; a refusal may be on its way to the peer.
  [[nodiscard]] bool half_open() const;
  // The reason of its end: set when closed() or refusing.
  [[nodiscard]] std::optional<Error> reason() const;

  // Reader side.
  void note_heard() noexcept;  // something of the peer has arrived
  void start();                // sends our hello and starts the handshake timeout
  [[nodiscard]] bool in_handshake() const noexcept {
    return handshake_.state() != Handshake::State::open;
  }
  // False when the peer keeps sending after it was refused: reading can end.
  [[nodiscard]] bool received_handshake(std::span<const std::byte> message);
  void received(Message message);
  // Sends the peer the reason for which the connection is about to be closed, unless the handshake
  // has ended.
  void turn_away(const Error& why);
  // The owner's memory for a buffer that is sent beside `frame`; an empty Buffer if the owner has
  // no preference.
  [[nodiscard]] Buffer place(const base::Bytes& frame, std::size_t bytes);
  // The last call of the reader side: the stream has ended. `error` is the reason unless there is
  // one already.
  void ended(const Error& error) noexcept;

  // Hooks. shut() ends the stream; later, on any thread, the concrete connection calls ended().
  virtual void transmit_handshake(base::Bytes message) = 0;
  // The handshake has succeeded: everything after its last messages, in both directions, is to be
  // protected where others could read or change it. Before anything else is sent. Reader side.
  virtual void protect(const SessionKeys& keys) {}
  virtual void shut() = 0;
  virtual void finished() = 0;  // on the endpoint's thread, after on_closed

  [[nodiscard]] base::TaskThread& thread() noexcept { return *thread_; }
  [[nodiscard]] Role role() const noexcept { return handshake_.role(); }

 private:
  enum class Stage : std::uint8_t { connecting, opening, open, refusing, closed };

  void open();
  void refuse();
  // Runs it on the endpoint's thread.
  void on_thread(void (HandshakingConnection::*task)());
  void report_unsent() STITCH_EXCLUDES(mutex_);
  // On the endpoint's thread.
  void fail_unsent() STITCH_EXCLUDES(mutex_);
  void tell_ended() STITCH_EXCLUDES(mutex_);
  void expire();

  // Handshake messages that a peer may have sent before it received the refusal.
  static constexpr int kMaxAfterRefusal = 4;
  // For a peer to read the refusal and close.
  static constexpr std::chrono::milliseconds kRefusalTimeout{1000};

  const std::chrono::milliseconds handshake_timeout_;
  const std::shared_ptr<base::TaskThread> thread_;
  // Reader side only; peer() is constant once open.
  Handshake handshake_;
  ConnectionEvents events_;
  int after_refusal_ = 0;  // messages; reader side only

  std::atomic<std::chrono::steady_clock::rep> heard_{0};
  std::atomic<bool> open_{false};  // a copy of stage_ == open: sends need no lock
  mutable base::Mutex mutex_;
  Stage stage_ STITCH_GUARDED_BY(mutex_) = Stage::connecting;
  std::list<Transmit> queue_ STITCH_GUARDED_BY(mutex_);
  std::optional<Error> reason_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport
