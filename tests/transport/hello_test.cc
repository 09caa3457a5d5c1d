#include "stitch/transport/hello.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "stitch/transport/error.h"
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
  EXPECT_STREQ(error.what(), "peer speaks protocol version 9, this worker speaks version 2");
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

}  // namespace
}  // namespace stitch::transport
