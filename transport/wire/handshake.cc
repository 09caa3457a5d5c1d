#include "stitch/transport/wire/handshake.h"

#include <algorithm>
#include <exception>
#include <span>
#include <string>
#include <utility>

#include "stitch/base/printable.h"
#include "stitch/base/random.h"

namespace stitch::transport {

namespace {

void check_wanted(const Wanted& wanted, const Hello& who) {
  if (wanted.is(who)) return;
  throw Error(ErrorCode::disconnected,
              "worker id " + std::to_string(wanted.id) + ", epoch " + std::to_string(wanted.epoch) +
                  " is wanted, worker \"" + base::printable(who.name) + "\" (id " +
                  std::to_string(who.id) + ", epoch " + std::to_string(who.epoch) + ") answers");
}

}  // namespace

Handshake::Fresh::Fresh() { base::fill_random(nonce); }

Handshake::Handshake(Hello self, std::optional<Wanted> wanted, Terms terms, Check check,
                     const Fresh& fresh)
    : self_(std::move(self)),
      wanted_(wanted.value_or(Wanted{})),
      terms_(std::move(terms)),
      check_(std::move(check)) {
  ours_.version = self_.version;
  ours_.role = wanted ? Role::connecting : Role::accepting;
  ours_.features = self_.features;
  ours_.nonce = fresh.nonce;
  if (!terms_.secret) return;
  ours_.authenticated = true;
  ours_.encryption = terms_.encryption;
  ours_.aes = fresh.aes;
  agreement_.emplace(fresh.private_key);
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

Key Handshake::proof_of(std::string_view label, std::span<const std::byte> message) const {
  if (!terms_.secret) return {};
  return terms_.secret->hash("stitch " + std::string(label),
                             {transcript_.span(), message, shared_.span()});
}

// Each role has a label of its own, so that neither's proof can be used as the other's.
Key Handshake::proof_of(Role role, std::span<const std::byte> introduction) const {
  return proof_of("proof of the " + std::string(name_of(role)) + " side", introduction);
}

base::Bytes Handshake::introduce() {
  base::Bytes message = Introduction::encode(self_, wanted_);
  const Key proof = proof_of(ours_.role, message.span());
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
  auto [who, wanted, proved, proof] = Introduction::decode(message);
  if (!proof_of(theirs_.role, proved).equals(proof)) {
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
  check_wanted(wanted, self_);
  if (ours_.role == Role::connecting) check_wanted(wanted_, peer_);
  if (check_) check_(peer_);
  if (ours_.role == Role::connecting) {
    answer.push_back(encode_acceptance(proof_of_acceptance()));
    open();
  } else {
    wanted_ = {peer_.id, peer_.epoch};
    answer.push_back(introduce());
    state_ = State::acceptance;
  }
}

void Handshake::take_acceptance(std::span<const std::byte> message) {
  if (!proof_of_acceptance().equals(decode_acceptance(message))) {
    throw Error(terms_.secret ? ErrorCode::unauthenticated : ErrorCode::protocol,
                describe_peer(peer_) + " has not accepted what this worker sent");
  }
  open();
}

void Handshake::open() {
  if (terms_.secret && ours_.encryption != Encryption::off) {
    const Cipher cipher = ours_.aes && theirs_.aes ? Cipher::aes256_gcm : Cipher::chacha20_poly1305;
    keys_ =
        derive_session_keys(*terms_.secret, "stitch", transcript_.span(), shared_.span(), cipher);
  }
  agreement_.reset();
  shared_ = Key();
  transcript_ = base::Bytes();
  state_ = State::open;
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
        take_acceptance(message);
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
