// The handshake of workers without any I/O: success, refusals, and attacks by peers without the
// secret.
#include "stitch/transport/wire/handshake.h"
#include "stitch/transport/wire/handshake_messages.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::handshake_test {
namespace {

using stitch::testing::error_of;
using State = Handshake::State;

Hello make_hello(std::uint32_t id, const std::string& name) {
  Hello hello;
  hello.features = 0x8000000000000001ULL;
  hello.world = 42;
  hello.id = id;
  hello.epoch = 7;
  hello.name = name;
  return hello;
}

Handshake::Terms terms(const std::string& secret, Encryption encryption = Encryption::on) {
  return {secret.empty() ? nullptr : SecretKey::from_random(secret), encryption};
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

// The connecting and the accepting side, and the messages of each.
struct Sides {
  Sides(Handshake::Terms of_connecting, Handshake::Terms of_accepting,
        Handshake::Check check = nullptr, Wanted wanted = {2, 7})
      : connecting(make_hello(1, "left"), wanted, std::move(of_connecting), std::move(check)),
        accepting(make_hello(2, "right"), std::nullopt, std::move(of_accepting)) {}
  Handshake connecting;
  Handshake accepting;
  std::vector<std::string> said_by_connecting;
  std::vector<std::string> said_by_accepting;

  using Change = std::function<void(bool by_connecting, std::size_t index, std::string& message)>;
  // Exchanges messages until neither side has any; each is passed to `change` on its way.
  void exchange(const Change& change = nullptr) {
    std::vector<std::string> to_accepting{text(connecting.greeting())};
    std::vector<std::string> to_connecting{text(accepting.greeting())};
    while (!to_accepting.empty() || !to_connecting.empty()) {
      auto from_accepting = deliver(to_accepting, accepting, said_by_connecting, true, change);
      auto from_connecting = deliver(to_connecting, connecting, said_by_accepting, false, change);
      to_connecting = std::move(from_accepting);
      to_accepting = std::move(from_connecting);
    }
  }
  static std::string text(const base::Bytes& bytes) {
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }

 private:
  static std::vector<std::string> deliver(const std::vector<std::string>& messages, Handshake& to,
                                          std::vector<std::string>& said, bool by_connecting,
                                          const Change& change) {
    std::vector<std::string> answers;
    for (std::string message : messages) {
      if (change) change(by_connecting, said.size(), message);
      said.push_back(message);
      for (const base::Bytes& answer : to.receive(bytes_of(message)))
        answers.push_back(text(answer));
    }
    return answers;
  }
};

TEST(Handshake, OpensWithAndWithoutASecret) {
  for (const std::string secret : {"", "open sesame"}) {
    Sides sides(terms(secret), terms(secret));
    sides.exchange();
    ASSERT_EQ(sides.connecting.state(), State::open);
    ASSERT_EQ(sides.accepting.state(), State::open);
    EXPECT_EQ(sides.connecting.peer().name, "right");
    EXPECT_EQ(sides.accepting.peer().name, "left");
    EXPECT_EQ(sides.accepting.peer().id, 1U);
    EXPECT_EQ(sides.accepting.peer().epoch, 7U);
    EXPECT_EQ(sides.accepting.peer().world, 42U);
    EXPECT_EQ(sides.accepting.peer().features, 0x8000000000000001ULL);
    EXPECT_EQ(sides.accepting.peer().authenticated, !secret.empty());
    EXPECT_EQ(sides.connecting.keys().has_value(), !secret.empty());
  }
}

TEST(Handshake, BothSidesFindTheSameKeysAndOtherOnesEveryTime) {
  Sides sides(terms("s"), terms("s"));
  Sides again(terms("s"), terms("s"));
  sides.exchange();
  again.exchange();
  ASSERT_TRUE(sides.connecting.keys() && sides.accepting.keys() && again.accepting.keys());
  const SessionKeys& one = *sides.connecting.keys();
  const SessionKeys& two = *sides.accepting.keys();
  EXPECT_TRUE(one.from_connecting.equals(two.from_connecting.span()));
  EXPECT_TRUE(one.from_accepting.equals(two.from_accepting.span()));
  EXPECT_FALSE(one.from_accepting.equals(one.from_connecting.span()));
  EXPECT_FALSE(one.from_connecting.equals(again.connecting.keys()->from_connecting.span()));
  EXPECT_EQ(one.cipher == Cipher::aes256_gcm, has_aes_instructions());
}

TEST(Handshake, WithoutEncryptionThereAreNoKeys) {
  Sides sides(terms("s", Encryption::off), terms("s", Encryption::off));
  sides.exchange();
  EXPECT_EQ(sides.accepting.state(), State::open);
  EXPECT_FALSE(sides.connecting.keys() || sides.accepting.keys());
}

TEST(Handshake, TakesAFreshNonceAndKeyEveryTime) {
  Handshake one(make_hello(1, "left"), Wanted{2, 7}, terms("s"));
  Handshake two(make_hello(1, "left"), Wanted{2, 7}, terms("s"));
  const base::Bytes first_words = one.greeting();
  const base::Bytes second_words = two.greeting();
  const Greeting first = decode_greeting(first_words.span());
  const Greeting second = decode_greeting(second_words.span());
  EXPECT_NE(first.nonce, second.nonce);
  EXPECT_NE(first.public_key, second.public_key);
}

TEST(Handshake, AnUnauthenticatedPeerLearnsNeitherNameNorProof) {
  Handshake self(make_hello(0x5a5a, "parameter-server"), std::nullopt, terms("s"));
  Handshake stranger(make_hello(2, "thief"), Wanted{0x5a5a}, terms("guess"));
  std::string heard = Sides::text(self.greeting());
  for (const base::Bytes& answer : self.receive(stranger.greeting().span()))
    heard += Sides::text(answer);
  EXPECT_EQ(heard.size(), Greeting::kBytes);  // a greeting is not answered
  for (const base::Bytes& proof : stranger.receive(bytes_of(heard.substr(0, Greeting::kBytes)))) {
    for (const base::Bytes& answer : self.receive(proof.span())) heard += Sides::text(answer);
  }
  EXPECT_EQ(self.state(), State::refused);
  EXPECT_EQ(heard.find("parameter-server"), std::string::npos);
  EXPECT_EQ(heard.find("ZZ"), std::string::npos);  // its id
  EXPECT_NE(heard.find("does not know the secret of this worker"), std::string::npos);
}

TEST(Handshake, WrongSecretsAreRefusedOnBothSides) {
  Sides sides(terms("one"), terms("two"));
  sides.exchange();
  ASSERT_EQ(sides.connecting.state(), State::refused);
  ASSERT_EQ(sides.accepting.state(), State::refused);
  EXPECT_EQ(sides.connecting.error().code(), ErrorCode::unauthenticated);
  EXPECT_STREQ(sides.accepting.error().what(),
               "peer \"left\" (id 1) does not know the secret of this worker");
  EXPECT_EQ(sides.accepting.error().code(), ErrorCode::unauthenticated);
}

TEST(Handshake, UnequalTermsAreRefusedOnBothSidesNamingBoth) {
  struct Case {
    Handshake::Terms connecting;
    Handshake::Terms accepting;
    const char* text;
    ErrorCode code;
  };
  for (const Case& each : std::vector<Case>{
           {terms(""), terms("s"), "peer uses no secret, this worker demands one",
            ErrorCode::unauthenticated},
           {terms("s"), terms(""), "peer demands a secret, this worker has none",
            ErrorCode::unauthenticated},
           {terms("s", Encryption::off), terms("s"),
            "peer has encryption \"off\", this worker \"on\"", ErrorCode::protocol},
       }) {
    Sides sides(each.connecting, each.accepting);
    sides.exchange();
    ASSERT_EQ(sides.connecting.state(), State::refused);
    ASSERT_EQ(sides.accepting.state(), State::refused);
    EXPECT_STREQ(sides.accepting.error().what(), each.text);
    EXPECT_EQ(sides.accepting.error().code(), each.code);
    EXPECT_EQ(sides.connecting.error().code(), each.code);
    EXPECT_TRUE(sides.said_by_connecting.size() <= 2);  // greeting, refusal: no proof
  }
}

TEST(Handshake, OtherWorldsAreRefusedNamingBoth) {
  Handshake left(make_hello(1, "left"), Wanted{2, 7}, terms("s"));
  Hello other = make_hello(2, "right");
  other.world = 43;
  Handshake right(other, std::nullopt, terms("s"));
  const auto introduction = left.receive(right.greeting().span());
  static_cast<void>(right.receive(left.greeting().span()));
  static_cast<void>(right.receive(introduction.at(0).span()));
  ASSERT_EQ(right.state(), State::refused);
  EXPECT_EQ(right.error().code(), ErrorCode::protocol);
  EXPECT_STREQ(right.error().what(),
               "peer \"left\" (id 1) belongs to world 42, worker \"right\" to world 43");
}

TEST(Handshake, OpensOnlyToTheWorkerAndTheLifeThatIsWanted) {
  for (const std::string secret : {"s", ""}) {
    for (const Wanted wanted : {Wanted{2, 7}, {2, 0}, {3, 7}, {2, 8}, {2, 6}}) {
      Sides sides(terms(secret), terms(secret), nullptr, wanted);
      sides.exchange();
      const bool right = wanted.id == 2 && (wanted.epoch == 0 || wanted.epoch == 7);
      EXPECT_EQ(sides.accepting.state(), right ? State::open : State::refused);
      EXPECT_EQ(sides.connecting.state(), right ? State::open : State::refused);
      if (right) continue;
      for (const Handshake* each : {&sides.connecting, &sides.accepting})
        EXPECT_EQ(each->error().code(), ErrorCode::disconnected);
      EXPECT_EQ(sides.accepting.error().what(),
                "worker id " + std::to_string(wanted.id) + ", epoch " +
                    std::to_string(wanted.epoch) +
                    " is wanted, worker \"right\" (id 2, epoch 7) answers");
    }
  }
}

// The connecting side called worker 3; who listens there passes its words on to worker 2.
TEST(Handshake, ARelayedIntroductionOpensNothing) {
  for (const std::string secret : {"s", ""}) {
    for (const Encryption encryption : {Encryption::on, Encryption::off}) {
      Handshake caller(make_hello(1, "caller"), Wanted{3}, terms(secret, encryption));
      Handshake victim(make_hello(2, "victim"), std::nullopt, terms(secret, encryption));
      const auto introduction = caller.receive(victim.greeting().span());
      static_cast<void>(victim.receive(caller.greeting().span()));
      static_cast<void>(victim.receive(introduction.at(0).span()));
      static_cast<void>(victim.receive(encode_acceptance(Key()).span()));
      EXPECT_EQ(victim.state(), State::refused);
    }
  }
}

// Also where the introduction is for this worker: the last message is the connecting side's own.
TEST(Handshake, NothingButTheConnectingSidesAcceptanceOpensTheAcceptingSide) {
  for (const Encryption encryption : {Encryption::on, Encryption::off}) {
    const auto begun = [&] {
      auto sides = std::make_unique<Sides>(terms("s", encryption), terms("s", encryption));
      const auto introduction = sides->connecting.receive(sides->accepting.greeting().span());
      static_cast<void>(sides->accepting.receive(sides->connecting.greeting().span()));
      const auto answer = sides->accepting.receive(introduction.at(0).span());
      EXPECT_EQ(sides->accepting.state(), State::acceptance);
      sides->said_by_connecting = {
          Sides::text(sides->connecting.receive(answer.at(0).span()).at(0))};
      return sides;
    };
    const std::string of_another = begun()->said_by_connecting[0];
    for (const std::string& words :
         {Sides::text(encode_acceptance(Key())), Sides::text(encode_acceptance(Key::random())),
          std::string("STOK"), of_another}) {
      const auto sides = begun();
      static_cast<void>(sides->accepting.receive(bytes_of(words)));
      EXPECT_EQ(sides->accepting.state(), State::refused);
      EXPECT_FALSE(sides->accepting.keys());
    }
    const auto sides = begun();
    static_cast<void>(sides->accepting.receive(bytes_of(sides->said_by_connecting[0])));
    EXPECT_EQ(sides->accepting.state(), State::open);
  }
}

TEST(Handshake, TheConnectingSideRefusesAPeerThatFailsItsCheck) {
  Sides sides(terms("s"), terms("s"), [](const Hello& peer) {
    EXPECT_EQ(peer.name, "right");
    throw Error(ErrorCode::unauthenticated, "another worker is wanted");
  });
  sides.exchange();
  ASSERT_EQ(sides.connecting.state(), State::refused);
  ASSERT_EQ(sides.accepting.state(), State::refused);
  EXPECT_STREQ(sides.accepting.error().what(),
               "connection refused by the peer: another worker is wanted");
  EXPECT_FALSE(sides.connecting.keys() || sides.accepting.keys());
}

TEST(Handshake, ARefusalReachesThePeerWithItsText) {
  Handshake left(make_hello(1, "left"), Wanted{2, 7}, terms(""));
  std::vector<base::Bytes> answer;
  {
    Handshake right(make_hello(2, "right"), Wanted{1}, terms(""));
    answer = right.receive(left.greeting().span());
  }
  ASSERT_EQ(answer.size(), 1U);
  EXPECT_TRUE(left.receive(answer[0].span()).empty());
  ASSERT_EQ(left.state(), State::refused);
  EXPECT_TRUE(left.peer_refused());
  EXPECT_TRUE(left.error().remote());
  EXPECT_STREQ(left.error().what(),
               "connection refused by the peer: peer says that it is the connecting side, which "
               "this worker is");
}

// What an unauthenticated peer says may be printed on a terminal.
TEST(Handshake, ARefusalsTextIsPrintable) {
  const Error said(ErrorCode::protocol,
                   "red \x1b[31m, \x9b"
                   "31m, \x7f, \xc3\xa9 and ~");
  EXPECT_STREQ(decode_refusal(encode_refusal(said).span()).what(),
               "connection refused by the peer: red ?[31m, ?31m, ?, ?? and ~");
}

TEST(Handshake, AReflectionDoesNotPassForAPeer) {
  for (const auto& wanted : {std::optional(Wanted{1}), std::optional<Wanted>()}) {
    Handshake self(make_hello(1, "self"), wanted, terms("secret"));
    static_cast<void>(self.receive(self.greeting().span()));
    EXPECT_EQ(self.state(), State::refused);
    EXPECT_EQ(self.error().code(), ErrorCode::unauthenticated);
    // Also with changes to the unauthenticated fields.
    for (const std::size_t at : {6UL, 16UL}) {  // the flags (role), the nonce
      Handshake again(make_hello(1, "self"), wanted, terms("secret"));
      std::string words = Sides::text(again.greeting());
      words[at] = static_cast<char>(words[at] ^ 2);
      const auto answer = again.receive(bytes_of(words));
      for (const base::Bytes& each : answer) static_cast<void>(again.receive(each.span()));
      EXPECT_NE(again.state(), State::open);
    }
  }
}

// Opened both connections before there were roles: the messages of one answer the other.
TEST(Handshake, CrossedMessagesOfOneWorkerOpenNothing) {
  for (const bool as_connecting : {false, true}) {
    const auto wanted = as_connecting ? std::optional(Wanted{1}) : std::nullopt;
    Handshake first(make_hello(1, "self"), wanted, terms("s"));
    Handshake second(make_hello(1, "self"), wanted, terms("s"));
    std::vector<base::Bytes> of_first;
    std::vector<base::Bytes> of_second;
    of_first.push_back(first.greeting());
    of_second.push_back(second.greeting());
    for (int round = 0; round < 4; ++round) {
      std::vector<base::Bytes> next_first;
      std::vector<base::Bytes> next_second;
      for (const base::Bytes& each : of_second) {
        for (base::Bytes& answer : first.receive(each.span()))
          next_first.push_back(std::move(answer));
      }
      for (const base::Bytes& each : of_first) {
        for (base::Bytes& answer : second.receive(each.span()))
          next_second.push_back(std::move(answer));
      }
      of_first = std::move(next_first);
      of_second = std::move(next_second);
    }
    for (const Handshake* each : {&first, &second}) {
      ASSERT_EQ(each->state(), State::refused);
      EXPECT_EQ(each->error().code(), ErrorCode::protocol);
    }
  }
}

TEST(Handshake, NothingCanReplaceAProof) {
  for (const std::string words : {"STOK", "STHI", "STNOx"}) {
    Handshake self(make_hello(1, "self"), std::nullopt, terms("secret"));
    Handshake thief(make_hello(2, "thief"), Wanted{1}, terms("guess"));
    static_cast<void>(self.receive(thief.greeting().span()));
    ASSERT_EQ(self.state(), State::introduction);
    static_cast<void>(self.receive(bytes_of(words)));
    EXPECT_EQ(self.state(), State::refused);
  }
}

TEST(Handshake, ARecordedSessionDoesNotOpenAgain) {
  Sides sides(terms("s"), terms("s"));
  sides.exchange();
  ASSERT_EQ(sides.accepting.state(), State::open);
  Handshake accepting(make_hello(2, "right"), std::nullopt, terms("s"));
  for (const std::string& words : sides.said_by_connecting)
    static_cast<void>(accepting.receive(bytes_of(words)));
  EXPECT_EQ(accepting.error().code(), ErrorCode::unauthenticated);
  Handshake connecting(make_hello(1, "left"), Wanted{2, 7}, terms("s"));
  for (const std::string& words : sides.said_by_accepting)
    static_cast<void>(connecting.receive(bytes_of(words)));
  EXPECT_EQ(connecting.error().code(), ErrorCode::unauthenticated);
}

// Each byte of each message, changed in transit, in both directions: versions, flags (roles, use of
// a secret, encryption, AES), features, nonces, keys, names, ids, epochs, worlds, proofs.
TEST(Handshake, AByteChangedAnywhereOpensNeitherSide) {
  Sides good(terms("s"), terms("s"));
  good.exchange();
  for (const bool by_connecting : {true, false}) {
    const auto& said = by_connecting ? good.said_by_connecting : good.said_by_accepting;
    ASSERT_EQ(said.size(), by_connecting ? 3U : 2U);
    for (std::size_t index = 0; index < said.size(); ++index) {
      for (std::size_t at = 0; at < said[index].size(); ++at) {
        for (const int bit : {0x01, 0x04, 0x10, 0x80}) {
          Sides sides(terms("s"), terms("s"));
          sides.exchange([&](bool by, std::size_t number, std::string& message) {
            if (by == by_connecting && number == index)
              message[at] = static_cast<char>(message[at] ^ bit);
          });
          // The side that sends the last message is open until it receives the refusal.
          EXPECT_EQ(sides.connecting.state(), State::refused) << index << " " << at;
          EXPECT_EQ(sides.accepting.state(), State::refused) << index << " " << at;
          for (const Handshake* side : {&sides.connecting, &sides.accepting}) {
            if (side->state() != State::refused) continue;
            EXPECT_TRUE(side->error().code() == ErrorCode::unauthenticated ||
                        side->error().code() == ErrorCode::protocol)
                << side->error().what();
          }
        }
      }
    }
  }
}

TEST(Handshake, MessagesThatAreCutShortOpenNothing) {
  Sides good(terms("s"), terms("s"));
  good.exchange();
  for (std::size_t index = 0; index < good.said_by_connecting.size(); ++index) {
    for (std::size_t size = 0; size < good.said_by_connecting[index].size(); ++size) {
      Sides sides(terms("s"), terms("s"));
      sides.exchange([&](bool by_connecting, std::size_t number, std::string& message) {
        if (by_connecting && number == index) message.resize(size);
      });
      EXPECT_EQ(sides.accepting.state(), State::refused) << index << " " << size;
    }
  }
}

TEST(Greeting, SurvivesEncodingAndDecoding) {
  Greeting greeting;
  greeting.role = Role::accepting;
  greeting.authenticated = true;
  greeting.encryption = Encryption::on;
  greeting.aes = true;
  greeting.features = 0x1122334455667788;
  greeting.nonce[31] = std::byte{2};
  greeting.public_key[0] = std::byte{3};
  const base::Bytes bytes = encode(greeting);
  EXPECT_EQ(bytes.size(), Greeting::kBytes);
  const Greeting decoded = decode_greeting(bytes.span());
  EXPECT_EQ(decoded.role, Role::accepting);
  EXPECT_TRUE(decoded.authenticated && decoded.aes);
  EXPECT_EQ(decoded.encryption, Encryption::on);
  EXPECT_EQ(decoded.features, greeting.features);
  EXPECT_EQ(decoded.nonce, greeting.nonce);
  EXPECT_EQ(decoded.public_key, greeting.public_key);
}

TEST(Greeting, RefusesOtherProtocolsTruncationsAndUnknownFlags) {
  const base::Bytes good = encode(Greeting{});
  EXPECT_EQ(error_of([] {
              static_cast<void>(decode_greeting(bytes_of("GET / HTTP/1.1\r\n\r\n")));
            }).code(),
            ErrorCode::protocol);
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_EQ(error_of([&] { static_cast<void>(decode_greeting(good.span().first(size))); }).code(),
              ErrorCode::protocol);
  }
  for (const char flags : {'\x10', '\x80'}) {
    std::string words = Sides::text(good);
    words[6] = flags;
    EXPECT_EQ(error_of([&] { static_cast<void>(decode_greeting(bytes_of(words))); }).code(),
              ErrorCode::protocol);
  }
}

TEST(Introduction, HasOneSizeAndZerosAfterTheName) {
  base::Bytes words = Introduction::encode(make_hello(1, "a"));
  words.append(Key().data(), Key::kBytes);
  EXPECT_EQ(words.size(), Introduction::kBytes);
  EXPECT_EQ(Introduction::decode(words.span()).who.name, "a");
  words.data()[52] = std::byte{'b'};
  EXPECT_EQ(error_of([&] { static_cast<void>(Introduction::decode(words.span())); }).code(),
            ErrorCode::protocol);
}

TEST(Introduction, RefusesIdsAndEpochsThatNoWorkerHas) {
  const auto decodes = [](std::uint32_t id, std::uint64_t epoch) {
    Hello who = make_hello(id, "a");
    who.epoch = epoch;
    base::Bytes words = Introduction::encode(who);
    words.append(Key().data(), Key::kBytes);
    try {
      return Introduction::decode(words.span()).who.id == id;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::protocol);
      return false;
    }
  };
  for (const std::uint32_t id : {0U, 65'535U, Hello::kStoreId, Hello::kStoreClientId})
    EXPECT_TRUE(decodes(id, Hello::kMaxEpoch)) << id;
  for (const std::uint32_t id : {65'536U, 0xFFFF'FFFFU, 0xFFFF'FFFCU})
    EXPECT_FALSE(decodes(id, 1)) << id;
  EXPECT_FALSE(decodes(1, Hello::kMaxEpoch + 1));
}

TEST(Introduction, RefusesNamesThatAreTooLongOrCannotBePrinted) {
  EXPECT_EQ(error_of([] {
              static_cast<void>(Introduction::encode(make_hello(1, std::string(441, 'n'))));
            }).code(),
            ErrorCode::invalid_argument);
  base::Bytes longest = Introduction::encode(make_hello(1, std::string(440, 'n')));
  EXPECT_EQ(longest.size() + Introduction::kProofBytes, Introduction::kBytes);
  base::Bytes words = Introduction::encode(make_hello(1, "a\x1b[2Jb"));
  words.append(Key().data(), Key::kBytes);
  EXPECT_EQ(error_of([&] { static_cast<void>(Introduction::decode(words.span())); }).code(),
            ErrorCode::protocol);
}

}  // namespace
}  // namespace stitch::transport::handshake_test
