#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "stitch/base/descriptor.h"
#include "stitch/base/error.h"
#include "stitch/transport/polling/poller.h"
#include "stitch/transport/stream/descriptor_reserve.h"

namespace stitch::transport {

// One step of setting up a connection: watches a socket until it is ready and calls an action,
// which ends the watch. Kept alive by the poller. Thread contract: start() and expire() on any
// thread; the callbacks run on the thread that polls, without locks.
class SocketStep final : public PollSource, public std::enable_shared_from_this<SocketStep> {
 public:
  // May take the socket. False when it has to be called again when the socket is next ready.
  using Action = std::function<bool(base::Descriptor& socket)>;
  // The action cannot be called, or has thrown.
  using Failed = std::function<void(const Error&)>;

  // Watches for input, and for room to write when `until_writable`. `poller` outlives the step.
  // Throws as Poller::add().
  static std::shared_ptr<SocketStep> start(Poller& poller, base::Descriptor socket,
                                           bool until_writable, Action action, Failed failed);
  SocketStep(Poller& poller, base::Descriptor socket, Action action, Failed failed);  // use start()
  // Ends the watch.
  void expire();

  bool poll() override { return false; }
  bool passive() const noexcept override { return true; }
  bool ready(std::uint32_t events) override;

 private:
  Poller& poller_;
  const Poller::SourceId id_;
  base::Descriptor socket_;
  const Action action_;
  const Failed failed_;
  std::atomic<bool> expired_{false};
};

// Accepts connections on a listening socket. Added to the poller, and removed, by its owner. Thread
// contract: the callbacks run on the thread that polls, without locks.
class SocketListener final : public PollSource {
 public:
  using Accepted = std::function<void(base::Descriptor socket)>;
  // `exhausted` is called when the process has no descriptor left for accepted connections.
  // `reserve` outlives the listener.
  SocketListener(base::Descriptor socket, DescriptorReserve& reserve, Accepted accepted,
                 std::function<void()> exhausted);
  [[nodiscard]] int descriptor() const noexcept { return socket_.get(); }

  bool poll() override { return false; }
  bool passive() const noexcept override { return true; }
  bool ready(std::uint32_t events) override;

 private:
  const base::Descriptor socket_;
  DescriptorReserve& reserve_;
  const Accepted accepted_;
  const std::function<void()> exhausted_;
};

}  // namespace stitch::transport
