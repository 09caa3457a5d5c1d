#include "stitch/transport/hello.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "stitch/transport/error.h"
#include "stitch/transport/handshake.h"
#include "tests/support/error_of.h"

namespace stitch::transport {
namespace {

using stitch::testing::error_of;

Hello make_hello(std::uint32_t id, const std::string& name) {
  Hello hello;
  hello.features = 0x8000000000000001ULL;
  hello.world = 42;
  hello.id = id;
  hello.epoch = 7;
  hello.name = name;
  return hello;
}

// Runs two handshakes against each other, messages alternating, until nobody has anything to say.
void exchange(Handshake& left, Handshake& right) {
  std::vector<Bytes> to_right;
  std::vector<Bytes> to_left;
  to_right.push_back(left.greeting());
  to_left.push_back(right.greeting());
  while (!to_right.empty() || !to_left.empty()) {
    std::vector<Bytes> answers_left;
    std::vector<Bytes> answers_right;
    for (const Bytes& message : to_right) {
      for (Bytes& answer : right.receive(message.span())) answers_left.push_back(std::move(answer));
    }
    for (const Bytes& message : to_left) {
      for (Bytes& answer : left.receive(message.span())) answers_right.push_back(std::move(answer));
    }
    to_left = std::move(answers_left);
    to_right = std::move(answers_right);
  }
}

TEST(Hello, SurvivesEncodingAndDecoding) {
  Hello hello = make_hello(3, "trainer-3");
  hello.authenticated = true;
  hello.nonce[0] = std::byte{1};
  hello.nonce[31] = std::byte{2};
  const Bytes bytes = encode(hello);
  const Hello decoded = decode_hello(bytes.span());
  EXPECT_EQ(decoded.version, Hello::kVersion);
  EXPECT_EQ(decoded.features, hello.features);
  EXPECT_EQ(decoded.world, hello.world);
  EXPECT_EQ(decoded.id, hello.id);
  EXPECT_EQ(decoded.epoch, hello.epoch);
  EXPECT_EQ(decoded.name, hello.name);
  EXPECT_EQ(decoded.nonce, hello.nonce);
  EXPECT_TRUE(decoded.authenticated);
}

TEST(Hello, NamesBothVersionsWhenTheyDiffer) {
  Hello hello = make_hello(3, "future");
  hello.version = 9;
  const Bytes bytes = encode(hello);
  const Error error = error_of([&] { static_cast<void>(decode_hello(bytes.span())); });
  EXPECT_EQ(error.code(), ErrorCode::protocol);
  EXPECT_STREQ(error.what(), "peer speaks protocol version 9, this worker speaks version 1");
}

TEST(Hello, RefusesStrangersTruncationsAndMutations) {
  const Bytes good = encode(make_hello(3, "trainer-3"));
  const std::string http = "GET / HTTP/1.1\r\n\r\n";
  EXPECT_EQ(error_of([&] {
              static_cast<void>(
                  decode_hello({reinterpret_cast<const std::byte*>(http.data()), http.size()}));
            }).code(),
            ErrorCode::protocol);
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_EQ(error_of([&] { static_cast<void>(decode_hello(good.span().first(size))); }).code(),
              ErrorCode::protocol)
        << size;
  }
  std::mt19937 random(5);
  for (int round = 0; round < 20000; ++round) {
    Bytes mutant;
    mutant.append(good.data(), random() % 2 == 0 ? good.size() : random() % (good.size() + 1));
    for (int i = 0; i < 3 && mutant.size() > 0; ++i)
      mutant.data()[random() % mutant.size()] = static_cast<std::byte>(random());
    try {
      EXPECT_LE(decode_hello(mutant.span()).name.size(), Hello::kMaxBytes);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::protocol);
    }
  }
}

TEST(Hello, RefusesNamesThatAreTooLong) {
  EXPECT_EQ(
      error_of([] { static_cast<void>(encode(make_hello(1, std::string(500, 'n')))); }).code(),
      ErrorCode::invalid_argument);
}

TEST(Hello, OtherWorldsAndUnequalUseOfASecretAreRefused) {
  const Hello self = make_hello(1, "ps0");
  Hello peer = make_hello(2, "trainer0");
  EXPECT_NO_THROW(check_peer(self, peer));
  peer.world = 43;
  Error error = error_of([&] { check_peer(self, peer); });
  EXPECT_EQ(error.code(), ErrorCode::protocol);
  EXPECT_STREQ(error.what(),
               "peer \"trainer0\" (id 2) belongs to world 43, worker \"ps0\" to world 42");
  peer.world = 42;
  peer.authenticated = true;
  error = error_of([&] { check_peer(self, peer); });
  EXPECT_EQ(error.code(), ErrorCode::unauthenticated);
  EXPECT_STREQ(error.what(), "peer \"trainer0\" (id 2) demands a secret, worker \"ps0\" has none");
}

TEST(Proof, HoldsForTheSecretBothHellosAndTheDirection) {
  Hello prover = make_hello(1, "ps0");
  Hello verifier = make_hello(2, "trainer0");
  prover.nonce[3] = std::byte{9};
  const Bytes proof = make_proof("secret", prover, verifier);
  EXPECT_EQ(proof.size(), 32U);
  EXPECT_NO_THROW(check_proof(proof.span(), "secret", prover, verifier));
  EXPECT_EQ(error_of([&] { check_proof(proof.span(), "Secret", prover, verifier); }).code(),
            ErrorCode::unauthenticated);
  EXPECT_EQ(error_of([&] { check_proof(proof.span(), "secret", verifier, prover); }).code(),
            ErrorCode::unauthenticated);
  EXPECT_EQ(
      error_of([&] { check_proof(proof.span().first(31), "secret", prover, verifier); }).code(),
      ErrorCode::unauthenticated);
  verifier.nonce[0] = std::byte{1};
  const Error error = error_of([&] { check_proof(proof.span(), "secret", prover, verifier); });
  EXPECT_EQ(error.code(), ErrorCode::unauthenticated);
  EXPECT_STREQ(error.what(), "peer \"ps0\" (id 1) does not know the secret of worker \"trainer0\"");
}

TEST(Handshake, OpensOnBothSidesWithAndWithoutASecret) {
  for (const std::string secret : {"", "open sesame"}) {
    Handshake left(make_hello(1, "left"), secret);
    Handshake right(make_hello(2, "right"), secret);
    exchange(left, right);
    ASSERT_EQ(left.state(), Handshake::State::open);
    ASSERT_EQ(right.state(), Handshake::State::open);
    EXPECT_EQ(left.peer().name, "right");
    EXPECT_EQ(right.peer().name, "left");
    EXPECT_EQ(left.peer().authenticated, !secret.empty());
  }
}

TEST(Handshake, TakesAFreshNonceEveryTime) {
  const Bytes first = Handshake(make_hello(1, "left"), "s").greeting();
  const Bytes second = Handshake(make_hello(1, "left"), "s").greeting();
  EXPECT_NE(decode_hello(first.span()).nonce, decode_hello(second.span()).nonce);
}

TEST(Handshake, WrongSecretsAreRefusedOnBothSides) {
  Handshake left(make_hello(1, "left"), "one");
  Handshake right(make_hello(2, "right"), "two");
  exchange(left, right);
  ASSERT_EQ(left.state(), Handshake::State::refused);
  ASSERT_EQ(right.state(), Handshake::State::refused);
  EXPECT_EQ(left.error().code(), ErrorCode::unauthenticated);
  EXPECT_EQ(right.error().code(), ErrorCode::unauthenticated);
}

TEST(Handshake, ARefusalReachesThePeerInWords) {
  Handshake left(make_hello(1, "left"), "");
  std::vector<Bytes> answer;
  {
    Hello stranger = make_hello(2, "right");
    stranger.world = 1;
    Handshake right(stranger, "");
    answer = right.receive(left.greeting().span());
  }
  ASSERT_EQ(answer.size(), 1U);
  EXPECT_TRUE(left.receive(answer[0].span()).empty());
  ASSERT_EQ(left.state(), Handshake::State::refused);
  EXPECT_TRUE(left.peer_refused());
  EXPECT_TRUE(left.error().remote());
  EXPECT_STREQ(left.error().what(),
               "connection refused by the peer: peer \"left\" (id 1) belongs to world 42, worker "
               "\"right\" to world 1");
}

TEST(Handshake, AMirrorDoesNotPassForAPeer) {
  Handshake self(make_hello(1, "self"), "secret");
  const std::vector<Bytes> answer = self.receive(self.greeting().span());
  EXPECT_EQ(self.state(), Handshake::State::refused);
  EXPECT_EQ(self.error().code(), ErrorCode::unauthenticated);
}

TEST(Handshake, AVerdictCannotReplaceAProof) {
  Handshake self(make_hello(1, "self"), "secret");
  Handshake thief(make_hello(2, "thief"), "guess");
  static_cast<void>(self.receive(thief.greeting().span()));
  ASSERT_EQ(self.state(), Handshake::State::proof);
  const std::string verdict = "STOK";
  static_cast<void>(
      self.receive({reinterpret_cast<const std::byte*>(verdict.data()), verdict.size()}));
  EXPECT_EQ(self.state(), Handshake::State::refused);
  EXPECT_EQ(self.error().code(), ErrorCode::unauthenticated);
}

TEST(Handshake, SurvivesRandomMessages) {
  std::mt19937 random(11);
  const std::vector<std::string> magics{"STHI", "STPF", "STOK", "STNO", "STCH"};
  for (int round = 0; round < 20000; ++round) {
    Handshake self(make_hello(1, "self"), round % 2 == 0 ? "" : "secret");
    if (round % 3 == 0) static_cast<void>(self.receive(encode(make_hello(2, "peer")).span()));
    for (int i = 0; i < 4; ++i) {
      std::string message = magics[random() % magics.size()];
      const std::size_t more = random() % 100;
      for (std::size_t k = 0; k < more; ++k) message.push_back(static_cast<char>(random()));
      message.resize(random() % 4 == 0 ? random() % (message.size() + 1) : message.size());
      static_cast<void>(
          self.receive({reinterpret_cast<const std::byte*>(message.data()), message.size()}));
    }
    EXPECT_TRUE(self.state() != Handshake::State::open || round % 2 == 0);
  }
}

}  // namespace
}  // namespace stitch::transport
