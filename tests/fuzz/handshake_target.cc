#include "stitch/transport/wire/handshake.h"

#include "stitch/base/error.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {
namespace {

using transport::Handshake;
using transport::Hello;
using transport::Role;
using transport::SecretKey;

Hello hello_of(std::uint32_t id, const std::string& name) {
  Hello hello;
  hello.world = 42;
  hello.id = id;
  hello.epoch = 7;
  hello.name = name;
  return hello;
}

// One side against what the input says: the size of each message, 255 for 512 bytes, then its
// bytes.
bool against_bytes(Handshake& side, Choices& choices) {
  static_cast<void>(side.greeting());
  while (!choices.empty()) {
    const std::size_t size = choices.byte();
    static_cast<void>(side.receive(choices.take(size == 255 ? 512 : 2 * size)));
  }
  return side.state() == Handshake::State::open;
}

// Two sides whose messages are changed on their way: for each message, how many changes, and for
// each of those a position and what to combine the byte with.
bool between_two(Handshake& connecting, Handshake& accepting, Choices& choices) {
  bool changed = false;
  std::vector<base::Bytes> to_accepting, to_connecting;
  to_accepting.push_back(connecting.greeting());
  to_connecting.push_back(accepting.greeting());
  const auto deliver = [&](std::vector<base::Bytes>& messages, Handshake& to) {
    std::vector<base::Bytes> answers;
    for (base::Bytes& message : messages) {
      for (unsigned left = choices.byte() % 4; left > 0; --left) {
        const std::size_t at = choices.word() % message.size();
        const auto change = static_cast<std::byte>(choices.byte());
        message.data()[at] ^= change;
        changed |= change != std::byte{0};
      }
      for (auto& answer : to.receive({message.data(), message.size()}))
        answers.push_back(std::move(answer));
    }
    messages.clear();
    return answers;
  };
  while (!to_accepting.empty() || !to_connecting.empty()) {
    auto from_accepting = deliver(to_accepting, accepting);
    auto from_connecting = deliver(to_connecting, connecting);
    to_connecting = std::move(from_accepting);
    to_accepting = std::move(from_connecting);
  }
  const bool both =
      connecting.state() == Handshake::State::open && accepting.state() == Handshake::State::open;
  // What the secret is for: nothing that was changed on its way is accepted by both.
  if (both && changed && connecting.peer().authenticated) std::abort();
  return both && !changed;
}

// The input: bit 0 of the first byte: with a secret, bit 1: the role, bit 2: two sides.
bool run(Bytes input) {
  static const auto key = SecretKey::from_random("a secret of thirty-two bytes, or so");
  Choices choices(input);
  if (choices.empty()) return false;
  const unsigned mode = choices.byte();
  const Handshake::Terms terms{(mode & 1) != 0 ? key : nullptr, transport::Encryption::on};
  if ((mode & 4) != 0) {
    Handshake connecting(hello_of(1, "left"), Role::connecting, terms);
    Handshake accepting(hello_of(2, "right"), Role::accepting, terms);
    return between_two(connecting, accepting, choices);
  }
  const Role role = (mode & 2) != 0 ? Role::accepting : Role::connecting;
  Handshake side(hello_of(1, "left"), role, terms);
  return against_bytes(side, choices);
}

std::vector<base::Bytes> seeds() {
  std::vector<base::Bytes> list;
  const std::string zeros(12, '\0');
  list.push_back(bytes_of("\x04" + zeros));
  list.push_back(bytes_of("\x05" + zeros));
  // A peer without a secret.
  Handshake us(hello_of(1, "left"), Role::connecting, {});
  Handshake peer(hello_of(2, "right"), Role::accepting, {});
  base::Bytes seed = bytes_of(std::string(1, '\0'));
  const auto add = [&](const base::Bytes& message) {
    const bool long_one = message.size() > 2 * 254;
    base::ByteWriter(seed).write(static_cast<std::uint8_t>(long_one ? 255 : message.size() / 2));
    seed.append(message.data(), message.size());
  };
  std::vector<base::Bytes> to_peer;
  to_peer.push_back(us.greeting());
  add(peer.greeting());
  const base::Bytes greeting = peer.greeting();
  for (auto& answer : us.receive({greeting.data(), greeting.size()}))
    to_peer.push_back(std::move(answer));
  for (const auto& message : to_peer) {
    for (const auto& answer : peer.receive({message.data(), message.size()})) add(answer);
  }
  list.push_back(std::move(seed));
  return list;
}

}  // namespace

const Target handshake{"handshake", run, seeds};

}  // namespace stitch::fuzz
