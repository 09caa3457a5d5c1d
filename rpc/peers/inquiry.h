#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/unique_function.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

// One question to another worker over a connection of its own, beside those that calls use: whether
// it is there, or whether this worker may join its world. See PeerTable::inquire(). A plain value.
struct Inquiry {
  struct Outcome {
    bool opened = false;                         // the right worker has answered the handshake
    std::optional<transport::Message> answer{};  // its first message that is not BIND
    // Why the last attempt failed; a shortage at this worker comes first.
    std::optional<Error> failure{};
  };
  transport::Wanted whom;
  std::vector<std::string> addresses;  // tried in turn, again and again where a process listens
  std::function<void()> answered{};    // the handshake; throws the Error to refuse it
  // What to send; null: the handshake is the question, and whatever follows it the answer.
  std::function<transport::Message()> question{};
  std::chrono::steady_clock::time_point deadline{};
  // Exactly once, on a thread of an endpoint or a timer, no lock held.
  base::UniqueFunction<void(Outcome)> done;
};

}  // namespace stitch::rpc
