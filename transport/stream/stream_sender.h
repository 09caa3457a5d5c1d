#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/transport/polling/poller.h"
#include "stitch/transport/stream/link.h"
#include "stitch/transport/stream/record_reader.h"
#include "stitch/transport/stream/record_writer.h"
#include "stitch/transport/wire/handshake.h"

namespace stitch::transport {

// Decides which thread writes what a stream connection sends, and when. Owns the link.
//
// A message is written on the thread that sends it when nothing is queued before it; what does not
// fit is written by the poller. Over TCP, where every write costs a system call, messages that
// follow each other within microseconds are written together: by the poller, or by the sender as
// soon as it waits for an answer; and while a thread delivers messages, what it sends waits until
// they are delivered. No sender waits for another one: what is sent while a thread writes goes to
// the intake, and that thread writes it too, between the pieces of a large message as well.
//
//   waiting --begin()--> running --end()--> ended
//      \--give_up()--------------------------^
//
// Every send is completed exactly once; in `ended` with the reason. Thread contract: any thread
// unless said otherwise. No lock is held in callbacks. Lock order: write_mutex_ before
// intake_mutex_ and the poller's mutexes.
class StreamSender {
 public:
  using QueuedSend = RecordWriter::QueuedSend;

  class Owner {
   public:
    // What the poller polls; under write_mutex_.
    [[nodiscard]] virtual std::shared_ptr<PollSource> poll_source() = 0;
    // Sending has thrown: closes the connection. Returns the error for its sends.
    virtual Error sending_failed(const std::exception_ptr& problem) = 0;

   protected:
    ~Owner() = default;
  };

  // `owner` and `poller` outlive it; `source_id` is the owner's at the poller.
  StreamSender(Owner& owner, Poller& poller, Poller::SourceId source_id)
      : owner_(owner), poller_(poller), source_id_(source_id) {}

  // Sends over `link` from now on, and stores it in `to_read`. False, and it is dropped, when
  // sending has ended.
  [[nodiscard]] bool begin(std::unique_ptr<Link> link, Link*& to_read)
      STITCH_EXCLUDES(write_mutex_);
  // Whether it was waiting for its link, and has now ended instead.
  [[nodiscard]] bool give_up(const Error& why) STITCH_EXCLUDES(write_mutex_);
  // Seals the link if it is exposed: what is queued now is the end of the handshake, and what
  // `reader` has read ahead is sealed. Returns the link to read from now on; null when it stays as
  // it is. On the thread that polls, within the reader's sink.
  [[nodiscard]] Link* seal(const SessionKeys& keys, Role role, RecordReader& reader)
      STITCH_EXCLUDES(write_mutex_);
  // Ends the stream both ways; it runs until end().
  void close_link() STITCH_EXCLUDES(write_mutex_);

  void send(QueuedSend queued) STITCH_EXCLUDES(write_mutex_, intake_mutex_);
  // Writes what is queued, unless another thread does. True when something moved.
  bool flush() STITCH_EXCLUDES(write_mutex_, intake_mutex_);
  // Has the link give back memory that nothing needs, unless another thread writes.
  void trim() noexcept STITCH_EXCLUDES(write_mutex_, intake_mutex_);
  // Whether something is queued, here or in the link.
  [[nodiscard]] bool pending() const noexcept { return pending_.load(std::memory_order_acquire); }
  // Whether what is pending waits for room.
  [[nodiscard]] bool blocked() const noexcept { return blocked_.load(std::memory_order_acquire); }

  // Whether more than one turn's bytes were waiting at the last flush, and there was room.
  [[nodiscard]] bool in_bulk() const noexcept { return in_bulk_.load(std::memory_order_relaxed); }

  // What is to be done after write_mutex_ has been released.
  struct Completions {
    RecordWriter::Finished finished;
    std::optional<Error> error;  // for `finished`: nothing when they have been sent
    bool poll_soon = false;
    bool moved = false;
    QueuedSend* written = nullptr;  // sent like `finished`; where the sender has it
    std::exception_ptr problem;     // which ends the connection
    std::unique_ptr<Link> link;     // end(): to be destroyed
  };
  // Ends sending. False when it has ended before. The caller passes `completions` to complete()
  // then.
  [[nodiscard]] bool end(const Error& why, Completions& completions) STITCH_EXCLUDES(write_mutex_);
  void complete(Completions& completions) STITCH_EXCLUDES(write_mutex_, intake_mutex_);

 private:
  enum class State : std::uint8_t { waiting, running, ended };

  // Runs `write`, and unlocks; what it throws is the completions' problem.
  template <class Write>
  void locked(Completions& completions, Write&& write) STITCH_RELEASE(write_mutex_);
  [[nodiscard]] bool write_now(QueuedSend& queued) STITCH_EXCLUDES(write_mutex_);
  void write_locked(QueuedSend& queued, Completions& completions) STITCH_REQUIRES(write_mutex_);
  [[nodiscard]] bool should_gather() STITCH_REQUIRES(write_mutex_);
  void flush_or_abandon(Completions& completions) STITCH_REQUIRES(write_mutex_);
  void flush_locked(Completions& completions) STITCH_REQUIRES(write_mutex_);
  [[nodiscard]] bool unsent() const STITCH_REQUIRES(write_mutex_);
  void take_intake() STITCH_REQUIRES(write_mutex_) STITCH_EXCLUDES(intake_mutex_);
  void abandon(Completions& completions) STITCH_REQUIRES(write_mutex_);
  void write_intake() STITCH_EXCLUDES(write_mutex_, intake_mutex_);
  void apply(Completions& completions) STITCH_EXCLUDES(write_mutex_);

  Owner& owner_;
  Poller& poller_;
  const Poller::SourceId source_id_;
  bool cheap_ = false;                // of the link; constant once running
  std::atomic<bool> pending_{false};  // a copy of unsent()
  std::atomic<bool> blocked_{false};  // written under write_mutex_
  std::atomic<bool> in_bulk_{false};  // likewise

  base::Mutex write_mutex_;
  State state_ STITCH_GUARDED_BY(write_mutex_) = State::waiting;
  std::optional<Error> why_ STITCH_GUARDED_BY(write_mutex_);  // it ended
  std::unique_ptr<Link> link_ STITCH_GUARDED_BY(write_mutex_);
  bool sealed_ STITCH_GUARDED_BY(write_mutex_) = false;  // link_ may hold output
  RecordWriter writer_ STITCH_GUARDED_BY(write_mutex_);
  Poller::Clock::time_point last_send_ STITCH_GUARDED_BY(write_mutex_);
  std::size_t gathered_ STITCH_GUARDED_BY(write_mutex_) = 0;  // messages since the last flush

  base::Mutex intake_mutex_;
  // Sent while another thread held write_mutex_.
  std::vector<QueuedSend> intake_ STITCH_GUARDED_BY(intake_mutex_);
  std::atomic<bool> intake_filled_{false};  // a copy of !intake_.empty()
};

}  // namespace stitch::transport
