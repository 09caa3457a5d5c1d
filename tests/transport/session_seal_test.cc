// The key of a secret, the keys of a session and sealed records, and attacks on them.
#include "stitch/transport/wire/session_seal.h"
#include "stitch/transport/wire/aes_gcm.h"
#include "stitch/transport/wire/secret_key.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::session_seal_test {
namespace {

using stitch::testing::error_of;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string text_of(const Key& key) {
  return std::string(reinterpret_cast<const char*>(key.data()), Key::kBytes);
}

TEST(SecretKey, StretchesEqualSecretsToEqualKeys) {
  const auto first = SecretKey::stretch("open sesame");
  const auto again = SecretKey::stretch("open sesame");
  const auto other = SecretKey::stretch("open sesame ");
  const auto plain = SecretKey::from_random("open sesame");
  const auto hash = [](const auto& key) { return text_of(key->hash("label", {bytes_of("x")})); };
  EXPECT_EQ(hash(first), hash(again));
  EXPECT_NE(hash(first), hash(other));
  EXPECT_NE(hash(first), hash(plain));
}

TEST(SecretKey, RefusesAnEmptySecret) {
  for (const auto& make : {&SecretKey::stretch, &SecretKey::from_random}) {
    const Error error = error_of([&] { static_cast<void>(make("")); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_TRUE(std::string(error.what()).starts_with("the secret is empty")) << error.what();
  }
}

TEST(SecretKey, HashesDependOnLabelPartsAndWhereTheyEnd) {
  const auto key = SecretKey::from_random("s");
  const std::string base = text_of(key->hash("label", {bytes_of("ab"), bytes_of("c")}));
  EXPECT_EQ(base, text_of(key->hash("label", {bytes_of("ab"), bytes_of("c")})));
  EXPECT_NE(base, text_of(key->hash("label", {bytes_of("a"), bytes_of("bc")})));
  EXPECT_NE(base, text_of(key->hash("label", {bytes_of("abc")})));
  EXPECT_NE(base, text_of(key->hash("label", {bytes_of("ab"), bytes_of("c"), {}})));
  EXPECT_NE(base, text_of(key->hash("labela", {bytes_of("b"), bytes_of("c")})));
}

TEST(Key, ComparesWholeKeysOnly) {
  const Key key = SecretKey::from_random("s")->hash("label", {});
  Key other = key;
  EXPECT_TRUE(key.equals(other.span()));
  EXPECT_FALSE(key.equals(other.span().first(31)));
  other.data()[31] ^= std::byte{1};
  EXPECT_FALSE(key.equals(other.span()));
}

TEST(KeyAgreement, BothSidesFindTheSameSecret) {
  const KeyAgreement left(Key::random());
  const KeyAgreement right(Key::random());
  EXPECT_TRUE(left.shared_with(right.public_key().span())
                  .equals(right.shared_with(left.public_key().span()).span()));
  EXPECT_FALSE(left.shared_with(right.public_key().span())
                   .equals(left.shared_with(left.public_key().span()).span()));
}

TEST(KeyAgreement, RefusesKeysOfLowOrder) {
  const KeyAgreement self(Key::random());
  Key low_order;  // zero, and one
  for (int i = 0; i < 2; ++i) {
    low_order.data()[0] = static_cast<std::byte>(i);
    EXPECT_EQ(error_of([&] { static_cast<void>(self.shared_with(low_order.span())); }).code(),
              ErrorCode::unauthenticated);
  }
  EXPECT_EQ(error_of([&] { static_cast<void>(self.shared_with(bytes_of("short"))); }).code(),
            ErrorCode::unauthenticated);
}

TEST(SessionKeys, DependOnAllInputs) {
  const auto secret = SecretKey::from_random("s");
  const auto other = SecretKey::from_random("t");
  const auto keys = [](const auto& key, const char* label, const char* transcript,
                       const char* shared, Cipher cipher) {
    return derive_session_keys(*key, label, bytes_of(transcript), bytes_of(shared), cipher);
  };
  const auto aes = Cipher::aes256_gcm;
  const SessionKeys base = keys(secret, "stitch worker", "words", "dh", aes);
  EXPECT_TRUE(base.from_connecting.equals(
      keys(secret, "stitch worker", "words", "dh", aes).from_connecting.span()));
  EXPECT_FALSE(base.from_connecting.equals(base.from_accepting.span()));
  for (const SessionKeys& each :
       {keys(other, "stitch worker", "words", "dh", aes),
        keys(secret, "stitch store", "words", "dh", aes),
        keys(secret, "stitch worker", "Words", "dh", aes),
        keys(secret, "stitch worker", "words", "DH", aes),
        keys(secret, "stitch worker", "wordsd", "h", aes),
        keys(secret, "stitch worker", "words", "dh", Cipher::chacha20_poly1305)}) {
    EXPECT_FALSE(base.from_connecting.equals(each.from_connecting.span()));
    EXPECT_FALSE(base.from_accepting.equals(each.from_accepting.span()));
  }
}

TEST(Encryption, HasNames) {
  for (const auto each : {Encryption::off, Encryption::on})
    EXPECT_EQ(encryption_named(name_of(each)), each);
  EXPECT_EQ(encryption_named("On"), std::nullopt);
}

class SealedRecords : public ::testing::TestWithParam<Cipher> {
 protected:
  void SetUp() override {
    if (GetParam() == Cipher::aes256_gcm && !has_aes_instructions())
      GTEST_SKIP() << "this processor has no AES instructions";
    sealer_ = make<Sealer>(key_);
    opener_ = make<Opener>(key_);
  }
  template <class T>
  [[nodiscard]] std::unique_ptr<T> make(const Key& key) const {
    return std::make_unique<T>(GetParam(), key);
  }
  [[nodiscard]] std::string seal(const std::string& plain) {
    std::string out(plain.size() + SealedRecord::kOverhead, '\0');
    sealer_->seal(reinterpret_cast<const std::byte*>(plain.data()), plain.size(),
                  reinterpret_cast<std::byte*>(out.data()));
    return out;
  }
  // Opens a record; throws the error.
  [[nodiscard]] std::string open(Opener& opener, std::string record) {
    auto* const at = reinterpret_cast<std::byte*>(record.data());
    const std::size_t bytes = opener.open_header(at);
    EXPECT_EQ(bytes + SealedRecord::kOverhead, record.size());
    std::string plain(bytes, '\0');
    opener.open(at + SealedRecord::kHeaderBytes, bytes, reinterpret_cast<std::byte*>(plain.data()));
    return plain;
  }
  void expect_refused(Opener& opener, const std::string& record) {
    const Error error = error_of([&] { static_cast<void>(open(opener, record)); });
    EXPECT_EQ(error.code(), ErrorCode::unauthenticated) << error.what();
  }
  const Key key_ = SecretKey::from_random("s")->hash("direction", {});
  std::unique_ptr<Sealer> sealer_;
  std::unique_ptr<Opener> opener_;
};

TEST_P(SealedRecords, OpenInOrderAndHideTheirText) {
  for (const std::size_t bytes : {0UL, 1UL, 15UL, 16UL, 17UL, 1000UL, 65536UL}) {
    const std::string plain(bytes, 'p');
    const std::string sealed = seal(plain);
    EXPECT_EQ(sealed.size(), bytes + SealedRecord::kOverhead);
    if (bytes > 100) {
      EXPECT_EQ(sealed.find(std::string(50, 'p')), std::string::npos);
    }
    EXPECT_EQ(open(*opener_, sealed), plain);
  }
  EXPECT_EQ(sealer_->records(), 7U);
  EXPECT_EQ(opener_->records(), 7U);
}

TEST_P(SealedRecords, AreSealedAndOpenedInPlace) {
  const std::string plain(1000, 'p');
  std::string record(plain.size() + SealedRecord::kOverhead, '\0');
  std::memcpy(record.data() + SealedRecord::kHeaderBytes, plain.data(), plain.size());
  auto* const at = reinterpret_cast<std::byte*>(record.data());
  auto* const body = at + SealedRecord::kHeaderBytes;
  sealer_->seal(body, plain.size(), at);
  EXPECT_EQ(opener_->open_header(at), plain.size());
  opener_->open(body, plain.size(), body);
  EXPECT_EQ(record.substr(SealedRecord::kHeaderBytes, plain.size()), plain);
}

TEST_P(SealedRecords, EqualTextsGiveDifferentRecords) {
  EXPECT_NE(seal("the same").substr(12 + 8), seal("the same").substr(12 + 8));
}

TEST_P(SealedRecords, AByteChangedAnywhereIsNoticed) {
  const std::string sealed = seal("an empty call, say");
  for (std::size_t i = 0; i < sealed.size(); ++i) {
    std::string changed = sealed;
    changed[i] = static_cast<char>(changed[i] ^ 0x40);
    expect_refused(*opener_, changed);
  }
  EXPECT_EQ(open(*opener_, sealed), "an empty call, say");
}

TEST_P(SealedRecords, RepeatedMissingAndReorderedOnesAreNoticed) {
  const std::string first = seal("first");
  const std::string second = seal("secnd");
  const std::string third = seal("third");
  expect_refused(*opener_, second);  // the first is missing
  EXPECT_EQ(open(*opener_, first), "first");
  expect_refused(*opener_, first);  // repeated
  expect_refused(*opener_, third);  // before its turn
  EXPECT_EQ(open(*opener_, second), "secnd");
}

TEST_P(SealedRecords, ReflectedOnesAreNoticed) {
  Key other = key_;
  other.data()[0] ^= std::byte{1};
  const auto back = make<Opener>(other);  // what the sender expects from its peer
  expect_refused(*back, seal("there and back"));
}

TEST_P(SealedRecords, TheBodyOfOneUnderTheHeaderOfAnotherIsNoticed) {
  const std::string first = seal("aaaaa");
  const std::string second = seal("bbbbb");
  expect_refused(*opener_, first.substr(0, 12) + second.substr(12));
}

TEST_P(SealedRecords, GoOnWithANewKeyAfterManyRecords) {
  std::string last;
  for (std::uint64_t i = 0; i < SealedRecord::kRecordsPerKey; ++i) {
    last = seal("");
    ASSERT_EQ(open(*opener_, last), "");
  }
  for (int i = 0; i < 3; ++i) EXPECT_EQ(open(*opener_, seal("beyond")), "beyond");
  EXPECT_EQ(opener_->records(), SealedRecord::kRecordsPerKey + 3);
}

// NIST's test case 14 of GCM, so that every library gives the same bytes.
TEST(AesGcm, GivesTheBytesOfTheStandard) {
  if (!has_aes_instructions()) GTEST_SKIP() << "this processor has no AES instructions";
  constexpr std::array<unsigned char, 16> kSealed{0xce, 0xa7, 0x40, 0x3d, 0x4d, 0x60, 0x6b, 0x6e,
                                                  0x07, 0x4e, 0xc5, 0xd3, 0xba, 0xf3, 0x9d, 0x18};
  constexpr std::array<unsigned char, 16> kTag{0xd0, 0xd1, 0xc8, 0xa7, 0x99, 0x99, 0x6b, 0xf0,
                                               0x26, 0x5b, 0x98, 0xb5, 0xd4, 0x8a, 0xb9, 0x19};
  const std::array<unsigned char, 32> key{};
  const std::array<unsigned char, AesGcm::kNonceBytes> nonce{};
  std::array<unsigned char, 16> text{};
  std::array<unsigned char, 16> tag{};
  AesGcm aes(key);
  aes.seal(nonce.data(), text.data(), text.size(), text.data(), tag.data());
  EXPECT_EQ(text, kSealed);
  EXPECT_EQ(tag, kTag);
  ASSERT_TRUE(aes.open(nonce.data(), text.data(), text.size(), text.data(), tag.data()));
  EXPECT_EQ(text, (std::array<unsigned char, 16>{}));
  text = kSealed;
  tag[15] ^= 1;
  EXPECT_FALSE(aes.open(nonce.data(), text.data(), text.size(), text.data(), tag.data()));
  EXPECT_EQ(text, (std::array<unsigned char, 16>{}));  // no plain text is left
}

INSTANTIATE_TEST_SUITE_P(Ciphers, SealedRecords,
                         ::testing::Values(Cipher::aes256_gcm, Cipher::chacha20_poly1305),
                         [](const auto& info) {
                           return info.param == Cipher::aes256_gcm ? "aes" : "chacha";
                         });

}  // namespace
}  // namespace stitch::transport::session_seal_test
