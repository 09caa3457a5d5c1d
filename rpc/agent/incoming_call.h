#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "stitch/base/recycler.h"
#include "stitch/rpc/function/registry.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/message.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

class Agent;

// The fixed fields at the start of a request's body.
struct CallHeader {
  std::uint64_t call_id = 0;      // chosen by the caller; 0 for a one-way call
  std::uint64_t function_id = 0;  // 0: none, an extension knows what is wanted
  std::int64_t timeout_ns = 0;    // what is left of the deadline; 0: none
  static constexpr std::size_t kBytes = 24;
};

// A call that a peer made to this worker: its arguments, what it runs under, and the way back.
// Shared by whoever runs it; answered exactly once (with an error if everybody lets go of it
// unanswered). Its message, with what layers above hung on it, lives until then. Thread contract:
// run() and answer on any thread, one at a time; request_stop() on any.
class IncomingCall : public std::enable_shared_from_this<IncomingCall> {
 public:
  IncomingCall(std::shared_ptr<Agent> agent, std::shared_ptr<transport::Connection> connection,
               InMessage message, const CallHeader& header);
  ~IncomingCall();
  IncomingCall(const IncomingCall&) = delete;
  IncomingCall& operator=(const IncomingCall&) = delete;

  [[nodiscard]] Agent& agent() noexcept { return *agent_; }
  [[nodiscard]] const WorkerInfo& caller() const noexcept { return message_.from; }
  [[nodiscard]] InMessage& message() noexcept { return message_; }
  [[nodiscard]] std::uint64_t id() const noexcept { return header_.call_id; }
  [[nodiscard]] bool one_way() const noexcept { return header_.call_id == 0; }
  [[nodiscard]] const Function* function() const noexcept { return function_; }
  [[nodiscard]] Clock::time_point deadline() const noexcept { return ambient_.deadline; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

  // As Connection::defer, at the connection it came by.
  [[nodiscard]] bool defer(base::UniqueFunction<bool(bool here)>& work) {
    return connection_->defer(work);
  }

  // Decodes the tensors, lets the extensions see them, then runs the function under this call's
  // ambient: the result is the answer. Anything that goes wrong is the answer too; nothing is
  // thrown. REQUIRES: function() is not null.
  void run(void* object = nullptr);
  // As run(), but the result goes to `sink` and the call stays unanswered.
  void run_keeping(void* object, KeepResult sink);
  // Runs `task` under this call's ambient, its tensors decoded; what it throws answers the call
  // with fail().
  template <class Task>
  void run_task(Task&& task) {
    try {
      prepare();
      const ExecutionContextScope scope(ambient_);
      task();
    } catch (...) {
      fail(to_error(std::current_exception()));
    }
  }

  // An archive over the arguments. REQUIRES: within run() or run_task().
  [[nodiscard]] InArchive arguments() {
    return InArchive(message_, message_.view.body().subspan(CallHeader::kBytes));
  }

  // Answers with what `encode(OutArchive&)` writes. A one-way call's answer goes nowhere. The first
  // answer counts.
  template <class Encode>
  void reply(Encode&& encode) {
    if (answered_.exchange(true)) return;
    if (one_way()) return;
    try {
      const ExecutionContextScope scope(ambient_);
      OutMessage message(wire::kReply);
      OutArchive archive(message);
      begin_reply(archive);
      encode(archive);
      send_reply(std::move(message), std::nullopt);
    } catch (...) {
      send_error(to_error(std::current_exception()).with_prefix("its result cannot be sent"));
    }
  }
  // Answers with an error as it is.
  void fail(const Error& error);
  // Answers with what the user's function threw: `remote_exception` with the type and text.
  void fail_in_handler(const std::exception_ptr& exception);

  // What follows the answer on this thread may wait for something: other threads are to poll then.
  // Before the answer, on the thread in run().
  void others_poll() noexcept { polls_after_answer_ = false; }

  // Tells the handler through its stop token. Its stop callbacks run on a thread of their own.
  void request_stop();
  // Nobody is to hear of it any more.
  void leave_unanswered() noexcept { answered_.store(true); }
  [[nodiscard]] bool stop_requested() const { return stop_->requested(); }

 private:
  void prepare();
  void begin_reply(OutArchive& archive) const;
  void send_reply(OutMessage message, const std::optional<Error>& error);
  void send_error(const Error& error);

  const std::shared_ptr<Agent> agent_;
  const std::shared_ptr<transport::Connection> connection_;
  InMessage message_;
  const CallHeader header_;
  const std::size_t bytes_;
  const Function* function_ = nullptr;
  const std::shared_ptr<StopFlag> stop_ =
      std::allocate_shared<StopFlag>(base::RecyclingAllocator<StopFlag>());
  ExecutionContext ambient_;
  bool prepared_ = false;
  bool polls_after_answer_ = true;  // by the thread in run()
  std::atomic<bool> answered_{false};
};

}  // namespace stitch::rpc
