#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "stitch/base/error.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/gpu/device_gate.h"

namespace stitch::rpc {

// The thread that waits for gates of one worker: it asks all of them in turn, more and more rarely
// while none opens, and does what was to follow. Started at the first use. Owned by DeviceTensors.
// Thread contract: any thread.
class GateWatch {
 public:
  // Called once, on the thread of the watch, under base::CallbackScope; with an error when the
  // device has failed, and, inside stop() or then(), when the watch has been stopped or there is no
  // thread for it. Must not throw, and must not wait.
  using Then = base::UniqueFunction<void(const std::optional<Error>& error)>;

  explicit GateWatch(std::string thread_name);
  ~GateWatch();  // as stop()
  GateWatch(const GateWatch&) = delete;
  GateWatch& operator=(const GateWatch&) = delete;

  // Starts the thread, as the first then() does. Throws Error(overloaded) when the system refuses;
  // nothing once stopped.
  void start();
  // Calls `next` once `gate` is open; null: as soon as the thread is free.
  void then(std::unique_ptr<DeviceGate> gate, Then next);
  // Fails what still waits with `shutting_down`, and ends the thread. False when that is still
  // inside a call at `deadline`: it is left to end by itself.
  bool stop(std::chrono::steady_clock::time_point deadline);
  // Those whose `next` has not returned, with what it was given not destroyed yet.
  [[nodiscard]] std::size_t waiting() const;

  struct State;  // shared with the thread

 private:
  std::shared_ptr<State> state_;
};

}  // namespace stitch::rpc
