#pragma once

#include <tensorpipe/tensorpipe.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/task_thread.h"
#include "stitch/transport/connection_set.h"
#include "stitch/transport/endpoint.h"
#include "stitch/transport/tensorpipe/tensorpipe_endpoint.h"

namespace stitch::transport {

namespace tp = ::tensorpipe;

class TensorPipeConnection;

// What an endpoint over TensorPipe and its connections share. Kept alive by both; the TensorPipe
// context in it ends in join(), never where a connection happens to be dropped. Thread contract:
// any thread.
class TensorPipeEndpointState : public std::enable_shared_from_this<TensorPipeEndpointState> {
 public:
  TensorPipeEndpointState(EndpointOptions options, TensorPipeOptions tensorpipe);  // use make()
  // REQUIRES: the options have been checked.
  [[nodiscard]] static std::shared_ptr<TensorPipeEndpointState> make(EndpointOptions options,
                                                                     TensorPipeOptions tensorpipe);

  EndpointOptions options;  // constant once it listens or connects
  const std::shared_ptr<base::TaskThread> thread = std::make_shared<base::TaskThread>();

  [[nodiscard]] std::vector<std::string> listen(Endpoint::Accept accept);
  [[nodiscard]] std::vector<std::string> bind();
  // One listener has all addresses: they stay.
  void become(const Hello& self, const std::vector<std::string>& /*addresses*/) {
    options.self = self;
  }
  [[nodiscard]] std::shared_ptr<Connection> connect(const std::string& address, Wanted whom,
                                                    ConnectionEvents events);
  [[nodiscard]] std::map<std::string, std::int64_t> counters() const {
    return {{"transport.listener_failures", listener_failures_.load()}};
  }
  void close();
  void join();

  void remove(const std::shared_ptr<TensorPipeConnection>& connection) {
    connections_.remove(connection);
  }
  // Held by everything that TensorPipe may still call back; join() waits until it has no holder.
  [[nodiscard]] std::shared_ptr<void> busy() {
    base::MutexLock lock(mutex_);
    return busy_;
  }

 private:
  [[nodiscard]] static Error closed_error() {
    return Error(ErrorCode::shutting_down, "tensorpipe endpoint is closed");
  }
  [[nodiscard]] std::shared_ptr<tp::Listener> open_listener(const std::vector<std::string>& urls);
  // Accepts the next pipe of `listener`, again and again until the listener is closed.
  void accept_next(const std::shared_ptr<tp::Listener>& listener);
  void accepted(const std::shared_ptr<tp::Listener>& listener, std::shared_ptr<tp::Pipe> pipe);
  // One connection with malformed data breaks a TensorPipe listener: it is then opened again at its
  // addresses.
  void reopen_listener(int attempt);

  TensorPipeOptions tensorpipe_;  // constant after construction
  ConnectionSet<TensorPipeConnection> connections_;
  base::Mutex mutex_;
  base::CondVar idle_changed_;
  bool idle_ STITCH_GUARDED_BY(mutex_) = false;  // busy() has no holder left
  std::shared_ptr<void> busy_ STITCH_GUARDED_BY(mutex_);
  std::shared_ptr<tp::Context> context_ STITCH_GUARDED_BY(mutex_);
  std::shared_ptr<tp::Listener> listener_ STITCH_GUARDED_BY(mutex_);
  std::shared_ptr<const Endpoint::Accept> accept_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::string> addresses_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t accepted_count_ STITCH_GUARDED_BY(mutex_) = 0;
  // Failed attempts to open a broken listener again.
  std::atomic<std::int64_t> listener_failures_{0};
};

}  // namespace stitch::transport
