#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/calls/agent_state.h"
#include "stitch/rpc/calls/deadline_watch.h"
#include "stitch/rpc/calls/extension.h"
#include "stitch/rpc/calls/incoming_call.h"
#include "stitch/rpc/calls/incoming_table.h"
#include "stitch/rpc/calls/sender.h"
#include "stitch/rpc/calls/stop_callbacks.h"
#include "stitch/rpc/future/thread_pool.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/options/options.h"

namespace stitch::rpc {

// The calls of peers that one worker serves: accepts or refuses requests, schedules their handlers
// on the user-function threads, stops handlers that were cancelled, whose deadline has passed or
// whose caller is lost. Part of its Agent, the `runtime` that every IncomingCall keeps alive.
// Thread contract: any thread once start() has been called. Messages come on reader threads.
class ServedCalls {
 public:
  // Keeps references to all but the last.
  ServedCalls(const Options& options, const AgentState& state, const WorkerInfo& self,
              const Extensions& extensions, Sender& sender, ThreadPool& pool,
              std::string thread_name);
  // `runtime` holds this.
  void start(const std::shared_ptr<Runtime>& runtime, const std::shared_ptr<base::EventLoop>& loop);

  // ---- messages of callers
  void on_request(const std::shared_ptr<transport::Connection>& connection, InMessage&& message);
  void on_cancel(const InMessage& message);
  // A request could not be handled: the caller gets `error`.
  void refuse(const std::shared_ptr<transport::Connection>& connection, const WorkerInfo& from,
              std::uint64_t call_id, const Error& error);
  void on_peer_lost(const WorkerInfo& peer);
  // A peer asks for the room that its one-way requests have taken, or what a call waits for.
  void on_ask_room(const InMessage& message);

  // ---- beginning to serve
  // Begins the calls that wait for this, in their order; the next ones begin as they come.
  void serve() STITCH_EXCLUDES(mutex_);
  // Refuses the calls that wait for serve(), and later ones. Without effect once that was called.
  void never_serve() STITCH_EXCLUDES(mutex_);

  // ---- running calls
  // Queues `task` on the pool, or runs it here for an inline function. Fails the call when the pool
  // has closed.
  void dispatch(const std::shared_ptr<IncomingCall>& call, base::UniqueFunction<void()> task);
  // The call is being destroyed.
  void forget(const IncomingCall& call);
  // Whether handlers wait for a thread.
  [[nodiscard]] bool queued() const { return pool_.queued() > 0; }
  [[nodiscard]] StopCallbacks& stop_callbacks() noexcept { return stop_callbacks_; }
  [[nodiscard]] bool on_stop_callback_thread() const { return stop_callbacks_.on_this_thread(); }
  // Requests stop of every handler.
  void stop_all();

  // ---- the worker, for its calls
  [[nodiscard]] const AgentState& state() const noexcept { return state_; }
  [[nodiscard]] const WorkerInfo& self() const noexcept { return self_; }
  [[nodiscard]] const Extensions& extensions() const noexcept { return extensions_; }
  [[nodiscard]] Sender& sender() noexcept { return sender_; }
  [[nodiscard]] DeviceTensors& device_tensors() noexcept { return sender_.device_tensors(); }

  // ---- what is pending
  [[nodiscard]] std::size_t size() const { return table_.size(); }
  [[nodiscard]] std::vector<std::shared_ptr<IncomingCall>> list() const {
    return table_.list(std::nullopt);
  }
  // Calls that were not asked to stop; the callers of the others have given up.
  [[nodiscard]] std::uint64_t busy() const;
  // "f(), g()": the functions being run.
  [[nodiscard]] std::string running() const;

 private:
  // Why a request cannot be served; nothing if it can.
  [[nodiscard]] std::optional<Error> refusal(const IncomingCall& call, const char* exceeded) const;
  // Whether the call is kept for serve(), or refused.
  [[nodiscard]] bool waits_to_begin(const std::shared_ptr<IncomingCall>& call)
      STITCH_EXCLUDES(mutex_);
  // Gives the call to an extension or to the pool.
  void begin(const std::shared_ptr<IncomingCall>& call);
  // Runs a call whose turn has come, or keeps it while its caller does not read what it has asked
  // for.
  void run(const std::shared_ptr<IncomingCall>& call);
  void give_room(const WorkerInfo& to, const OneWayCredits::Handled& handled) noexcept;
  // " behind f() (running 5.2 s on 2 of 2 threads)": the functions that hold threads, the longest
  // first; empty where none does. What was found within the last kAgain is said again: many calls
  // that end together have one reason. On the event loop.
  [[nodiscard]] const std::string& holders(Clock::time_point now);
  static constexpr std::chrono::milliseconds kAgain{100};
  // Answers the calls whose deadline has passed with where they are, and stops their handlers. On
  // the event loop.
  void expire();
  void watch(Clock::time_point deadline);

  const AgentState& state_;
  const WorkerInfo& self_;
  const Extensions& extensions_;
  Sender& sender_;
  ThreadPool& pool_;
  StopCallbacks stop_callbacks_;
  std::weak_ptr<Runtime> runtime_;        // constant after start()
  std::shared_ptr<DeadlineWatch> watch_;  // likewise
  IncomingTable table_;
  enum class Serving : std::uint8_t { not_yet, yes, never };
  std::atomic<Serving> serving_;  // changed under mutex_
  base::Mutex mutex_;
  std::vector<std::shared_ptr<IncomingCall>> waiting_ STITCH_GUARDED_BY(mutex_);  // for serve()
  // The event loop's.
  std::string holders_;
  Clock::time_point holders_found_{};
};

}  // namespace stitch::rpc
