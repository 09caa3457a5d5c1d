#include "stitch/transport/wire/handshake.h"

#include <algorithm>
#include <exception>
#include <span>
#include <string>
#include <utility>

#include "stitch/base/random.h"

namespace stitch::transport {

Handshake::Handshake(Hello self, Role role, Terms terms, Check check)
    : self_(std::move(self)), terms_(std::move(terms)), check_(std::move(check)) {
  ours_.version = self_.version;
  ours_.role = role;
  ours_.features = self_.features;
  base::fill_random(std::as_writable_bytes(std::span(ours_.nonce)));
  if (!terms_.secret) return;
  ours_.authenticated = true;
  ours_.encryption = terms_.encryption;
  ours_.aes = has_aes_instructions();
  agreement_.emplace();
  const auto key = agreement_->public_key().span();
  std::copy(key.begin(), key.end(), ours_.public_key.begin());
}

base::Bytes Handshake::greeting() const { return encode(ours_); }

base::Bytes Handshake::refuse(const Error& error) {
  state_ = State::refused;
  error_ = error;
  return encode_refusal(error);
}

void Handshake::take_greeting(std::span<const std::byte> message,
                              std::vector<base::Bytes>& answer) {
  theirs_ = decode_greeting(message);
  check_greeting(ours_, theirs_);
  const bool connecting = ours_.role == Role::connecting;
  const base::Bytes own = greeting();
  append(connecting ? own.span() : message);
  append(connecting ? message : own.span());
  if (agreement_) shared_ = agreement_->shared_with(theirs_.public_key);
  state_ = State::introduction;
  if (connecting) answer.push_back(introduce());
}

// Of a side of that role, whose last message is `introduction`. Each role has a label of its own,
// so that neither's proof can be used as the other's.
Key Handshake::proof_of(Role role, std::span<const std::byte> introduction) const {
  return terms_.secret->hash("stitch worker proof of the " + std::string(name_of(role)) + " side",
                             {transcript_.span(), introduction, shared_.span()});
}

base::Bytes Handshake::introduce() {
  base::Bytes message = Introduction::encode(self_);
  const Key proof = terms_.secret ? proof_of(ours_.role, message.span()) : Key();
  message.append(proof.data(), Key::kBytes);
  append(message.span());
  return message;
}

void Handshake::take_introduction(std::span<const std::byte> message,
                                  std::vector<base::Bytes>& answer) {
  if (terms_.secret && !is_introduction(message)) {
    throw Error(ErrorCode::unauthenticated,
                "peer sent something else where the proof of its secret was due");
  }
  auto [who, proved, proof] = Introduction::decode(message);
  const Key expected = terms_.secret ? proof_of(theirs_.role, proved) : Key();
  if (!expected.equals(proof)) {
    throw terms_.secret
        ? Error(ErrorCode::unauthenticated,
                describe_peer(who) + " does not know the secret of this worker")
        : Error(ErrorCode::protocol, describe_peer(who) + " sent a proof that was not asked for");
  }
  append(message);
  peer_ = std::move(who);
  peer_.version = theirs_.version;
  peer_.features = theirs_.features;
  peer_.authenticated = theirs_.authenticated;
  if (peer_.world != self_.world) {
    throw Error(ErrorCode::protocol, describe_peer(peer_) + " belongs to world " +
                                         std::to_string(peer_.world) + ", worker \"" + self_.name +
                                         "\" to world " + std::to_string(self_.world));
  }
  if (check_) check_(peer_);
  if (ours_.role == Role::connecting) {
    answer.push_back(encode_acceptance());
    derive_keys();
    state_ = State::open;
  } else {
    answer.push_back(introduce());
    state_ = State::acceptance;
  }
}

void Handshake::derive_keys() {
  if (terms_.secret && ours_.encryption != Encryption::off) {
    const Cipher cipher = ours_.aes && theirs_.aes ? Cipher::aes256_gcm : Cipher::chacha20_poly1305;
    keys_ = derive_session_keys(*terms_.secret, "stitch worker", transcript_.span(), shared_.span(),
                                ours_.encryption, cipher);
  }
  agreement_.reset();
  shared_ = Key();
}

std::vector<base::Bytes> Handshake::receive(std::span<const std::byte> message) {
  std::vector<base::Bytes> answer;
  if (is_refusal(message)) {
    peer_refused_ = true;
    if (state_ != State::refused) error_ = decode_refusal(message);
    state_ = State::refused;
    return answer;
  }
  try {
    switch (state_) {
      case State::greeting:
        take_greeting(message, answer);
        break;
      case State::introduction:
        take_introduction(message, answer);
        break;
      case State::acceptance:
        if (!is_acceptance(message))
          throw Error(ErrorCode::protocol, "peer sent something else where its verdict was due");
        derive_keys();
        state_ = State::open;
        break;
      case State::open:
      case State::refused:
        break;
    }
  } catch (...) {
    answer.clear();
    answer.push_back(refuse(to_error(std::current_exception())));
  }
  return answer;
}

}  // namespace stitch::transport
