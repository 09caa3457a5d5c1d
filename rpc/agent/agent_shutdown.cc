#include "stitch/rpc/agent/agent.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/callback_scope.h"
#include "stitch/base/deadline.h"
#include "stitch/base/name_list.h"
#include "stitch/rpc/agent/gather_exchange.h"
#include "stitch/rpc/agent/graceful_shutdown.h"
#include "stitch/rpc/agent/incoming_call.h"

// How an Agent ends.
namespace stitch::rpc {

void Agent::throw_if_stopped() const {
  if (forked()) {
    throw Error(ErrorCode::invalid_argument,
                to_string(self_) +
                    " belongs to the process that this one was forked from: a forked child can "
                    "only exec, or do without stitch")
        .with_worker(self_.name);
  }
  if (!leaving_.load(std::memory_order_acquire)) return;
  if (stopped()) {
    throw Error(ErrorCode::shutting_down, to_string(self_) + " has shut down")
        .with_worker(self_.name);
  }
  if (ThreadPool::on_any_pool_thread() || base::CallbackScope::on_this_thread()) return;
  throw Error(ErrorCode::shutting_down,
              to_string(self_) + " is shutting down: only its handlers can begin something new")
      .with_worker(self_.name);
}

std::optional<Error> Agent::why_not_here() const {
  {
    base::MutexLock lock(ending_mutex_);
    if (ended_) return std::nullopt;
  }
  const std::string called = "shutdown of " + to_string(self_) + " was called from ";
  if (pool_.on_pool_thread()) {
    return Error(ErrorCode::invalid_argument,
                 called + "one of its own handlers, which it would wait for");
  }
  if (base::CallbackScope::on_this_thread() || stop_callbacks_.on_this_thread()) {
    return Error(
        ErrorCode::invalid_argument,
        called + "an inline function, an on_ready or a stop callback, which must not wait");
  }
  return std::nullopt;
}

std::optional<Error> Agent::shutdown(bool graceful, std::chrono::nanoseconds timeout) {
  if (forked()) return std::nullopt;
  if (auto refusal = why_not_here()) throw std::move(*refusal);
  {
    base::MutexLock lock(ending_mutex_);
    if (leaving_.exchange(true)) {
      while (!ended_) ended_changed_.wait(ending_mutex_);
      return std::nullopt;
    }
  }
  // Whatever happens below.
  const std::unique_ptr<Agent, void (*)(Agent*)> ended(this, [](Agent* self) {
    base::MutexLock lock(self->ending_mutex_);
    self->ended_ = true;
    self->ended_changed_.notify_all();
  });
  const auto deadline = base::deadline_after(timeout);
  std::optional<Error> error;
  if (graceful) {
    try {
      error = leave_->run(deadline);
    } catch (...) {
      error = to_error(std::current_exception());  // whatever it is, everything here still ends
    }
  }
  // However long leaving took, closing gets a moment of its own.
  stop_everything(std::max(deadline, Clock::now() + std::chrono::seconds(1)));
  return error;
}

void Agent::stop_everything(Clock::time_point deadline) {
  // Of the time that closing has: for the threads of the transports.
  constexpr std::chrono::milliseconds kTransports{100};
  stopped_.store(true, std::memory_order_release);
  peers_->expect_closing();
  {
    const base::CallbackScope callbacks;
    for (auto& record : calls_.take_all()) {
      complete_with_error(record, [&] {
        return about(record, Error(ErrorCode::shutting_down, ""),
                     "failed: this worker is shutting down");
      });
    }
    for (auto& call : incoming_.list(std::nullopt)) call->request_stop();
    for_each_extension([&](Extension& extension) { extension.stop(); });
    board_->close(Error(ErrorCode::shutting_down, to_string(self_) + " is shutting down"));
  }
  pool_.close();
  const bool all_ended = pool_.join_until(deadline - kTransports);
  if (!all_ended) {
    std::vector<std::string> running;
    for (auto& call : incoming_.list(std::nullopt)) {
      if (call->function() != nullptr) running.push_back(call->function()->name + "()");
    }
    std::fprintf(stderr, "stitch: %s leaves while handlers still run: %s\n",
                 to_string(self_).c_str(),
                 running.empty() ? "unknown" : base::join_names(running).c_str());
  }
  if (!stop_callbacks_.close_until(deadline - kTransports)) {
    std::fprintf(stderr, "stitch: %s leaves while stop callbacks still run\n",
                 to_string(self_).c_str());
  }
  const bool closed = close_until(deadline);
  if (all_ended && closed)
    for_each_extension([](Extension& extension) { extension.on_all_ended(); });
}

// A function that blocks where it must not (inline, on_ready) keeps a thread of the transports, and
// with it whoever waits for that: that is not to be the thread that shuts down.
bool Agent::close_until(Clock::time_point deadline) {
  struct Closing {
    base::Mutex mutex;
    base::CondVar changed;
    bool done STITCH_GUARDED_BY(mutex) = false;
  };
  const auto close = [](Agent& agent) {
    agent.peers_->close();
    agent.rendezvous_.reset();
    agent.loop_->close();
  };
  const auto closing = std::make_shared<Closing>();
  std::thread closer;
  try {
    closer = std::thread([self = shared_from_this(), closing, close]() mutable {
      close(*self);
      self.reset();  // whoever waits may be the last to hold it
      base::MutexLock lock(closing->mutex);
      closing->done = true;
      closing->changed.notify_all();
    });
  } catch (const std::system_error&) {
    close(*this);  // no thread to be had: then as long as it takes
    return true;
  }
  bool done = false;
  {
    base::MutexLock lock(closing->mutex);
    while (!closing->done && closing->changed.wait_until(closing->mutex, deadline)) {
    }
    done = closing->done;
  }
  if (done) {
    closer.join();
    return true;
  }
  closer.detach();
  std::fprintf(stderr,
               "stitch: %s leaves while an inline function or a callback blocks one of its "
               "threads\n",
               to_string(self_).c_str());
  return false;
}

}  // namespace stitch::rpc
