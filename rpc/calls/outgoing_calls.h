#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stitch/rpc/calls/agent_state.h"
#include "stitch/rpc/calls/call_table.h"
#include "stitch/rpc/calls/deadline_watch.h"
#include "stitch/rpc/calls/extension.h"
#include "stitch/rpc/calls/sender.h"
#include "stitch/rpc/calls/stop_callbacks.h"
#include "stitch/rpc/future/runtime.h"
#include "stitch/rpc/future/thread_pool.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/time_left.h"
#include "stitch/rpc/options/options.h"
#include "stitch/rpc/peers/peer_budget.h"
#include "stitch/rpc/peers/peer_table.h"

namespace stitch::rpc {

// The calls that one worker makes, from the request to the outcome: a reply, an error reply, a
// timeout, a cancellation, the loss of the peer, or shutdown. The first of these to remove the call
// from the table completes it, so each call completes exactly once. Part of its Agent, which every
// request in flight keeps alive. Thread contract: any thread once start() has been called; no lock
// of its own.
class OutgoingCalls {
 public:
  // Keeps references to all of them.
  OutgoingCalls(const Options& options, const AgentState& state, const Extensions& extensions,
                Sender& sender, ThreadPool& pool)
      : options_(options), state_(state), extensions_(extensions), sender_(sender), pool_(pool) {}
  // `owner` holds this; it and `peers` may still have to be started. Calls that have timed out are
  // completed on threads of `callbacks` where the pool has none free.
  void start(const std::shared_ptr<Runtime>& owner, PeerTable& peers,
             const std::shared_ptr<base::EventLoop>& loop, StopCallbacks& callbacks);

  // ---- making calls
  // A request message with room for the CallHeader; an OutArchive over it appends the arguments.
  [[nodiscard]] static OutMessage begin_request(std::uint64_t function_id);
  // The timeout of a call made now: the given one, or the default, limited by the deadline of this
  // thread's execution context. Zero: none.
  [[nodiscard]] std::chrono::nanoseconds effective_timeout(
      std::optional<std::chrono::nanoseconds> timeout) const;
  // Sends a request whose arguments are in `message` (see begin_request) and completes `pending`
  // exactly once, also when sending fails; throws `shutting_down` only. `timeout` zero: none.
  // Returns the call's id. `function` is the name of a registered function: it is not copied.
  std::uint64_t start_call(const WorkerInfo& to, std::string_view function,
                           std::chrono::nanoseconds timeout, OutMessage&& message,
                           std::shared_ptr<PendingCall> pending);
  // One-way: no answer, no pending call. A thread of the program waits for room until `timeout`
  // (zero: without end); throws `overloaded` when there is none.
  void start_notify(const WorkerInfo& to, std::string_view function,
                    std::chrono::nanoseconds timeout, OutMessage message);
  // Forgets a call and tells the callee. False if it had completed. Its PendingCall is not called
  // any more.
  bool abandon_call(std::uint64_t call_id);

  // ---- how calls end
  // A reply or an error reply. A large one is decoded on a free user-function thread.
  void on_answer(InMessage&& message);
  // Where the caller wants the tensors of the reply with this frame; see IntoTensor::place.
  [[nodiscard]] transport::Buffer place(const WorkerInfo& from, const base::Bytes& frame,
                                        std::size_t bytes) noexcept;
  // Whether that call waits for an answer from `from`.
  [[nodiscard]] bool awaits(std::uint64_t call_id, const WorkerInfo& from) const {
    return table_.find(call_id, from) != nullptr;
  }
  // See IntoTensor::store_later; of a reply whose tensors are on their devices.
  [[nodiscard]] std::optional<c10::Stream> store_later(std::uint64_t call_id,
                                                       const InMessage& reply);
  // An answer to the call came from `from` and could not be handled.
  void fail_answered(std::uint64_t call_id, const WorkerInfo& from, const Error& error);
  void on_peer_lost(const WorkerInfo& peer, const Error& reason);
  // The peer has handled one-way requests.
  void on_give_room(const InMessage& message);
  // Fails all calls with `shutting_down`. After AgentState::stop().
  void stop();

  // ---- what is pending
  // As CallTable::deadline().
  [[nodiscard]] std::optional<Clock::time_point> deadline(std::uint64_t call_id) const {
    return table_.deadline(call_id);
  }
  [[nodiscard]] std::size_t size() const noexcept { return table_.size(); }
  // As CallTable::list().
  [[nodiscard]] std::vector<OutstandingCall> list() const { return table_.list(); }
  // Calls `told` with calls that have timed out, before their futures complete, on the thread that
  // read the callee's answer or on the event loop. Before start().
  using OnTimeout = std::function<void(std::span<const OutstandingCall>)>;
  void set_on_timeout(OnTimeout told) { on_timeout_ = std::move(told); }
  // Requests to workers within reach that wait or have not been handled there, one-way ones too:
  // asks about those.
  [[nodiscard]] std::uint64_t unhandled();
  // Calls pending, and those being completed on other threads.
  [[nodiscard]] std::uint64_t busy() const noexcept {
    const std::uint64_t pending = table_.size();
    return pending + completing_.load();  // read last: counted here before it leaves there
  }

 private:
  // Records an event of a call.
  void note(const char* what, const OutstandingCall& call) const noexcept;
  // As CallTable::add(), and notes that the call was made.
  std::uint64_t add(OutstandingCall&& call);
  // Removes the call from the table, if it is still pending, and completes it with the answer.
  void take_and_complete(std::uint64_t call_id, InMessage& message);
  void complete_call(const OutstandingCall& call, InMessage& message);
  // With the error's text behind `how`, "failed: " for example.
  void fail_call(std::uint64_t call_id, const Error& error, const char* how) noexcept;
  // The transport has completed the request, or dropped it.
  void on_request_sent(std::uint64_t call_id, const std::optional<Error>& error);
  void send_cancel(const WorkerInfo& to, std::uint64_t call_id) noexcept {
    send_number(to, wire::kCancel, call_id);
  }
  // A control frame of one number.
  void send_number(const WorkerInfo& to, std::uint16_t kind, std::uint64_t number) noexcept;
  // Who makes a call on this thread: code of the worker itself must not wait for room.
  [[nodiscard]] static PeerBudget::Caller caller(const OutMessage& message) noexcept;
  // Waits on this thread of the program for room, until the deadline. False: there is none.
  [[nodiscard]] bool await_room(const WorkerInfo& to, std::size_t bytes,
                                Clock::time_point deadline);
  // Sends the request of a call that has room, as soon as the window lets it.
  // `to`: the peer table's.
  void send_request(const WorkerInfo& to, Sender::LaidOut&& out, std::uint64_t id,
                    Clock::time_point deadline);
  void transmit(const WorkerInfo& to, Sender::LaidOut&& out, std::uint64_t id,
                const TimeLeft& time) noexcept;
  void transmit_one_way(const WorkerInfo& to, std::size_t bytes, Sender::LaidOut&& out);
  // Of a call that is out of the table. Whether it had begun.
  bool leave_flow(OutstandingCall& call) noexcept;
  // Asks for the room that one-way requests have taken. 0: does nothing.
  void ask_room(const WorkerInfo& to, std::uint64_t calls) noexcept {
    if (calls != 0) send_number(to, wire::kAskRoom, calls);
  }
  // The budget of a peer is used up.
  [[nodiscard]] Error full(const WorkerInfo& peer);
  // Fails the calls that have expired. On the event loop, which runs no code of the program.
  void expire();
  // What the caller knows of a call that has timed out.
  [[nodiscard]] std::string known_of(const OutstandingCall& call) const;

  const Options& options_;
  const AgentState& state_;
  const Extensions& extensions_;
  Sender& sender_;
  ThreadPool& pool_;
  std::weak_ptr<Runtime> owner_;          // constant after start()
  PeerTable* peers_ = nullptr;            // likewise
  StopCallbacks* callbacks_ = nullptr;    // likewise
  std::shared_ptr<DeadlineWatch> watch_;  // likewise
  OnTimeout on_timeout_;                  // likewise
  CallTable table_;
  std::atomic<std::uint64_t> completing_{0};  // on user-function threads
};

}  // namespace stitch::rpc
