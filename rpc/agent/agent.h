#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "stitch/base/event_loop.h"
#include "stitch/base/forked.h"
#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/call_table.h"
#include "stitch/rpc/agent/deadline_watch.h"
#include "stitch/rpc/agent/extension.h"
#include "stitch/rpc/agent/peer_table.h"
#include "stitch/rpc/agent/stop_callbacks.h"
#include "stitch/rpc/function/registry.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/future/thread_pool.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/rpc/options/options.h"
#include "stitch/transport/block_pool.h"

namespace stitch::rpc {

class GracefulShutdown;
class GatherExchange;
class IncomingCall;

// One worker's engine: sends calls and frames, receives them, keeps the tables, hosts the
// extensions. Several live in one process, independent of each other. Shared by its Worker and by
// everything in flight; ended by shutdown(). Thread contract: any thread unless said otherwise. No
// lock is held while user code, an extension or the transport is called. Lock order: none; every
// component has one lock and calls nothing under it.
class Agent final : public Runtime, public std::enable_shared_from_this<Agent> {
 public:
  // `loop` runs the timers; `receive_pool` is what received tensors lie in. Call start() next.
  Agent(Options options, WorkerInfo self, std::shared_ptr<base::EventLoop> loop,
        std::shared_ptr<transport::BlockPool> receive_pool);
  ~Agent();
  // Makes the members known and begins to serve. `peers` listens already.
  // `rendezvous` is kept until shutdown: the store server that others may still be reading from.
  void start(std::unique_ptr<PeerTable> peers, const std::vector<Member>& members,
             std::shared_ptr<void> rendezvous);

  // ---- who is here: constant after start()
  [[nodiscard]] const WorkerInfo& self() const noexcept { return self_; }
  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] PeerTable& peers() noexcept { return *peers_; }
  [[nodiscard]] std::size_t world_size() const noexcept { return peers_->size(); }

  // ---- calls
  // Sends a request for `function` whose arguments are in `message` (see begin_request) and calls
  // `pending` exactly once. `timeout` zero: none. A failure to send reaches `pending`, too; only
  // `shutting_down` is thrown. Returns the call's id. `function` is the name of a registered
  // function: it is not copied.
  std::uint64_t start_call(const WorkerInfo& to, std::string_view function,
                           std::chrono::nanoseconds timeout, OutMessage message,
                           std::shared_ptr<PendingCall> pending);
  // One-way: no answer, no pending call.
  void start_notify(const WorkerInfo& to, OutMessage message);
  // Gives up on a call: tells the callee and forgets it. False when it had completed. The pending
  // call hears nothing more.
  bool abandon_call(std::uint64_t call_id);
  // Endpoint::help, unless nothing that was asked for is on its way.
  bool help(const std::atomic<bool>& done, Clock::time_point deadline) override;
  [[nodiscard]] const std::string& name() const noexcept override { return self_.name; }
  // A request message with room for the CallHeader; arguments are appended by an OutArchive over
  // it.
  [[nodiscard]] static OutMessage begin_request(std::uint64_t function_id);
  // What is left for a call made now: the given timeout (or the default) bounded by the deadline
  // this thread runs under.
  [[nodiscard]] std::chrono::nanoseconds effective_timeout(
      std::optional<std::chrono::nanoseconds> timeout) const;

  // ---- for extensions
  // Sends a frame of an extension's own kind that carries data: refused with `overloaded`, thrown,
  // when max_inflight_bytes are on their way. `done` (may be empty) as for Connection::send.
  void send_frame(const WorkerInfo& to, OutMessage message, transport::SendDone done = nullptr);
  // Sends a small frame that others wait for: no limit refuses it. Each peer has a budget of its
  // own for these (kMostControlBytes); a peer that lets more than that pile up is given up, which
  // every extension hears as on_peer_lost(). So a control frame reaches its peer, or the peer is
  // lost.
  void send_control(const WorkerInfo& to, OutMessage message, transport::SendDone done = nullptr);
  // Of control frames that wait to be sent to one peer: their bytes and kControlFrameCost for each.
  static constexpr std::size_t kMostControlBytes = std::size_t{64} << 20;
  static constexpr std::size_t kControlFrameCost = 512;
  // Handles frames of `kind`, on reader threads. Before start(): in the extension's constructor.
  using FrameHandler = std::function<void(InMessage message)>;
  void set_frame_handler(std::uint16_t kind, FrameHandler handler);
  [[nodiscard]] Extension& extension(int index) {
    return *extensions_.at(static_cast<std::size_t>(index));
  }
  template <class F>
  void for_each_extension(F&& f) {
    for (const auto& each : extensions_) f(*each);
  }
  void post(base::UniqueFunction<void()> task) override;
  // Runs `task` here under libtorch's state of a thread that has done nothing: for callbacks that
  // are not to feel the guards of this thread.
  static void in_fresh_state(const std::function<void()>& task);
  [[nodiscard]] base::EventLoop& loop() noexcept { return *loop_; }
  [[nodiscard]] GatherExchange& board() noexcept { return *board_; }
  // Queues a call that an extension took over, to be run by `task` on the pool (or inline for an
  // inline function).
  void dispatch(const std::shared_ptr<IncomingCall>& call, base::UniqueFunction<void()> task);
  // Connections and queues as numbers.
  [[nodiscard]] std::map<std::string, std::int64_t> debug_info();

  // ---- ending
  // Leaves the world. Graceful: first waits until every live worker leaves too and nothing is in
  // flight anywhere. Always ends everything here, by a second after `timeout` whatever its threads
  // do; returns the error that made it less than graceful, if any. A second call waits for the end
  // of the first and does nothing else. Throws what why_not_here() says, and nothing has happened.
  std::optional<Error> shutdown(bool graceful, std::chrono::nanoseconds timeout)
      STITCH_EXCLUDES(ending_mutex_);
  // The error of a shutdown on this thread, which would wait for this thread; nothing where it may
  // be called.
  [[nodiscard]] std::optional<Error> why_not_here() const STITCH_EXCLUDES(ending_mutex_);
  // Whether this thread runs a handler or a continuation of this worker.
  [[nodiscard]] bool serves_here() const noexcept { return pool_.on_pool_thread(); }
  // The number that all workers of one world share. Before start().
  void set_world(std::uint64_t world) noexcept { world_ = world; }
  [[nodiscard]] std::uint64_t world() const noexcept { return world_; }
  // It belongs to the process that this one was forked from: nothing of it works here.
  [[nodiscard]] bool forked() const noexcept { return fork_ != base::fork_count(); }
  [[nodiscard]] bool stopped() const noexcept {
    return stopped_.load(std::memory_order_acquire) || forked();
  }
  // For whatever begins something new. Throws `shutting_down` when this worker has shut down, and
  // once it has begun to on the program's own threads: handlers, continuations and callbacks may go
  // on, which is what leaving waits for. Throws `invalid_argument` in a forked child.
  void throw_if_stopped() const;

  // ---- for IncomingCall and Leave
  // Whether calls wait for a thread.
  [[nodiscard]] bool calls_queued() const { return pool_.queued() > 0; }
  void send_reply(const WorkerInfo& to, const std::shared_ptr<transport::Connection>& connection,
                  OutMessage message);
  void forget(const IncomingCall& call);
  [[nodiscard]] StopCallbacks& stop_callbacks() noexcept { return stop_callbacks_; }
  struct Activity {
    std::uint64_t busy = 0;  // calls made, calls being served, what extensions wait for
    std::uint64_t sent = 0;  // messages, not counting those of shutdown itself
    std::uint64_t received = 0;
  };
  [[nodiscard]] Activity activity();

 private:
  void on_message(const std::shared_ptr<transport::Connection>& connection, const WorkerInfo& from,
                  transport::Message message);
  // Tells whoever waits for a request's or a reply's effect that it could not be handled, for want
  // of memory for example. False when nobody can be told.
  [[nodiscard]] bool report(const std::shared_ptr<transport::Connection>& connection,
                            const WorkerInfo& from, std::uint16_t kind, std::uint64_t call_id,
                            const Error& error) noexcept;
  void on_peer_lost(const WorkerInfo& peer, const Error& reason);
  // Where a caller wants what comes with this reply.
  [[nodiscard]] transport::Buffer place(const WorkerInfo& from, const base::Bytes& frame,
                                        std::size_t bytes) noexcept;
  void on_request(const std::shared_ptr<transport::Connection>& connection, InMessage message);
  void on_answer(InMessage message);
  // Takes the call out of the table, if it is there still, and completes it with the answer.
  void settle_call(std::uint64_t call_id, InMessage& message);
  // Decodes an answer and completes its call with it.
  void settle(const CallTable::Record& record, InMessage& message);
  void on_cancel(InMessage message);
  // Fails the calls whose deadline has passed, and comes again for the next one.
  void expire_calls();
  // Stops the handlers of calls whose deadline has passed: their callers may be unable to.
  void expire_incoming();
  void watch_incoming(Clock::time_point deadline);
  // A request has been written, or never will be.
  void request_done(std::uint64_t call_id, const std::optional<Error>& error);
  [[nodiscard]] std::string timeout_text(const CallTable::Record& record) const;
  void tell_cancelled(const WorkerInfo& to, std::uint64_t call_id) noexcept;
  // What a message counts for while it is on its way out.
  struct Counted {
    std::size_t bytes = 0;
    WorkerId to;
    bool control = false;
    bool tallied = false;  // in sent_: all but the words of leaving
  };
  struct Outgoing {
    transport::Message message;
    Counted counted;
  };
  // Lays `message` out for the wire and counts it until sent() is called. When it throws, its
  // attachments have been told.
  [[nodiscard]] Outgoing lay_out(const WorkerInfo& to, OutMessage& message, bool hooks,
                                 bool control);
  // Throws `overloaded` when `bytes` more do not fit beside `queued`.
  void check_inflight(std::size_t queued, std::size_t bytes) const;
  // Throws when there is no room for it.
  void count(const WorkerInfo& to, const Counted& counted);
  void uncount(const Counted& counted) noexcept;
  // The transport is through with it. A message that never left is not one that the peer will have
  // received: a graceful shutdown would wait for it.
  void sent(const Counted& counted, const std::optional<Error>& error) noexcept;
  // A message that is counted until it is told, or dropped untold, as by an exception: then it
  // never left. Told once; moved, not copied.
  class InFlight {
   public:
    InFlight(std::shared_ptr<Agent> agent, const Counted& counted) noexcept
        : agent_(std::move(agent)), counted_(counted) {}
    InFlight(InFlight&&) noexcept = default;
    InFlight& operator=(InFlight&&) = delete;
    ~InFlight() {
      if (agent_) agent_->uncount_unsent(counted_);
    }
    // Returns the agent that it was counted by.
    std::shared_ptr<Agent> tell(const std::optional<Error>& error) noexcept {
      agent_->sent(counted_, error);
      return std::move(agent_);
    }

   private:
    std::shared_ptr<Agent> agent_;
    Counted counted_;
  };
  void uncount_unsent(const Counted& counted) noexcept;
  void send(const WorkerInfo& to, const std::shared_ptr<transport::Connection>& connection,
            OutMessage message, bool hooks, bool control, transport::SendDone done);
  void fail_call(std::uint64_t call_id, const Error& error, const std::string& what) noexcept;
  void stop_everything(std::chrono::steady_clock::time_point deadline);
  // Closes what has threads; leaves it to end by itself when that takes longer. True when it has
  // ended.
  [[nodiscard]] bool close_until(std::chrono::steady_clock::time_point deadline);

  const Options options_;
  const WorkerInfo self_;
  const std::shared_ptr<base::EventLoop> loop_;
  const std::shared_ptr<transport::BlockPool> receive_pool_;
  std::unique_ptr<PeerTable> peers_;                      // constant after start()
  std::shared_ptr<void> rendezvous_;                      // until shutdown()
  std::map<std::uint16_t, FrameHandler> frame_handlers_;  // likewise
  std::vector<std::unique_ptr<Extension>> extensions_;    // likewise
  CallTable calls_;
  IncomingTable incoming_;
  std::shared_ptr<DeadlineWatch> calls_watch_;     // constant after start()
  std::shared_ptr<DeadlineWatch> incoming_watch_;  // likewise
  ThreadPool pool_;
  StopCallbacks stop_callbacks_;
  std::unique_ptr<GracefulShutdown> leave_;
  std::unique_ptr<GatherExchange> board_;
  const std::uint32_t fork_ = base::fork_count();
  std::uint64_t world_ = 0;           // constant after start()
  std::atomic<bool> leaving_{false};  // shutdown() has begun; set under ending_mutex_
  std::atomic<bool> stopped_{false};
  mutable base::Mutex ending_mutex_;
  base::CondVar ended_changed_;
  bool ended_ STITCH_GUARDED_BY(ending_mutex_) = false;  // shutdown() is over
  std::atomic<std::uint64_t> sent_{0};
  std::atomic<std::uint64_t> received_{0};
  std::atomic<std::uint64_t> decoding_{0};      // answers, on threads that do not read
  std::atomic<std::size_t> outgoing_bytes_{0};  // but for control frames
  std::vector<std::atomic<std::size_t>>
      control_bytes_;  // by peer; the vector: constant after start()
  std::atomic<std::size_t> incoming_bytes_{0};
};

}  // namespace stitch::rpc
