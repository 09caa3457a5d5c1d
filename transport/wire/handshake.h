#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/transport/wire/handshake_messages.h"
#include "stitch/transport/wire/hello.h"
#include "stitch/transport/wire/secret_key.h"
#include "stitch/transport/wire/session_seal.h"

namespace stitch::transport {

// One side of the handshake that opens a connection, without any I/O. WIRE.md has the exchange byte
// by byte, docs/security.md what it protects:
//
//   both         greeting       version, features, encryption, a nonce, a public key; no identity
//   connecting   introduction   its identity, whom it wants, and its proof
//   accepting    introduction   likewise, once it has verified the connecting side
//   connecting   acceptance     its proof that it has verified the accepting side
//
// Proofs and session keys are derived from the secret, all messages before them, and the X25519
// secret. Each side refuses an introduction that is for another worker; the connecting side also
// another worker than it wants.
// Owned by its connection. Not thread-safe: used by one reader at a time.
class Handshake {
 public:
  // The longest message of a handshake; a longer one is refused before memory is taken for it.
  static constexpr std::size_t kMaxBytes = 512;
  static_assert(Introduction::kBytes <= kMaxBytes && kRefusalBytes <= kMaxBytes);

  enum class State : std::uint8_t {
    greeting,      // waits for the peer's greeting
    introduction,  // waits for the peer's introduction
    acceptance,    // accepting side: has introduced itself, waits for the acceptance's proof
    open,          // both have accepted
    refused,       // ended with error()
  };
  // Decides whether a peer that has authenticated itself is accepted: throws the Error if not.
  using Check = std::function<void(const Hello& peer)>;
  struct Terms {
    std::shared_ptr<const SecretKey> secret{};  // null: no authentication, no encryption
    Encryption encryption = Encryption::on;     // with a secret
  };

  // What is fresh in every handshake, and what the processor can; a test may choose them.
  struct Fresh {
    Fresh();
    std::array<std::byte, 32> nonce;
    Key private_key = Key::random();
    bool aes = has_aes_instructions();
  };

  // The side that connects to `wanted`; without one, the accepting side.
  Handshake(Hello self, std::optional<Wanted> wanted, Terms terms, Check check = nullptr,
            const Fresh& fresh = {});

  // The first message to send.
  [[nodiscard]] base::Bytes greeting() const;
  // Takes the peer's next message and returns the messages to send in answer, in order. Never
  // throws for what the peer sent: it then ends in `refused`, and the answer has the reason (unless
  // the peer refused us). Once refused, further messages except the peer's own refusal are ignored.
  [[nodiscard]] std::vector<base::Bytes> receive(std::span<const std::byte> message);

  // Ends in `refused` and returns the message with the reason.
  [[nodiscard]] base::Bytes refuse(const Error& error);

  [[nodiscard]] State state() const noexcept { return state_; }
  // Also within the check. REQUIRES: state() is `open`.
  [[nodiscard]] const Hello& peer() const noexcept { return peer_; }
  // The keys for everything that follows; nothing without encryption. REQUIRES: state() is `open`.
  [[nodiscard]] const std::optional<SessionKeys>& keys() const noexcept { return keys_; }
  void forget_keys() noexcept { keys_.reset(); }
  [[nodiscard]] Role role() const noexcept { return ours_.role; }
  // REQUIRES: state() is `refused`.
  [[nodiscard]] const Error& error() const noexcept { return *error_; }
  // True when the peer has refused us: there is no point in waiting until it reads our refusal.
  [[nodiscard]] bool peer_refused() const noexcept { return peer_refused_; }

 private:
  void take_greeting(std::span<const std::byte> message, std::vector<base::Bytes>& answer);
  void take_introduction(std::span<const std::byte> message, std::vector<base::Bytes>& answer);
  void take_acceptance(std::span<const std::byte> message);
  [[nodiscard]] base::Bytes introduce();
  // Of `message` with the label "stitch `label`"; zeros without a secret.
  [[nodiscard]] Key proof_of(std::string_view label, std::span<const std::byte> message) const;
  [[nodiscard]] Key proof_of(Role role, std::span<const std::byte> introduction) const;
  [[nodiscard]] Key proof_of_acceptance() const { return proof_of("acceptance", {}); }
  void append(std::span<const std::byte> message) {
    transcript_.append(message.data(), message.size());
  }
  // Both have accepted.
  void open();

  const Hello self_;
  Wanted wanted_;  // accepting side: who has introduced itself
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
