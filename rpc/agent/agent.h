#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/base/event_loop.h"
#include "stitch/rpc/agent/dumps.h"
#include "stitch/rpc/calls/agent_state.h"
#include "stitch/rpc/calls/extension.h"
#include "stitch/rpc/calls/outgoing_calls.h"
#include "stitch/rpc/calls/sender.h"
#include "stitch/rpc/calls/served_calls.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/future/thread_pool.h"
#include "stitch/rpc/gpu/device_tensors.h"
#include "stitch/rpc/gpu/device_threads.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/rpc/options/options.h"
#include "stitch/rpc/peers/peer_table.h"
#include "stitch/transport/block_pool.h"
#include "stitch/transport/faults/faults.h"

namespace stitch::rpc {

class GracefulShutdown;
class GatherExchange;
class MembershipService;
struct KnownLife;
struct MemberCard;
struct MembershipHooks;

// One worker: owns its peers, calls, extensions and threads, routes messages between them, and ends
// them in order. Several live in one process, independent of each other. Shared by its Worker and
// by everything in flight; ended by shutdown(). Thread contract: any thread unless said otherwise.
// No lock is held while user code, an extension or the transport is called. Lock order: none;
// every part has at most one lock and calls nothing under it.
class Agent final : public Runtime, public std::enable_shared_from_this<Agent> {
 public:
  // `loop` runs the timers; received tensors are allocated from `receive_pool`. Call start() next.
  Agent(Options options, WorkerInfo self, std::shared_ptr<base::EventLoop> loop,
        std::shared_ptr<transport::BlockPool> receive_pool);
  ~Agent();
  // Makes the members known and begins to serve. `peers` listens already. `rendezvous` is kept
  // until shutdown: the store server that other workers may still be reading from.
  void start(std::unique_ptr<PeerTable> peers, const std::vector<Member>& members,
             std::shared_ptr<void> rendezvous);
  // What the rendezvous knows of the members. Before start().
  void set_membership(MembershipHooks hooks);
  // As MembershipService::admit().
  void admit(const MemberCard& card,
             std::function<void(const std::optional<Error>& refusal, bool here)> done);

  // ---- the world
  [[nodiscard]] const WorkerInfo& self() const noexcept { return self_; }
  [[nodiscard]] const std::string& name() const noexcept override { return self_.name; }
  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] PeerTable& peers() noexcept { return *peers_; }
  [[nodiscard]] std::size_t world_size() const noexcept { return peers_->size(); }
  // The workers that were not declared dead and have not left, as far as this one knows; this
  // worker included, by id. One whose connection to this worker broke is among them until the
  // verdict.
  [[nodiscard]] std::vector<WorkerInfo> live_members() const;
  // The last life of each worker that has been a member, this worker included, by id.
  [[nodiscard]] std::vector<KnownLife> known_lives() const;
  // The number that all workers of one world share. Set before start().
  void set_world(std::uint64_t world) noexcept { world_ = world; }
  [[nodiscard]] std::uint64_t world() const noexcept { return world_; }

  // ---- waiting for answers
  // As Endpoint::help, while calls are outstanding.
  bool help(base::AwaitedFlag& done, Clock::time_point deadline) override;
  // The same, also while none is: for a thread that waits for other messages.
  bool poll(base::AwaitedFlag& done, Clock::time_point deadline);
  // Whether this thread is handling a message of some worker: others wait until it returns.
  [[nodiscard]] static bool delivers_here() noexcept;
  // Runs `task` as if this thread handled no message: what it posts goes to other threads, so that
  // it may wait for that.
  static void outside_delivery(const std::function<void()>& task);

  // ---- for extensions
  // Sends a frame of an extension's own kind that carries data. While those to that peer that are
  // not written take half of max_inflight_bytes it waits in a queue for room, in its order; this
  // thread does not. Throws `overloaded` for one that is larger than that limit by itself. `done`
  // (may be empty) as for Connection::send. False: it is kept, but those that wait exceed half of
  // the limit; `owner` should make no more until `done` has been called for its own.
  bool send_frame(const WorkerInfo& to, OutMessage message, transport::SendDone done = nullptr,
                  const void* owner = nullptr) {
    return sender_.send_frame(to, std::move(message), std::move(done), owner);
  }
  // Drops those of `owner` that wait: their `done` is called with the error `cancelled`.
  void drop_frames(const void* owner) noexcept { sender_.drop_frames(owner); }
  // Sends a small frame that must arrive: max_inflight_bytes does not refuse it. A peer that does
  // not read while Sender::kMaxControlBytes wait for it is given up, and on_peer_lost() is called.
  // So a control frame reaches its peer, or the peer is lost.
  void send_control(const WorkerInfo& to, OutMessage message, transport::SendDone done = nullptr) {
    sender_.send(to, std::move(message), Sender::Traffic::control, std::move(done));
  }
  // The same where nothing waits for the frame once the peer is lost or this worker has stopped.
  void send_while_possible(const WorkerInfo& to, OutMessage message) noexcept {
    sender_.send_while_possible(to, std::move(message));
  }
  // Handles frames of `kind`, on reader threads. Before start(): in the extension's constructor.
  using FrameHandler = std::function<void(InMessage message)>;
  void set_frame_handler(std::uint16_t kind, FrameHandler handler) {
    frame_handlers_.insert_or_assign(kind, std::move(handler));
  }
  [[nodiscard]] Extension& extension(int index) {
    return *extensions_.at(static_cast<std::size_t>(index));
  }
  template <class F>
  void for_each_extension(F&& f) {
    for (const auto& each : extensions_) f(*each);
  }
  void post(base::UniqueFunction<void()> task) override;
  void run_stop(base::UniqueFunction<void()> task) override;
  [[nodiscard]] base::UniqueFunction<void()> call_at(Clock::time_point when,
                                                     base::UniqueFunction<void()> task) override;
  // Runs `task` on the thread that launches work on that device, or as post() where there is none.
  void post_for_device(c10::Device device, base::UniqueFunction<void()> task);
  // As post(), for what a message has brought: the thread that read the message runs `task` itself
  // once it has delivered all messages that have arrived. `task` may block.
  void post_where_read(base::UniqueFunction<void()> task);
  // Runs `task` here under FreshTorchState.
  static void in_fresh_state(const std::function<void()>& task);
  [[nodiscard]] base::EventLoop& loop() noexcept { return *loop_; }
  // Schedules a call that an extension took over: `task` runs on the pool (here for an inline
  // function).
  void dispatch(const std::shared_ptr<IncomingCall>& call, base::UniqueFunction<void()> task) {
    served_calls_.dispatch(call, std::move(task));
  }

  // Faults on purpose, from Options::fault; null for none. Set before start().
  void set_faults(std::shared_ptr<transport::Faults> faults) { faults_ = std::move(faults); }
  [[nodiscard]] const std::shared_ptr<transport::Faults>& faults() const noexcept {
    return faults_;
  }

  // ---- ending
  // This worker was declared dead: all its calls fail with `error` from now on.
  void fence(const Error& error);
  // Shuts down. Graceful: in a fixed world waits until every live worker shuts down too (at most
  // `wait`) and nothing is in flight, in an elastic one until this worker has nothing to do. Then
  // ends everything here within `timeout` and a second; returns the error that made it less than
  // graceful. A second call waits for the end of the first. Throws what why_not_here() returns.
  std::optional<Error> shutdown(bool graceful, std::chrono::nanoseconds timeout,
                                std::optional<std::chrono::nanoseconds> wait = std::nullopt);
  // Why shutdown() must not be called on this thread, for which it would wait; nothing if it may.
  [[nodiscard]] std::optional<Error> why_not_here() const;
  // Whether this thread runs a handler, a continuation or a node of a pass of this worker.
  [[nodiscard]] bool serves_here() const {
    return pool_.on_pool_thread() || device_threads_.on_this_thread();
  }
  [[nodiscard]] bool forked() const noexcept { return state_.forked(); }
  [[nodiscard]] bool stopped() const noexcept { return state_.stopped(); }
  // Whether this worker was declared dead.
  [[nodiscard]] bool fenced() const { return state_.fenced(); }
  // To be called by whatever begins something new; see AgentState.
  void throw_if_stopped() const { state_.throw_if_stopped(); }

  // ---- parts and numbers
  [[nodiscard]] GatherExchange& gather_exchange() noexcept { return *gather_exchange_; }
  [[nodiscard]] Sender& sender() noexcept { return sender_; }
  [[nodiscard]] DeviceTensors& device_tensors() noexcept { return device_tensors_; }
  [[nodiscard]] ServedCalls& served_calls() noexcept { return served_calls_; }
  [[nodiscard]] OutgoingCalls& outgoing_calls() noexcept { return outgoing_calls_; }
  [[nodiscard]] GracefulShutdown& graceful_shutdown() noexcept { return *graceful_shutdown_; }
  [[nodiscard]] ThreadPool& pool() noexcept { return pool_; }
  [[nodiscard]] Dumps& dumps() noexcept { return dumps_; }
  // What this worker has done last; any layer records there.
  [[nodiscard]] base::EventRing& events() const noexcept { return state_.events(); }
  [[nodiscard]] const std::shared_ptr<base::EventRing>& shared_events() const noexcept {
    return state_.shared_events();
  }
  struct Activity {
    std::uint64_t busy = 0;  // calls made, calls being served, operations of extensions
    std::uint64_t sent = 0;  // messages, not counting those of graceful shutdown
    std::uint64_t received = 0;
  };
  [[nodiscard]] Activity activity();
  // Connections, calls and queues as numbers.
  [[nodiscard]] std::map<std::string, std::int64_t> debug_info();

 private:
  // Throws Error(out_of_range).
  void check_frame(std::uint16_t kind, std::size_t bytes, const WorkerInfo& from) const;
  void on_message(const std::shared_ptr<transport::Connection>& connection, const WorkerInfo& from,
                  transport::Message message);
  // A message with tensors on devices: routed once they have arrived.
  void on_device_message(const std::shared_ptr<transport::Connection>& connection,
                         InMessage&& message, std::uint64_t call_id);
  // Whether the reply waits for what its call has queued on a device; then it is moved from.
  bool store_later(const std::shared_ptr<transport::Connection>& connection, InMessage& reply,
                   std::uint64_t call_id);
  void on_arrived(const std::shared_ptr<transport::Connection>& connection, InMessage&& message,
                  std::uint64_t call_id, const std::optional<Error>& failure);
  // The exception that is being handled ends the message's call or its connection.
  void on_failed_message(const std::shared_ptr<transport::Connection>& connection,
                         const WorkerInfo& from, std::uint16_t kind, std::uint64_t call_id);
  void route(const std::shared_ptr<transport::Connection>& connection, InMessage&& message);
  // Fails the call of a message that could not be handled. False if there is none.
  [[nodiscard]] bool fail_call_of(const std::shared_ptr<transport::Connection>& connection,
                                  const WorkerInfo& from, std::uint16_t kind, std::uint64_t call_id,
                                  const Error& error) noexcept;
  void on_peer_lost(const WorkerInfo& peer, const Error& reason);
  // How a call of shutdown() after the first ends.
  std::optional<Error> await_first_shutdown(Clock::time_point deadline);
  // Leaves an elastic world, which goes on.
  std::optional<Error> leave(Clock::time_point deadline);
  // The shutdown has timed out, and this worker ends: before others hear of that, and end calls.
  void dump_shutdown() noexcept;
  void stop_everything(Clock::time_point deadline);
  void report_left_behind(const std::string& what) const;

  const Options options_;
  const WorkerInfo self_;
  AgentState state_{self_};
  std::uint64_t world_ = 0;                    // constant after start()
  std::shared_ptr<transport::Faults> faults_;  // likewise
  const std::shared_ptr<base::EventLoop> loop_;
  const std::shared_ptr<transport::BlockPool> receive_pool_;
  std::unique_ptr<PeerTable> peers_;                      // constant after start()
  std::shared_ptr<void> rendezvous_;                      // until shutdown()
  std::map<std::uint16_t, FrameHandler> frame_handlers_;  // constant after start()
  Extensions extensions_;                                 // constant after construction
  DeviceTensors device_tensors_{self_.name};
  Sender sender_{options_, extensions_, device_tensors_};
  OutgoingCalls outgoing_calls_{options_, state_, extensions_, sender_, pool_};
  ServedCalls served_calls_{
      options_, state_, self_, extensions_, sender_, pool_, "stitch-" + self_.name};
  ThreadPool pool_;
  DeviceThreads device_threads_{self_.name};
  Dumps dumps_{*this};
  std::unique_ptr<GracefulShutdown> graceful_shutdown_;
  std::unique_ptr<GatherExchange> gather_exchange_;
  std::unique_ptr<MembershipService> membership_;
  std::atomic<std::uint64_t> received_{0};  // messages that are work
};

// The worker that serves the call.
[[nodiscard]] inline Agent& agent_of(IncomingCall& call) noexcept {
  return static_cast<Agent&>(call.runtime());
}

}  // namespace stitch::rpc
