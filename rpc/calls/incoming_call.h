#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "stitch/base/recycler.h"
#include "stitch/rpc/function/registry.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/future/future_state.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/time_left.h"
#include "stitch/rpc/peers/peer_flow.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

class ServedCalls;

// The fixed fields at the start of a request's body.
struct CallHeader {
  std::uint64_t call_id = 0;      // chosen by the caller; 0 for a one-way call
  std::uint64_t function_id = 0;  // 0: none, an extension handles the request
  TimeLeft time;
  static constexpr std::size_t kBytes = kTimeLeftOffset + kTimeLeftBytes;
};

// A call that a peer made to this worker: its arguments, its execution context and the connection
// for the answer. Shared by what runs it; answered exactly once, with an error if the last
// reference is dropped before. Its message and the attachments of that live as long. Keeps the
// worker alive. Thread contract: run() and answer on any thread, one at a time; request_stop() on
// any.
class IncomingCall : public std::enable_shared_from_this<IncomingCall> {
 public:
  // `runtime` keeps `served`.
  IncomingCall(std::shared_ptr<Runtime> runtime, ServedCalls& served,
               std::shared_ptr<transport::Connection> connection, InMessage message,
               const CallHeader& header, bool one_clock);
  ~IncomingCall();

  [[nodiscard]] Runtime& runtime() noexcept { return *context_.runtime; }
  [[nodiscard]] const WorkerInfo& caller() const noexcept { return message_.from; }
  [[nodiscard]] InMessage& message() noexcept { return message_; }
  [[nodiscard]] std::uint64_t id() const noexcept { return header_.call_id; }
  [[nodiscard]] bool one_way() const noexcept { return header_.call_id == 0; }
  // Null if the request names none, or one that is not registered here.
  [[nodiscard]] const Function* function() const noexcept { return function_; }
  // Its name; empty where function() is null.
  [[nodiscard]] std::string_view function_name() const noexcept;
  [[nodiscard]] bool names_function() const noexcept { return header_.function_id != 0; }
  [[nodiscard]] Clock::time_point deadline() const noexcept { return context_.deadline; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

  // `queued`: it waits for a thread. `running`: its function is on a thread, not waiting.
  // `awaiting`: it waits for a future, an object, its turn, or other workers' arguments.
  enum class Stage : std::uint8_t { queued, running, awaiting, answered };
  struct Progress {
    Stage stage = Stage::queued;
    Clock::time_point since{};  // its begin; before that, its arrival
    int thread = 0;             // base::this_thread_id() of its function; 0 for none
    bool begun = false;
  };
  [[nodiscard]] Progress progress() const noexcept;
  [[nodiscard]] Clock::time_point arrived() const noexcept { return arrived_; }
  // It waits for a thread from now on.
  void note_queued() noexcept { queued_.store(true, std::memory_order_relaxed); }
  // It waits for the creation of that object: the k-th that `creator` made here. For reports.
  void note_object(std::uint32_t creator, std::uint64_t k) noexcept {
    object_.store(std::uint64_t{creator} << 40 | (k + 1), std::memory_order_relaxed);
  }
  // "3/42": creator and k of note_object(); empty without.
  [[nodiscard]] std::string awaited_object() const;
  // The caller of the call whose function this thread runs, the innermost one. REQUIRES: called by
  // such a function.
  [[nodiscard]] static const WorkerInfo& caller_here() noexcept;
  // The name of that function; it is never destroyed. Null where this thread runs none.
  [[nodiscard]] static const std::string* function_here() noexcept;
  // StopFlag::call() of its execution context, as OutstandingCall::under and ThreadWait::under have
  // it.
  [[nodiscard]] const void* context_key() const noexcept { return stop_->call(); }
  // ---- its place among the calls of its caller: see PeerFlow
  // `flow` counts it, until it is answered.
  void counted_in(PeerFlow& flow) noexcept { flow_ = &flow; }
  [[nodiscard]] PeerFlow* flow() const noexcept { return flow_; }
  void end_received() noexcept;
  // It waits for a thread from now on: when its stop is requested before begin_turn(), it is
  // answered at once and its message is freed.
  void await_turn();
  // Whether it is to be run.
  [[nodiscard]] bool begin_turn() noexcept;

  // The one that brought the request.
  [[nodiscard]] transport::Connection& connection() noexcept { return *connection_; }

  // Decodes the tensors, shows them to the extensions, runs the function under this call's
  // execution context and answers with its result. Errors become the answer; nothing is thrown.
  // REQUIRES: function() is not null.
  void run(void* object = nullptr);
  // As run(), but passes the result to `sink` and does not answer.
  void run_keeping(void* object, KeepResult sink);
  // Runs `task` under this call's execution context, its tensors decoded. If it throws, the call is
  // answered by fail().
  template <class Task>
  void run_task(Task&& task) {
    try {
      prepare();
      const ExecutionContextScope scope(context_);
      task();
    } catch (...) {
      fail(to_error(std::current_exception()));
    }
  }

  // An archive over the arguments. REQUIRES: within run() or run_task().
  [[nodiscard]] InArchive arguments() {
    return InArchive(message_, message_.view.body().subspan(CallHeader::kBytes));
  }

  // Answers with what `encode(OutArchive&)` writes. Does nothing for one-way calls and for calls
  // that were answered before.
  template <class Encode>
  void reply(Encode&& encode) {
    answer([&](OutMessage& message) {
      OutArchive archive(message);
      encode(archive);
    });
  }
  // Likewise, without a result.
  void reply() {
    answer([](OutMessage&) {});
  }
  // Answers with an error, unchanged.
  void fail(const Error& error);
  // Answers with an exception of the user's function: `remote_exception` with its type and text.
  void fail_in_handler(const std::exception_ptr& exception);

  // What this thread does after the answer may block: it must not take up polling again. Before the
  // answer, on the thread in run().
  void others_poll() noexcept { polls_after_answer_ = false; }

  // A stop goes on to `state`, whose outcome is the answer.
  void stops_with(const std::shared_ptr<detail::FutureStateBase>& state);
  // Sets the handler's stop token, and stops what its function has returned. That of run_keeping()
  // only if the call has been answered by then.
  void request_stop() { stop(answered_.load()); }
  // Its deadline has passed: the answer says where it is, and it is stopped.
  void stop_at_deadline(const std::string& where);
  // "queued 4.9 s there", "running 4.9 s there", "awaiting 4.9 s there".
  [[nodiscard]] std::string where(Clock::time_point now) const;
  // The call will not be answered.
  void leave_unanswered() noexcept { answered_.store(true); }
  [[nodiscard]] bool stop_requested() const { return stop_->requested(); }

 private:
  void prepare();
  void stop(bool answered);
  // Why it is not run: its deadline, this worker's end, or its caller.
  [[nodiscard]] std::optional<Error> why_not_run(Clock::time_point now) const;
  // Answers a call that will not be run, and frees its message.
  void drop() noexcept;
  // The function runs on this thread, for a block.
  class Running;
  [[nodiscard]] KeepResult keep_when_done(KeepResult sink);
  void wait_for_current_streams();
  // What ends with this call (its turn, its place in an order, its object) ends after the work of
  // its streams.
  void hold_until_done() noexcept;
  template <class Write>
  void answer(Write&& write) {
    if (answered_.exchange(true)) return;
    if (one_way()) return;
    end_received();  // its caller may send the next one as soon as it has the answer
    try {
      if (context_.streams) [[unlikely]] {
        wait_for_current_streams();  // another thread may have made the result
        hold_until_done();
      }
      std::optional<ExecutionContextScope> scope;
      if (!context_is_current()) scope.emplace(context_);
      OutMessage message(wire::kReply);
      begin_reply(message);
      write(message);
      send_reply(std::move(message), std::nullopt);
    } catch (...) {
      send_error(to_error(std::current_exception()).with_prefix("its result cannot be sent"));
    }
  }
  // Whether a scope of this call's context would change nothing, as where its function has just
  // returned.
  [[nodiscard]] bool context_is_current() const noexcept;
  void begin_reply(OutMessage& message) const;
  void send_reply(OutMessage message, const std::optional<Error>& error);
  void send_error(const Error& error) noexcept;

  ServedCalls& served_;
  ExecutionContext context_;  // keeps the worker: it goes last
  const std::shared_ptr<transport::Connection> connection_;
  InMessage message_;
  const CallHeader header_;
  const std::size_t bytes_;
  const Function* function_ = nullptr;
  const std::shared_ptr<StopFlag> stop_ =
      std::allocate_shared<StopFlag>(base::RecyclingAllocator<StopFlag>());
  Clock::time_point arrived_;
  std::atomic<Clock::rep> began_{0};  // 0: it has not
  std::atomic<int> thread_{0};        // of its function; 0 for none
  std::atomic<int> waits_{0};         // inside that
  std::atomic<bool> queued_{false};
  std::atomic<std::uint64_t> object_{0};
  PeerFlow* flow_ = nullptr;
  std::atomic<bool> received_ended_{false};  // by who answers, or by the destructor
  enum class Turn : std::uint8_t { none, awaited, begun, dropped };
  std::atomic<Turn> turn_{Turn::none};
  bool prepared_ = false;
  std::atomic<bool> keeps_{false};  // run_keeping() was called
  bool polls_after_answer_ = true;  // the thread in run()
  std::atomic<bool> answered_{false};
};

}  // namespace stitch::rpc
