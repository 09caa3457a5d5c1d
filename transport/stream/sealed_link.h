#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "stitch/transport/stream/link.h"
#include "stitch/transport/wire/handshake_messages.h"
#include "stitch/transport/wire/session_seal.h"

namespace stitch::transport {

// What a link over a network goes on as when its handshake is done: the same stream, in sealed
// records (session_seal.h) of at most kMostPlainBytes bytes, over the link that was there before.
// read() throws Error(unauthenticated) or Error(protocol) when something else comes than the peer
// sealed, and a stream that ends within a record has ended with `protocol`.
//
// `early` has been read from `link` already and is sealed; the next `plain_output` bytes that are
// written belong to the handshake and go as they are. `link` is untouched when something is thrown.
[[nodiscard]] std::unique_ptr<Link> make_sealed_link(std::unique_ptr<Link>&& link,
                                                     const SessionKeys& keys, Role role,
                                                     std::span<const std::byte> early,
                                                     std::size_t plain_output);

// Larger records are hardly quicker and wait longer for their last byte.
inline constexpr std::size_t kMostPlainBytes = std::size_t{64} << 10;

}  // namespace stitch::transport
