#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/transport/wire/handshake_messages.h"
#include "stitch/transport/wire/hello.h"
#include "stitch/transport/wire/secret_key.h"
#include "stitch/transport/wire/session_seal.h"

namespace stitch::transport {

// One side's part in opening a connection, without any I/O: what to say, what was heard, whether it
// is done. The exchange is written down in WIRE.md, and what it is worth in docs/security.md:
//
//   both         greeting       versions, what is wanted, a nonce, a public key; nothing about who
//   connecting   introduction   who it is, and its proof
//   accepting    introduction   likewise, once it believes the connecting side
//   connecting   acceptance     once it believes the accepting side and wants it
//
// Proofs and session keys are made from the secret, all words before them, and the X25519 secret.
// Owned by its connection. Not thread-safe: used by one reader at a time.
class Handshake {
 public:
  // No message of a handshake is longer; a longer one is refused before memory is taken for it.
  static constexpr std::size_t kMaxBytes = 512;
  static_assert(Introduction::kBytes <= kMaxBytes && kRefusalBytes <= kMaxBytes);

  enum class State : std::uint8_t {
    greeting,      // waits for the peer's greeting
    introduction,  // waits for the peer's introduction
    acceptance,    // accepting side: has introduced itself, waits to be let in
    open,          // both have accepted
    refused,       // over; error() says why
  };
  // Whether the peer, which has proved who it is, may come in: throws the Error when not.
  using Check = std::function<void(const Hello& peer)>;
  struct Terms {
    std::shared_ptr<const SecretKey> secret{};  // null: nothing is proved and nothing protected
    Encryption encryption = Encryption::on;     // with a secret
  };

  // Takes a fresh nonce and, with a secret, a fresh pair of keys.
  Handshake(Hello self, Role role, Terms terms, Check check = nullptr);

  // What to send first.
  [[nodiscard]] base::Bytes greeting() const;
  // Takes the peer's next message and returns what to send in answer, in order. Never throws for
  // what the peer said: it then ends in `refused`, and the answer tells the peer why (unless the
  // peer refused us). Once refused, further messages are ignored but for the peer's own refusal.
  [[nodiscard]] std::vector<base::Bytes> receive(std::span<const std::byte> message);

  // Ends in `refused` and returns what to tell the peer.
  [[nodiscard]] base::Bytes refuse(const Error& error);

  [[nodiscard]] State state() const noexcept { return state_; }
  // Also within the check. REQUIRES: state() is `open`.
  [[nodiscard]] const Hello& peer() const noexcept { return peer_; }
  // What protects everything that follows; nothing when nothing does. REQUIRES: state() is `open`.
  [[nodiscard]] const std::optional<SessionKeys>& keys() const noexcept { return keys_; }
  void forget_keys() noexcept { keys_.reset(); }
  [[nodiscard]] Role role() const noexcept { return ours_.role; }
  // REQUIRES: state() is `refused`.
  [[nodiscard]] const Error& error() const noexcept { return *error_; }
  // True when the peer is known to be done with the connection: no use in waiting for it to read
  // our refusal.
  [[nodiscard]] bool peer_refused() const noexcept { return peer_refused_; }

 private:
  void take_greeting(std::span<const std::byte> message, std::vector<base::Bytes>& answer);
  void take_introduction(std::span<const std::byte> message, std::vector<base::Bytes>& answer);
  [[nodiscard]] base::Bytes introduce();
  [[nodiscard]] Key proof_of(Role role, std::span<const std::byte> introduction) const;
  void append(std::span<const std::byte> words) { transcript_.append(words.data(), words.size()); }
  void derive_keys();

  const Hello self_;
  const Terms terms_;
  const Check check_;
  Greeting ours_;
  Greeting theirs_;
  std::optional<KeyAgreement> agreement_;  // with a secret
  Key shared_;
  base::Bytes transcript_;  // every message so far: the connecting side's greeting first
  Hello peer_;
  std::optional<SessionKeys> keys_;
  State state_ = State::greeting;
  bool peer_refused_ = false;
  std::optional<Error> error_;
};

}  // namespace stitch::transport
