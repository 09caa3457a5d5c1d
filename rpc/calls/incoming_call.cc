#include "stitch/rpc/calls/incoming_call.h"

#include <algorithm>
#include <string>
#include <utility>

#include "stitch/base/thread_id.h"
#include "stitch/rpc/calls/served_calls.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/tensor_codec.h"
#include "stitch/rpc/peers/duration_text.h"

namespace stitch::rpc {

namespace {

// The call whose function this thread is running, the innermost one.
thread_local const IncomingCall* running_here = nullptr;

// Those that a message has brought tensors to, as devices_in_use.
std::uint64_t devices_of(const Arrival& arrival) {
  std::uint64_t devices = 0;
  for (const auto& each : arrival.tensors) {
    if (each.here.is_cuda()) devices |= device_bit(each.here);
  }
  return devices;
}

}  // namespace

class IncomingCall::Running {
 public:
  explicit Running(IncomingCall& call) noexcept
      : call_(call),
        outer_(std::exchange(running_here, &call)),
        outer_waits_(std::exchange(waits_here, &call.waits_)) {
    call_.thread_.store(base::this_thread_id(), std::memory_order_relaxed);
  }
  ~Running() {
    waits_here = outer_waits_;
    running_here = outer_;
    call_.thread_.store(0, std::memory_order_relaxed);
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  IncomingCall& call_;
  const IncomingCall* const outer_;
  std::atomic<int>* const outer_waits_;
};

IncomingCall::IncomingCall(std::shared_ptr<Runtime> runtime, ServedCalls& served,
                           std::shared_ptr<transport::Connection> connection, InMessage message,
                           const CallHeader& header, bool one_clock)
    : served_(served),
      connection_(std::move(connection)),
      message_(std::move(message)),
      header_(header),
      bytes_(message_.arrival ? message_.arrival->bytes : total_bytes(message_.raw)),
      function_(header.function_id == 0 ? nullptr
                                        : FunctionRegistry::instance().find(header.function_id)) {
  context_.runtime = std::move(runtime);
  arrived_ = Clock::now();
  // Its tensors may have come to their devices later.
  const auto read = message_.arrival ? message_.arrival->read : arrived_;
  context_.deadline = header.time.left < 0 ? arrived_ : due_here(read, header.time, one_clock);
  context_.stop = stop_;
}

IncomingCall::~IncomingCall() {
  if (!answered_.load()) {
    fail(served_.state().stopped()
             ? Error(ErrorCode::shutting_down, to_string(served_.self()) + " is shutting down")
             : Error(ErrorCode::cancelled, "the call was dropped before it was answered"));
  }
  end_received();
  served_.forget(*this);
}

// Also for a call that has waited since its tensors were decoded: for arguments that other workers
// had, for its object, or for its turn.
void IncomingCall::prepare() {
  const Clock::time_point now = Clock::now();
  served_.state().events().record_at(now, "call started", caller().id.value(), caller().epoch, id(),
                                     function_name());
  if (auto why = why_not_run(now)) throw std::move(*why);
  began_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  if (std::exchange(prepared_, true)) {
    if (context_.streams) [[unlikely]]
      context_.streams->wait_for_default();
    return;
  }
  decode_tensors(message_);
  if (message_.arrival) [[unlikely]]
    context_.streams = StreamSet::from_pool(devices_of(*message_.arrival));
  const StreamSetScope streams(context_.streams);
  if (message_.arrival && message_.arrival->memory)
    message_.arrival->memory->use_on_current_streams();
  for (const auto& extension : served_.extensions()) extension->on_decode(message_, context_);
}

std::optional<Error> IncomingCall::why_not_run(Clock::time_point now) const {
  if (now >= context_.deadline)
    return Error(ErrorCode::timeout, context_.deadline <= arrived_
                                         ? std::string("its deadline passed on its way")
                                         : where(now));
  if (served_.state().stopped())
    return Error(ErrorCode::shutting_down, to_string(served_.self()) + " is shutting down");
  if (stop_->requested())
    return Error(ErrorCode::cancelled, "it was cancelled while it waited to be run");
  return std::nullopt;
}

IncomingCall::Progress IncomingCall::progress() const noexcept {
  Progress progress;
  const Clock::rep began = began_.load(std::memory_order_relaxed);
  progress.begun = began != 0;
  progress.since = progress.begun ? Clock::time_point(Clock::duration(began)) : arrived_;
  progress.thread = thread_.load(std::memory_order_relaxed);
  if (answered_.load(std::memory_order_acquire)) {
    progress.stage = Stage::answered;
  } else if (progress.thread != 0 && waits_.load(std::memory_order_relaxed) == 0) {
    progress.stage = Stage::running;
  } else {
    progress.stage = !progress.begun && queued_.load(std::memory_order_relaxed) ? Stage::queued
                                                                                : Stage::awaiting;
  }
  return progress;
}

std::string IncomingCall::awaited_object() const {
  const std::uint64_t object = object_.load(std::memory_order_relaxed);
  if (object == 0) return "";
  constexpr std::uint64_t kMask = (std::uint64_t{1} << 40) - 1;
  return std::to_string(object >> 40) + "/" + std::to_string((object & kMask) - 1);
}

std::string_view IncomingCall::function_name() const noexcept {
  return function_ == nullptr ? std::string_view() : std::string_view(function_->name);
}

const WorkerInfo& IncomingCall::caller_here() noexcept { return running_here->caller(); }

const std::string* IncomingCall::function_here() noexcept {
  return running_here == nullptr || running_here->function_ == nullptr
             ? nullptr
             : &running_here->function_->name;
}

void IncomingCall::run(void* object) {
  const Running running(*this);
  run_task([&] { function_->reply(shared_from_this(), object); });
}

void IncomingCall::run_keeping(void* object, KeepResult sink) {
  keeps_ = true;
  try {
    prepare();
  } catch (...) {
    sink({}, std::make_exception_ptr(CallRefused(to_error(std::current_exception()))));
    return;
  }
  const ExecutionContextScope scope(context_);
  const Running running(*this);
  others_poll();  // what waits for the object may run here after the answer
  if (context_.streams) [[unlikely]]
    sink = keep_when_done(std::move(sink));
  function_->keep(shared_from_this(), object, std::move(sink));
}

// Other handlers use the object on other streams: it is there once what makes it has ended.
KeepResult IncomingCall::keep_when_done(KeepResult sink) {
  return [self = shared_from_this(), sink = std::move(sink)](OwnedObject value,
                                                             std::exception_ptr exception) mutable {
    if (exception) {
      sink(std::move(value), exception);
      return;
    }
    std::unique_ptr<DeviceGate> gate;
    try {
      gate = DeviceTensors::gate_of(*self->context_.streams);
    } catch (...) {
      sink({}, std::current_exception());
      return;
    }
    if (!gate) {
      sink(std::move(value), nullptr);
      return;
    }
    self->served_.device_tensors().when_open(
        std::move(gate), [self, sink = std::move(sink),
                          value = std::move(value)](const std::optional<Error>& error) mutable {
          auto failure = error ? std::make_exception_ptr(CallRefused(*error)) : nullptr;
          self->runtime().post([self, sink = std::move(sink), value = std::move(value),
                                failure = std::move(failure)]() mutable {
            const ExecutionContextScope scope(self->context_);
            sink(failure ? OwnedObject() : std::move(value), failure);
          });
        });
  };
}

void IncomingCall::wait_for_current_streams() {
  try {
    context_.streams->wait_for_current();
  } catch (...) {
    hold_until_done();
    throw;
  }
}

void IncomingCall::hold_until_done() noexcept {
  const auto self = weak_from_this().lock();
  if (!self) return;
  // One by one: where a device has failed the call still waits for the others.
  for (const auto& stream : context_.streams->streams()) {
    try {
      if (auto gate = DeviceTensors::gate_of(StreamSet({stream})))
        served_.device_tensors().when_open(std::move(gate), [self](const std::optional<Error>&) {});
    } catch (const std::exception&) {
      // This device has failed: there is nothing to wait for.
    }
  }
}

void IncomingCall::stop(bool answered) {
  detail::ToStop more;
  stop_->request(context_.runtime, more, !keeps_ || answered);
  detail::FutureStateBase::stop(std::move(more));
  drop();
}

void IncomingCall::stop_at_deadline(const std::string& where) {
  const bool answered = answered_.exchange(true);
  // The call counts as held until its handler, and each queue that keeps it, lets go of it.
  if (!answered) send_error(Error(ErrorCode::timeout, where));
  stop(answered);
}

std::string IncomingCall::where(Clock::time_point now) const {
  const Progress at = progress();
  const char* const text = at.stage == Stage::queued    ? "queued "
                           : at.stage == Stage::running ? "running "
                                                        : "awaiting ";
  return text + duration_text(std::max(now - at.since, Clock::duration::zero())) + " there";
}

void IncomingCall::stops_with(const std::shared_ptr<detail::FutureStateBase>& state) {
  if (stop_->awaits(state)) detail::FutureStateBase::stop({state});
}

void IncomingCall::await_turn() {
  turn_.store(Turn::awaited);
  if (stop_->requested()) drop();
}

bool IncomingCall::begin_turn() noexcept {
  Turn turn = Turn::awaited;
  return turn_.compare_exchange_strong(turn, Turn::begun);
}

void IncomingCall::drop() noexcept {
  Turn turn = Turn::awaited;
  if (!turn_.compare_exchange_strong(turn, Turn::dropped)) return;
  if (const auto why = why_not_run(Clock::now())) fail(*why);
  end_received();
  message_.tensors.clear();
  message_.raw = {};
}

void IncomingCall::end_received() noexcept {
  if (flow_ != nullptr && !received_ended_.exchange(true)) flow_->budget.end_received(bytes_);
}

bool IncomingCall::context_is_current() const noexcept {
  const ExecutionContext& current = ExecutionContext::current();
  return current.stop == context_.stop && current.runtime == context_.runtime &&
         current.deadline == context_.deadline &&
         current.autograd_context == context_.autograd_context && !current.no_grad &&
         !context_.no_grad && !current.autocast && !context_.autocast && !current.streams &&
         !context_.streams;
}

void IncomingCall::begin_reply(OutMessage& message) const {
  const auto id = base::to_wire_order(header_.call_id);
  message.frame.body().append(&id, sizeof(id));
}

void IncomingCall::send_reply(OutMessage message, const std::optional<Error>& error) {
  if (served_.state().forked()) return;  // a handler that forked has returned in the child, too
  served_.state().events().record(error ? "call refused" : "call served", caller().id.value(),
                                  caller().epoch, id(), function_name());
  for (const auto& each : message_.attachments) each->on_answer(error);
  // If this thread reads again right after the answer, and does not block before.
  if (running_here == this && polls_after_answer_ && !served_.queued())
    connection_->blocking_work_done();
  served_.sender().send_reply(caller(), connection_, std::move(message));
}

void IncomingCall::fail(const Error& error) {
  if (answered_.exchange(true)) return;
  end_received();
  send_error(error);
}

void IncomingCall::fail_in_handler(const std::exception_ptr& exception) {
  if (answered_.exchange(true)) return;
  end_received();
  if (context_.streams) [[unlikely]]
    hold_until_done();
  // Often for a call of its own that has the same deadline.
  if (const auto now = Clock::now(); now >= context_.deadline)
    return send_error(Error(ErrorCode::timeout, where(now)));
  try {
    std::rethrow_exception(exception);
  } catch (const CallRefused& refused) {
    send_error(refused);
    return;
  } catch (const Error& error) {
    // The end of this worker has stopped it, or what it awaits.
    const bool ended =
        error.code() == ErrorCode::cancelled || error.code() == ErrorCode::shutting_down;
    if (ended && served_.state().stopped()) {
      return send_error(
          Error(ErrorCode::shutting_down, to_string(served_.self()) + " is shutting down"));
    }
  } catch (...) {
    // The function's own exception.
  }
  send_error(Error(ErrorCode::remote_exception, describe(exception)));
}

void IncomingCall::send_error(const Error& error) noexcept {
  if (one_way()) return;
  OutMessage message(wire::kErrorReply);
  OutArchive archive(message);
  begin_reply(message);
  archive(served_.sender().sendable(caller(), error));
  try {
    send_reply(std::move(message), error);
  } catch (const Error& why) {  // the caller must not wait without end
    connection_->close(Error(why).with_prefix("an error could not be reported"));
  }
}

}  // namespace stitch::rpc
