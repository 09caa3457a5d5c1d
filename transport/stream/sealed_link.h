#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "stitch/transport/stream/link.h"
#include "stitch/transport/wire/handshake_messages.h"
#include "stitch/transport/wire/session_seal.h"

namespace stitch::transport {

// Replaces a link over a network once its handshake is finished: the same stream, in sealed records
// (session_seal.h) of at most kMaxPlainBytes bytes, over `link`. read() throws
// Error(unauthenticated) or Error(protocol) when what arrives is not what the peer sealed, and a
// stream that ends within a record has ended with `disconnected`.
//
// `early` has been read from `link` already and is sealed; the next `plain_output` bytes that are
// written belong to the handshake and are not sealed. `link` is unchanged when something is thrown.
[[nodiscard]] std::unique_ptr<Link> make_sealed_link(std::unique_ptr<Link>&& link,
                                                     const SessionKeys& keys, Role role,
                                                     std::span<const std::byte> early,
                                                     std::size_t plain_output);

// Bytes. Larger records are hardly faster and wait longer for their last byte.
inline constexpr std::size_t kMaxPlainBytes = std::size_t{64} << 10;

}  // namespace stitch::transport
