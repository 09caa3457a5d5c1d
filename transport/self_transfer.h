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

// Options for an endpoint that is to be tried. They have a random secret of their own, so that
// other processes that connect meanwhile are refused; traffic is not encrypted.
[[nodiscard]] EndpointOptions self_transfer_options();

// Connects `endpoint` to itself and transfers a frame and a buffer. Returns the error of a transfer
// that did not succeed within `limit`, nothing when it did. Blocks for at most `limit`: an endpoint
// that does not answer may not end either, so a thread of its own ends it. Not inside a callback.
[[nodiscard]] std::optional<Error> try_self_transfer(std::unique_ptr<Endpoint> endpoint,
                                                     std::chrono::milliseconds limit);

// Whether the endpoint that `make` makes passes a self-transfer, which takes milliseconds, five
// seconds when it hangs. A success is cached under `key` (transport, space, address) for the life
// of the process; a failure is counted and reported on stderr unless the last one had the same
// reason.
[[nodiscard]] bool passes_once(const std::string& key,
                               const std::function<std::unique_ptr<Endpoint>()>& make);

// The reason for which the last trial under `key` failed; empty when it passed or there was none.
[[nodiscard]] std::string why_not_passed(const std::string& key);

// The number of failed trials in this process, by the name of what was tried.
[[nodiscard]] std::map<std::string, std::int64_t> failed_trials();

}  // namespace stitch::transport
