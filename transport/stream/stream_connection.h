#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/transport/handshaking_connection.h"
#include "stitch/transport/stream/link.h"
#include "stitch/transport/stream/poller.h"
#include "stitch/transport/stream/receive_budget.h"
#include "stitch/transport/stream/record_reader.h"
#include "stitch/transport/stream/record_writer.h"

namespace stitch::transport {

// A connection over a link, which comes when it is there: messages as records, the handshake first.
//
// A message is written on the thread that sends it when nothing is before it; what does not fit is
// written by the poller. Over TCP, where every write costs a system call, messages that follow each
// other within microseconds are written together: by the poller, or by the sender as soon as it
// waits for an answer; and while a thread delivers messages, what it sends waits until they are
// delivered. No sender waits for another one: what is sent while a thread writes goes to the
// intake, and that thread takes it along, between the pieces of a large message too.
//
//   waiting --begin()--> running --the link ends, or breaks a rule--> ended
//      \--fail() or close()--------------------------------------------^
//
// A large message begins when the endpoint's receive budget has room for it. Until then nothing is
// read; nor is it while the owner says so (pause_reading), but for what is left of a peer that has
// gone. Where memory is wanting, the connection ends and nothing else.
//
// Thread contract: as Connection. Lock order: write_mutex_ before intake_mutex_ and the poller's
// mutex_. No lock is held in callbacks.
class StreamConnection final : public HandshakingConnection, public PollSource {
 public:
  StreamConnection(const EndpointOptions& options, std::string name, bool accepted,
                   ConnectionEvents events, std::shared_ptr<base::TaskThread> thread,
                   std::shared_ptr<Poller> poller, std::shared_ptr<ReceiveBudget> budget,
                   base::UniqueFunction<void(const std::shared_ptr<StreamConnection>&)> gone);

  void send(Message message, SendDone done) override;
  [[nodiscard]] std::string describe() const override { return name_; }
  [[nodiscard]] bool defer(base::UniqueFunction<bool(bool here)>& work) override {
    return poller_->on_this_thread() && poller_->defer(work);
  }
  void blocking_work_done() override { poller_->reclaim(); }
  void pause_reading(bool paused) override;

  // The link is there. Does nothing but drop it when the connection was closed meanwhile.
  void begin(std::unique_ptr<Link> link);
  // There will be no link. Does nothing when the connection was closed meanwhile.
  void fail(const Error& error);
  // What a connection that never came about says: connect to "tcp://..." failed: `what`.
  [[nodiscard]] Error connect_error(const std::string& what) const;
  // How far an accepted one has come.
  using HandshakingConnection::half_open;
  [[nodiscard]] bool has_spoken() const noexcept { return spoken_.load(); }
  // Ends it before it is open and tells the peer why. On the thread that polls.
  void drop(const Error& why);

  bool poll() override;
  bool ready(std::uint32_t events) override;
  bool cheap() const noexcept override { return cheap_; }
  [[nodiscard]] bool pending() const noexcept override {
    return pending_.load(std::memory_order_acquire) || look_again_.load();
  }
  [[nodiscard]] bool blocked() const noexcept override {
    return blocked_.load(std::memory_order_acquire) && !look_again_.load();
  }
  bool sleep() override;
  void wake() override;

 protected:
  void transmit_handshake(base::Bytes message) override;
  void protect(const SessionKeys& keys) override;
  void shut() override;
  void finished() override;

 private:
  enum class State : std::uint8_t { waiting, running, ended };
  using Outgoing = RecordWriter::Outgoing;

  void write(Outgoing outgoing) STITCH_EXCLUDES(write_mutex_);
  [[nodiscard]] bool write_now(Outgoing& outgoing) STITCH_EXCLUDES(write_mutex_);
  // Writes what waits, unless another thread does. True when something moved.
  bool flush() STITCH_EXCLUDES(write_mutex_);
  [[nodiscard]] bool gather() STITCH_REQUIRES(write_mutex_);
  // What the holder of write_mutex_ has to do once it has let go of it.
  struct Aftermath {
    RecordWriter::Finished finished;
    std::optional<Error> error;  // what those are told: nothing when they have gone
    bool poll_soon = false;
    bool moved = false;
    std::exception_ptr problem;  // which ends the connection
  };
  void write_locked(Outgoing& outgoing, Aftermath& after) STITCH_REQUIRES(write_mutex_);
  void flush_or_abandon(Aftermath& after) STITCH_REQUIRES(write_mutex_);
  void flush_locked(Aftermath& after) STITCH_REQUIRES(write_mutex_);
  // Whether something waits to be written, here or in the link.
  [[nodiscard]] bool unsent() const STITCH_REQUIRES(write_mutex_);
  void take_in() STITCH_REQUIRES(write_mutex_) STITCH_EXCLUDES(intake_mutex_);
  void abandon(Aftermath& after) STITCH_REQUIRES(write_mutex_);
  void take_along() STITCH_EXCLUDES(write_mutex_, intake_mutex_);
  // Whether the connection was waiting for its link, and has now ended instead.
  [[nodiscard]] bool give_up(const Error& error) STITCH_EXCLUDES(write_mutex_);
  void settle(Aftermath& after);
  [[nodiscard]] bool admit(std::size_t bytes);
  void insist_later(std::uint64_t wait);
  void read_again() noexcept;
  void watch_reading();
  void end(const Error& error) STITCH_EXCLUDES(write_mutex_);
  void deliver(Message message);
  [[nodiscard]] std::shared_ptr<StreamConnection> self() {
    return std::static_pointer_cast<StreamConnection>(shared_from_this());
  }
  [[nodiscard]] Error translate(const Error& error) const;

  const std::string name_;
  const bool accepted_;
  const std::shared_ptr<Poller> poller_;
  const Poller::SourceId source_id_;
  const std::shared_ptr<ReceiveBudget> budget_;
  RecordReader reader_;  // the thread that polls only
  base::UniqueFunction<void(const std::shared_ptr<StreamConnection>&)> gone_;
  bool cheap_ = false;                   // constant once running
  Link* link_to_read_ = nullptr;         // likewise; null before. The thread that polls only
  bool peer_gone_ = false;               // likewise: what is left of it is read in any case
  bool unwatched_ = false;               // likewise: nothing is to be read for now
  std::atomic<bool> spoken_{false};      // a record has come
  std::atomic<bool> paused_{false};      // by the owner
  std::atomic<bool> admitted_{false};    // the message that waits may begin
  std::atomic<bool> look_again_{false};  // reading goes on: poll() is wanted
  std::atomic<bool> pending_{false};     // a copy of unsent()
  std::atomic<bool> blocked_{false};  // what is pending waits for room; written under write_mutex_

  base::Mutex write_mutex_;
  State state_ STITCH_GUARDED_BY(write_mutex_) = State::waiting;
  std::optional<Error> why_ STITCH_GUARDED_BY(write_mutex_);  // it ended
  std::unique_ptr<Link> link_ STITCH_GUARDED_BY(write_mutex_);
  bool sealed_ STITCH_GUARDED_BY(write_mutex_) = false;  // link_ may hold output
  RecordWriter writer_ STITCH_GUARDED_BY(write_mutex_);
  Poller::Clock::time_point last_send_ STITCH_GUARDED_BY(write_mutex_);
  std::size_t gathered_ STITCH_GUARDED_BY(write_mutex_) = 0;  // messages since the last flush

  base::Mutex intake_mutex_;
  std::vector<Outgoing> intake_
      STITCH_GUARDED_BY(intake_mutex_);     // sent while write_mutex_ was held
  std::atomic<bool> intake_filled_{false};  // a copy of !intake_.empty()
};

}  // namespace stitch::transport
