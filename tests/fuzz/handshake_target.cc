#include "stitch/transport/wire/handshake.h"

#include "tests/fuzz/targets.h"

namespace stitch::fuzz::handshakes {

using transport::Handshake;
using transport::Hello;
using transport::SecretKey;

static Hello hello_of(std::uint32_t id, const std::string& name) {
  Hello hello;
  hello.world = 42;
  hello.id = id;
  hello.epoch = 7;
  hello.name = name;
  return hello;
}

// Fixed, so that an input has one outcome.
static Handshake::Fresh fresh_of(bool connecting) {
  Handshake::Fresh fresh;
  fresh.nonce.fill(connecting ? std::byte{1} : std::byte{2});
  std::fill_n(fresh.private_key.data(), transport::Key::kBytes, fresh.nonce[0]);
  fresh.aes = false;
  return fresh;
}

static Handshake side_of(const Hello& self, std::optional<transport::Wanted> wanted,
                         const Handshake::Terms& terms) {
  return Handshake(self, wanted, terms, nullptr, fresh_of(wanted.has_value()));
}

// One side against what the input says: of each message half its size, 255 for 512 bytes, then its
// bytes.
static bool against_bytes(Handshake& side, bool with_secret, Choices& choices) {
  static_cast<void>(side.greeting());
  while (!choices.empty()) {
    const std::size_t size = choices.byte();
    for (const base::Bytes& answer : side.receive(choices.take(size == 255 ? 512 : 2 * size)))
      require(answer.size() <= Handshake::kMaxBytes, "a message of a handshake is too long");
  }
  const bool open = side.state() == Handshake::State::open;
  require(!open || !with_secret, "a peer that does not know the secret was accepted");
  if (side.state() == Handshake::State::refused)
    touch(std::as_bytes(std::span(std::string_view(side.error().what()))));
  return open;
}

// Two sides whose messages are changed on their way: for each message, how many changes, and for
// each of those a position and what to combine the byte with.
static bool between_two(Handshake& connecting, Handshake& accepting, Choices& choices) {
  bool changed = false;
  std::vector<base::Bytes> to_accepting, to_connecting;
  to_accepting.push_back(connecting.greeting());
  to_connecting.push_back(accepting.greeting());
  const auto deliver = [&](std::vector<base::Bytes>& messages, Handshake& to) {
    std::vector<base::Bytes> answers;
    for (base::Bytes& message : messages) {
      const base::Bytes sent = copy_of(message.span());
      for (unsigned left = choices.byte() % 4; left > 0; --left) {
        const std::size_t at = choices.word() % message.size();
        message.data()[at] ^= static_cast<std::byte>(choices.byte());
      }
      changed |= !same(message.span(), sent.span());
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
  require(!both || !changed || !connecting.peer().authenticated,
          "a changed handshake was accepted");
  return both && !changed;
}

// The input: bit 0 of the first byte: with a secret, bit 1: the role, bit 2: two sides.
static bool run(Bytes input) {
  static const auto key = SecretKey::from_random("a secret of thirty-two bytes, or so");
  Choices choices(input);
  if (choices.empty()) return false;
  const unsigned mode = choices.byte();
  const Handshake::Terms terms{(mode & 1) != 0 ? key : nullptr, transport::Encryption::on};
  if ((mode & 4) != 0) {
    Handshake connecting = side_of(hello_of(1, "left"), transport::Wanted{2}, terms);
    Handshake accepting = side_of(hello_of(2, "right"), std::nullopt, terms);
    return between_two(connecting, accepting, choices);
  }
  const auto wanted = (mode & 2) != 0 ? std::nullopt : std::optional(transport::Wanted{2});
  Handshake side = side_of(hello_of(1, "left"), wanted, terms);
  return against_bytes(side, (mode & 1) != 0, choices);
}

static Seeds seeds() {
  Seeds list;
  const std::string zeros(12, '\0');
  list.push_back({"two-sides", bytes_of("\x04" + zeros)});
  list.push_back({"two-sides-secret", bytes_of("\x05" + zeros)});
  // A peer without a secret, in each role.
  for (const bool connects : {true, false}) {
    using To = std::optional<transport::Wanted>;
    Handshake us = side_of(hello_of(1, "left"), connects ? To({2}) : To(), {});
    Handshake peer = side_of(hello_of(2, "right"), connects ? To() : To({1}), {});
    base::Bytes seed = bytes_of(std::string(1, connects ? '\0' : '\2'));
    std::vector<base::Bytes> to_us, to_peer;
    to_us.push_back(peer.greeting());
    to_peer.push_back(us.greeting());
    while (!to_us.empty() || !to_peer.empty()) {
      std::vector<base::Bytes> of_us, of_peer;
      for (const auto& message : to_us) {
        const bool long_one = message.size() > 2 * 254;
        base::ByteWriter(seed).write(
            static_cast<std::uint8_t>(long_one ? 255 : message.size() / 2));
        seed.append(message.data(), message.size());
        for (auto& answer : us.receive(message.span())) of_us.push_back(std::move(answer));
      }
      for (const auto& message : to_peer) {
        for (auto& answer : peer.receive(message.span())) of_peer.push_back(std::move(answer));
      }
      to_us = std::move(of_peer);
      to_peer = std::move(of_us);
    }
    list.push_back({connects ? "connecting" : "accepting", std::move(seed)});
  }
  return list;
}

}  // namespace stitch::fuzz::handshakes

namespace stitch::fuzz {
const Target handshake{"handshake", handshakes::run, handshakes::seeds, 64, std::size_t{1} << 20};
}  // namespace stitch::fuzz
