#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "stitch/transport/endpoint.h"

namespace stitch::transport {

// For an endpoint that is to be tried. It has a random secret of its own, so that nobody else who
// connects to it meanwhile is listened to; what it carries is not encrypted.
[[nodiscard]] EndpointOptions self_transfer_options();

// Has `endpoint` connect to itself and carry a frame and a buffer. Returns why that did not succeed
// within `limit`, nothing when it did. Blocks that long at most: an endpoint that does not answer
// may not end either, so a thread of its own ends it. Any thread but a callback's.
[[nodiscard]] std::optional<Error> try_self_transfer(std::unique_ptr<Endpoint> endpoint,
                                                     std::chrono::milliseconds limit);

// Whether the endpoint that `make` makes passes a self-transfer. A success is remembered under
// `key` for the life of the process: it is a fact about this host; a failure may pass, when an
// address appears. A failure is counted, and said on stderr with its reason unless the last one
// under this key had the same. `key` begins with the name of what is tried, which ends at its last
// space. A trial takes milliseconds, five seconds when it hangs.
[[nodiscard]] bool passes_once(const std::string& key,
                               const std::function<std::unique_ptr<Endpoint>()>& make);

// Why what was tried under `key` did not pass the last time; empty when it did, or was not tried.
[[nodiscard]] std::string why_not_passed(const std::string& key);

// How often a trial has failed in this process, by the name of what was tried.
[[nodiscard]] std::map<std::string, std::int64_t> failed_trials();

}  // namespace stitch::transport
