#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "stitch/transport/handshaking_connection.h"
#include "stitch/transport/polling/poller.h"
#include "stitch/transport/stream/link.h"
#include "stitch/transport/stream/receive_budget.h"
#include "stitch/transport/stream/record_reader.h"
#include "stitch/transport/stream/stream_sender.h"

namespace stitch::transport {

// A connection over a link, which it is given by begin(): messages as records, the handshake first.
// StreamSender writes; this class reads, and ends the connection.
//
//   waiting --begin()--> running --the link ends, or the peer breaks a rule--> ended
//      \--fail() or close()---------------------------------------------------^
//
// A large message begins when the endpoint's receive budget has room for it. Until then nothing is
// read; nor is it while the owner says so (pause_reading), except for what is left of a peer that
// has gone. A message whose buffers cannot be allocated arrives without them (lacks_buffers()).
//
// Thread contract: as Connection. No lock is held in callbacks.
class StreamConnection final : public HandshakingConnection,
                               public PollSource,
                               private StreamSender::Owner {
 public:
  StreamConnection(const EndpointOptions& options, std::string name, std::optional<Wanted> whom,
                   ConnectionEvents events, std::shared_ptr<base::TaskThread> thread,
                   std::shared_ptr<Poller> poller, std::shared_ptr<ReceiveBudget> budget,
                   base::UniqueFunction<void(const std::shared_ptr<StreamConnection>&)> on_end);

  void send(Message message, SendDone done) override;
  [[nodiscard]] std::string describe() const override { return name_; }
  [[nodiscard]] bool defer(DeferredWork& work) override {
    return poller_->on_this_thread() && poller_->defer(work);
  }
  void blocking_work_done() override { poller_->reclaim(); }
  void trim() noexcept override { sender_.trim(); }
  void pause_reading(bool paused) override;
  [[nodiscard]] bool holds_back() const override {
    return unwatched_.load(std::memory_order_relaxed);
  }

  [[nodiscard]] bool within_host() const override {
    return within_host_.load(std::memory_order_relaxed);
  }

  // Uses `link` from now on. Only drops it when the connection was closed meanwhile.
  void begin(std::unique_ptr<Link> link);
  // There will be no link. Does nothing when the connection was closed meanwhile.
  void fail(const Error& error);
  // The same, because connect() failed with `error`.
  void fail_to_connect(int error);
  [[nodiscard]] bool no_process_listens() const override { return no_process_listens_.load(); }
  // The error of a connection that could not be made: connect to "tcp://..." failed: `error`.
  // `overloaded` if that was for want of something here, else `disconnected`.
  [[nodiscard]] Error connect_error(const Error& error) const;
  // How far the handshake of an accepted one has come.
  using HandshakingConnection::half_open;
  [[nodiscard]] bool has_received_record() const noexcept { return received_record_.load(); }
  // Ends it before it is open and sends the peer the reason. On the thread that polls.
  void drop(const Error& why);

  bool poll() override;
  bool ready(std::uint32_t events) override;
  bool cheap() const noexcept override { return cheap_; }
  [[nodiscard]] bool pending() const noexcept override {
    return sender_.pending() || look_again_.load();
  }
  [[nodiscard]] bool blocked() const noexcept override {
    return sender_.blocked() && !look_again_.load();
  }
  [[nodiscard]] bool moving() const noexcept override {
    return sender_.in_bulk() || reader_.in_bulk();
  }
  bool sleep() override;
  void wake() override;

 protected:
  void transmit_handshake(base::Bytes message) override;
  void protect(const SessionKeys& keys) override;
  void shut() override;
  void finished() override;

 private:
  std::shared_ptr<PollSource> poll_source() override { return self(); }
  Error sending_failed(const std::exception_ptr& problem) override;

  [[nodiscard]] bool nothing_to_do();
  [[nodiscard]] bool admit(std::size_t bytes);
  void insist_later(std::uint64_t wait);
  void read_again() noexcept;
  void watch_reading();
  void end(const Error& error) noexcept;
  void deliver(Message message);
  [[nodiscard]] std::shared_ptr<StreamConnection> self() {
    return std::static_pointer_cast<StreamConnection>(shared_from_this());
  }
  [[nodiscard]] Error translate(const Error& error) const;

  const std::string name_;
  const std::shared_ptr<Poller> poller_;
  const Poller::SourceId source_id_;
  const std::shared_ptr<ReceiveBudget> budget_;
  RecordReader reader_;  // the thread that polls only
  base::UniqueFunction<void(const std::shared_ptr<StreamConnection>&)> on_end_;
  // Constant once running.
  bool cheap_ = false;
  // The thread that polls only.
  Link* link_to_read_ = nullptr;              // null before begin() and after the end
  bool peer_gone_ = false;                    // what is left of it is read in any case
  std::atomic<bool> unwatched_{false};        // nothing is to be read for now; any thread may look
  std::atomic<bool> received_record_{false};  // a record has come
  std::atomic<bool> within_host_{false};      // as the link's
  std::atomic<bool> no_process_listens_{false};  // at the address; before the end
  std::atomic<bool> paused_{false};              // by the owner
  std::atomic<bool> admitted_{false};            // the message that waits may begin
  std::atomic<bool> look_again_{false};          // reading continues: poll() is wanted
  StreamSender sender_;
};

}  // namespace stitch::transport
