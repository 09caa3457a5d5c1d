#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stitch/transport/endpoint.h"

namespace stitch::transport {

// An Endpoint over a state that it shares with its connections, which may outlive it: `State` has
// listen(), bind(), become(), connect(), close() and join() as Endpoint does, and may have help()
// and counters(). The destructor joins it. Thread contract: as Endpoint.
template <class State>
class EndpointShell final : public Endpoint {
 public:
  explicit EndpointShell(std::shared_ptr<State> state) : state_(std::move(state)) {}
  ~EndpointShell() override { state_->join(); }

  std::vector<std::string> listen(Accept accept) override {
    return state_->listen(std::move(accept));
  }
  std::vector<std::string> bind() override { return state_->bind(); }
  void become(const Hello& self, const std::vector<std::string>& addresses) override {
    state_->become(self, addresses);
  }
  std::shared_ptr<Connection> connect(const std::string& address, Wanted whom,
                                      ConnectionEvents events) override {
    return state_->connect(address, whom, std::move(events));
  }
  bool help(base::AwaitedFlag& done, std::chrono::steady_clock::time_point deadline) override {
    if constexpr (requires { state_->help(done, deadline); }) {
      return state_->help(done, deadline);
    } else {
      return Endpoint::help(done, deadline);
    }
  }
  [[nodiscard]] std::map<std::string, std::int64_t> counters() const override {
    if constexpr (requires { state_->counters(); }) {
      return state_->counters();
    } else {
      return Endpoint::counters();
    }
  }
  void close() override { state_->close(); }
  void join() override { state_->join(); }

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace stitch::transport
