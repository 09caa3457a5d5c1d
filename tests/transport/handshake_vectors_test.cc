// The handshake with fixed keys and nonces, message by message, beside what another implementation
// of WIRE.md says: handshake_vectors.txt.
#include <cctype>

#include "stitch/transport/wire/handshake.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::handshake_vectors_test {
namespace {

using State = Handshake::State;

std::string hex(std::span<const std::byte> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte each : bytes) {
    text += kDigits[std::to_integer<unsigned>(each) >> 4];
    text += kDigits[std::to_integer<unsigned>(each) & 15];
  }
  return text;
}

std::string bytes_of(const std::string& text) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return bytes;
}

using Values = std::map<std::string, std::string>;

// The values of each case, by name; those before the first case under "".
std::map<std::string, Values> read_vectors() {
  std::ifstream file(HANDSHAKE_VECTORS);
  std::map<std::string, Values> cases;
  std::string name, value;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    if (line.starts_with("case ")) {
      name = line.substr(5);
    } else if (line[0] == ' ') {
      cases[name][value] += line.substr(2);
    } else {
      value = line.substr(0, line.size() - 1);
    }
  }
  return cases;
}

Handshake::Fresh counted(unsigned nonce, unsigned key, bool aes) {
  Handshake::Fresh fresh;
  for (unsigned i = 0; i < 32; ++i) {
    fresh.nonce[i] = static_cast<std::byte>(nonce + i);
    fresh.private_key.data()[i] = static_cast<std::byte>(key + i);
  }
  fresh.aes = aes;
  return fresh;
}

Hello hello_of(std::uint32_t id, std::uint64_t epoch, const std::string& name) {
  Hello hello;
  hello.features = 0x8000000000000001ULL;
  hello.world = 42;
  hello.id = id;
  hello.epoch = epoch;
  hello.name = name;
  return hello;
}

std::string first_record(Cipher cipher, const Key& key) {
  const std::string text = "how much is the loss?";
  base::Bytes record;
  record.resize(text.size() + SealedRecord::kOverhead);
  Sealer(cipher, key).seal(std::as_bytes(std::span(text)).data(), text.size(), record.data());
  return hex(record.span());
}

TEST(HandshakeVectors, AreTheMessagesAndKeysOfThisImplementation) {
  const auto key = SecretKey::stretch("stitch: the secret of the vectors");
  auto cases = read_vectors();
  ASSERT_EQ(cases.size(), 5U);
  cases.erase("");
  for (auto& [name, values] : cases) {
    SCOPED_TRACE(name);
    const bool aes = name.ends_with("AES-256-GCM");
    const Handshake::Terms terms{name.starts_with("without") ? nullptr : key,
                                 name.ends_with("off") ? Encryption::off : Encryption::on};
    Handshake connecting(hello_of(1, 7, "left"), Wanted{2, 9}, terms, nullptr,
                         counted(0x00, 0x40, aes));
    Handshake accepting(hello_of(2, 9, "right"), std::nullopt, terms, nullptr,
                        counted(0x20, 0x60, aes));
    EXPECT_EQ(hex(connecting.greeting().span()), values["greeting of the connecting side"]);
    EXPECT_EQ(hex(accepting.greeting().span()), values["greeting of the accepting side"]);
    const auto introduction = connecting.receive(accepting.greeting().span());
    ASSERT_EQ(introduction.size(), 1U);
    EXPECT_EQ(hex(introduction[0].span()), values["introduction of the connecting side"]);
    static_cast<void>(accepting.receive(connecting.greeting().span()));
    const auto answer = accepting.receive(introduction[0].span());
    ASSERT_EQ(answer.size(), 1U);
    EXPECT_EQ(hex(answer[0].span()), values["introduction of the accepting side"]);
    const auto acceptance = connecting.receive(answer[0].span());
    ASSERT_EQ(acceptance.size(), 1U);
    EXPECT_EQ(hex(acceptance[0].span()), values["acceptance"]);
    static_cast<void>(accepting.receive(acceptance[0].span()));
    ASSERT_EQ(accepting.state(), State::open);
    ASSERT_EQ(accepting.keys().has_value(), values.contains("key from the accepting side"));
    if (!accepting.keys()) continue;
    const SessionKeys& keys = *accepting.keys();
    EXPECT_EQ(keys.cipher, aes ? Cipher::aes256_gcm : Cipher::chacha20_poly1305);
    EXPECT_EQ(hex(keys.from_connecting.span()), values["key from the connecting side"]);
    EXPECT_EQ(hex(keys.from_accepting.span()), values["key from the accepting side"]);
    if (aes && !has_aes_instructions()) continue;
    EXPECT_EQ(first_record(keys.cipher, keys.from_connecting),
              values["record 0 from the connecting side"]);
    EXPECT_EQ(first_record(keys.cipher, keys.from_accepting),
              values["record 0 from the accepting side"]);
  }
}

// Mark, version and size of a greeting never change: two that differ say both, each to its user,
// as soon as the greetings have crossed.
TEST(HandshakeVectors, AGreetingOfAnEarlierVersionIsAnsweredNamingBoth) {
  const auto before = read_vectors()[""];
  for (const bool connecting : {true, false}) {
    const std::string theirs =
        bytes_of(before.at(connecting ? "greeting of an accepting side, version 7"
                                      : "greeting of a connecting side, version 7"));
    ASSERT_EQ(theirs.size(), Greeting::kBytes);
    Handshake self(hello_of(1, 7, "left"), connecting ? std::optional(Wanted{2}) : std::nullopt,
                   {});
    const std::string ours = hex(self.greeting().span());
    EXPECT_TRUE(ours.starts_with("535448490800")) << "the other finds mark and version there";
    EXPECT_EQ(ours.size(), 2 * Greeting::kBytes);
    const auto answer = self.receive(std::as_bytes(std::span(theirs)));
    ASSERT_EQ(self.state(), State::refused);
    EXPECT_EQ(self.error().code(), ErrorCode::protocol);
    EXPECT_STREQ(self.error().what(),
                 "peer speaks protocol version 7, this worker speaks version 8");
    ASSERT_EQ(answer.size(), 1U);
    EXPECT_TRUE(is_refusal(answer[0].span()));
  }
}

}  // namespace
}  // namespace stitch::transport::handshake_vectors_test
