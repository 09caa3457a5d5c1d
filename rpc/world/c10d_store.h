#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "stitch/transport/store/store.h"
#include "stitch/transport/wire/secret_key.h"

namespace stitch::rpc {

// A client of torch's own store (c10d::TCPStore), as torchrun's agent serves one. That store proves
// nothing, and others write to it: with `key` (may be null) every value is sealed under the name of
// its key by libsodium's secretbox, so that the store can delay or hide values, but neither read
// nor change them. It has no claims that end with a process: those here end with their object only,
// and are for workers that a launcher restarts all together. The numbers of add() are not sealed,
// and have keys of their own. Methods poll the store while they wait. Throws Error(disconnected)
// naming the store when it cannot be reached within `connect_timeout`; a value without the seal of
// `key` is Error(unauthenticated).
[[nodiscard]] std::shared_ptr<transport::Store> make_c10d_store(
    const std::string& host, std::uint16_t port, std::shared_ptr<const transport::SecretKey> key,
    std::chrono::milliseconds connect_timeout);

}  // namespace stitch::rpc
