// Agent: how it ends: with all others, by leaving them, or because it was declared dead.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "stitch/base/callback_scope.h"
#include "stitch/base/deadline.h"
#include "stitch/base/name_list.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/bounded_task.h"
#include "stitch/rpc/agent/gather_exchange.h"
#include "stitch/rpc/agent/graceful_shutdown.h"
#include "stitch/rpc/agent/membership_service.h"
#include "stitch/rpc/agent/worker_report.h"

namespace stitch::rpc {

std::optional<Error> Agent::why_not_here() const {
  if (state_.ended()) return std::nullopt;
  const std::string called = "shutdown of " + to_string(self_) + " was called from ";
  if (serves_here()) {
    return Error(ErrorCode::invalid_argument,
                 called + "one of its own handlers, which it would wait for");
  }
  if (base::CallbackScope::on_this_thread() || served_calls_.on_stop_callback_thread()) {
    return Error(
        ErrorCode::invalid_argument,
        called + "an inline function, an on_ready or a stop callback, which must not wait");
  }
  return std::nullopt;
}

std::optional<Error> Agent::shutdown(bool graceful, std::chrono::nanoseconds timeout,
                                     std::optional<std::chrono::nanoseconds> wait) {
  if (forked()) return std::nullopt;
  if (auto refusal = why_not_here()) throw std::move(*refusal);
  auto deadline = base::deadline_after(timeout);
  const bool waits = graceful && !options_.world_size.is_elastic();
  if (!state_.begin_shutdown()) {
    constexpr auto kNone = std::chrono::nanoseconds::max();
    const auto longest = wait.value_or(kNone) < kNone - timeout ? *wait + timeout : kNone;
    return await_first_shutdown(waits ? base::deadline_after(longest) : deadline);
  }
  served_calls_.never_serve();
  std::optional<Error> error;
  if (waits) {
    const auto until = wait ? base::deadline_after(*wait) : Clock::time_point::max();
    if ((error = graceful_shutdown_->run(until, timeout))) dump_shutdown();
    deadline = graceful_shutdown_->deadline();
  } else if (graceful) {
    error = leave(deadline);
  }
  // Even past the deadline, closing has a second. A dump of the timeout takes its time from that.
  const auto now = Clock::now();
  const auto late =
      std::clamp<Clock::duration>(now - deadline, Clock::duration::zero(), Dumps::kTimeToWrite);
  stop_everything(std::max(deadline, now + std::chrono::seconds(1) - late));
  state_.end();
  return error;
}

std::optional<Error> Agent::await_first_shutdown(Clock::time_point deadline) {
  constexpr std::chrono::seconds kTimeForClosing{1};  // of the first call, beyond its limit
  const bool limited = deadline < Clock::time_point::max() - kTimeForClosing;
  if (state_.await_end(limited ? deadline + kTimeForClosing : Clock::time_point::max()))
    return std::nullopt;
  std::string text = "a second shutdown of " + to_string(self_) +
                     " has reached its time limit: the first one still ";
  const auto waiting = graceful_shutdown_->waiting();
  dumps_.on_timeout("shutdown timed out", {});
  if (!waiting) {
    text += "runs";
  } else {
    std::vector<std::string> names;
    for (const WorkerId id : waiting->missing) names.push_back(to_string(peers_->find(id)));
    text += std::string("waits for ") + waiting->what + ": " + base::join_names(names);
  }
  return Error(ErrorCode::timeout, text);
}

void Agent::dump_shutdown() noexcept {
  dumps_.on_shutdown_timeout(shutdown_table(*this, graceful_shutdown_->waited()));
}

void Agent::fence(const Error& error) {
  state_.fence(error);
  peers_->for_each([&](const Life& life) { peers_->end(life.info(), error, true); });
}

std::optional<Error> Agent::leave(Clock::time_point deadline) {
  // Calls that have come are served to their end; others may call without end.
  constexpr std::chrono::seconds kTimeForNewCalls{1};
  constexpr std::chrono::seconds kTimeForAcknowledgments{1};
  const auto refuse_from = std::min(Clock::now() + kTimeForNewCalls, deadline);
  std::chrono::microseconds pause(200);
  for (;;) {
    const auto busy = std::max(activity().busy, outgoing_calls_.unhandled());
    // LEFT overtakes large messages, and its receivers end their connections.
    if (busy == 0 && !peers_->awaits_acknowledgment(Unacknowledged::large)) break;
    if (Clock::now() >= deadline) {
      if (busy == 0) break;
      const std::string running = served_calls_.running();
      dump_shutdown();
      membership_->leave(deadline);  // the others are told, and not waited for
      return Error(ErrorCode::timeout, "shutdown of " + to_string(self_) +
                                           " was not graceful: it still makes or serves " +
                                           std::to_string(busy) + " calls" +
                                           (running.empty() ? "" : "; it serves " + running));
    }
    if (Clock::now() >= refuse_from) state_.refuse_requests();
    std::this_thread::sleep_for(pause);  // calls and acknowledgments are counted, without an event
    pause = std::min<std::chrono::microseconds>(pause * 2, std::chrono::milliseconds(10));
  }
  membership_->leave(deadline);
  // What has not been acknowledged would be lost with a connection that breaks now. Acknowledgments
  // come within 0.1 s, without an event: sessions are asked.
  const auto acknowledged_by = std::min(deadline, Clock::now() + kTimeForAcknowledgments);
  while (peers_->awaits_acknowledgment(Unacknowledged::any) && Clock::now() < acknowledged_by)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return std::nullopt;
}

void Agent::stop_everything(Clock::time_point deadline) {
  constexpr std::chrono::milliseconds kTimeForTransports{100};
  state_.stop();
  membership_->stop();
  peers_->expect_closing();
  {
    const base::CallbackScope callbacks;
    outgoing_calls_.stop();
    // Ahead of the calls that wait for it: they are told why.
    gather_exchange_->close(
        Error(ErrorCode::shutting_down, to_string(self_) + " is shutting down"));
    served_calls_.stop_all();
    for_each_extension([](Extension& extension) { extension.stop(); });
  }
  if (device_tensors_.has_transfers() &&
      !run_until(deadline - kTimeForTransports,
                 [self = shared_from_this()] { self->device_tensors_.stop_transfers(); }))
    report_left_behind("a device does not end what was queued on it");
  if (!device_tensors_.stop(deadline - kTimeForTransports))
    report_left_behind("it still waits for a device");
  pool_.close();
  bool handlers_ended = pool_.join_until(deadline - kTimeForTransports);
  if (!handlers_ended) {
    const std::string running = served_calls_.running();
    report_left_behind("handlers still run: " + (running.empty() ? "unknown" : running));
  }
  // They have a moment to end also where handlers have taken all the time.
  if (!device_threads_.close_until(
          std::max(deadline - kTimeForTransports, Clock::now() + std::chrono::milliseconds(20)))) {
    handlers_ended = false;
    report_left_behind("nodes of backward passes still run on devices");
  }
  if (!served_calls_.stop_callbacks().close_until(deadline - kTimeForTransports))
    report_left_behind("stop callbacks still run");
  // A function that blocks where it must not (inline, on_ready) keeps a thread of the transports;
  // this thread must not wait for it without end.
  const bool closed = run_until(deadline, [self = shared_from_this()] {
    self->peers_->close();
    self->rendezvous_.reset();
    self->loop_->close();
  });
  if (!closed && handlers_ended)  // else a handler may run on a thread that reads
    report_left_behind("an inline function or a callback blocks one of its threads");
  dumps_.stop();
  if (handlers_ended && closed)
    for_each_extension([](Extension& extension) { extension.on_all_ended(); });
}

void Agent::report_left_behind(const std::string& what) const {
  std::fprintf(stderr, "stitch: %s leaves while %s\n", to_string(self_).c_str(), what.c_str());
}

}  // namespace stitch::rpc
