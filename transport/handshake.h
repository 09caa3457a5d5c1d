#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "stitch/transport/bytes.h"
#include "stitch/transport/error.h"
#include "stitch/transport/hello.h"

namespace stitch::transport {

// One side's part in opening a connection, without any I/O: what to say, what was heard, whether it
// is done. The exchange is written down in WIRE.md: both say hello at once; with a secret both then
// prove it; then each tells its verdict, and the connection is open for a side when it has accepted
// and has been accepted. Owned by its connection. Not thread-safe: used by one reader at a time.
class Handshake {
 public:
  // No message of a handshake is longer; a longer one is refused before memory is taken for it.
  static constexpr std::size_t kMaxBytes = Hello::kMaxBytes;

  enum class State : std::uint8_t {
    hello,    // waits for the peer's hello
    proof,    // waits for the peer's proof
    verdict,  // has accepted, waits for the peer's verdict
    open,     // both have accepted
    refused,  // over; error() says why
  };

  // Takes a fresh nonce. `self.authenticated` is set from the secret.
  Handshake(Hello self, std::string secret);

  // What to send first.
  [[nodiscard]] Bytes greeting() const;
  // Takes the peer's next message and returns what to send in answer, in order. Never throws for
  // what the peer said: it then ends in `refused`, and the answer tells the peer why (unless the
  // peer refused us). Once refused, further messages are ignored but for the peer's own refusal.
  [[nodiscard]] std::vector<Bytes> receive(std::span<const std::byte> message);

  // Ends in `refused` and returns what to tell the peer.
  [[nodiscard]] Bytes refuse(const Error& error);

  [[nodiscard]] State state() const noexcept { return state_; }
  // REQUIRES: state() is `open`.
  [[nodiscard]] const Hello& peer() const noexcept { return peer_; }
  // REQUIRES: state() is `refused`.
  [[nodiscard]] const Error& error() const noexcept { return *error_; }
  // True when the peer is known to be done with the connection: no use in waiting for it to read
  // our refusal.
  [[nodiscard]] bool peer_refused() const noexcept { return peer_refused_; }

 private:
  void take_hello(std::span<const std::byte> message, std::vector<Bytes>& answer);

  const std::string secret_;
  Hello self_;
  Hello peer_;
  State state_ = State::hello;
  bool peer_refused_ = false;
  std::optional<Error> error_;
};

}  // namespace stitch::transport
