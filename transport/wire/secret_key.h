#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>

namespace stitch::transport {

// The bytes of a key, a proof or a hash; wiped by the destructor.
class Key {
 public:
  static constexpr std::size_t kBytes = 32;

  Key() noexcept = default;  // zeros
  [[nodiscard]] static Key random();
  Key(const Key&) noexcept = default;
  Key& operator=(const Key&) noexcept = default;
  ~Key();

  [[nodiscard]] std::byte* data() noexcept { return bytes_.data(); }
  [[nodiscard]] const std::byte* data() const noexcept { return bytes_.data(); }
  [[nodiscard]] std::span<const std::byte> span() const noexcept { return bytes_; }
  // Compares in constant time; false for another length.
  [[nodiscard]] bool equals(std::span<const std::byte> other) const noexcept;

 private:
  std::array<std::byte, kBytes> bytes_{};
};

// The key derived from the user's secret: stretched once, at start, by argon2id (libsodium
// crypto_pwhash, interactive limits), which makes each guess of a weak secret expensive for an
// attacker who has recorded a proof. The salt is the same everywhere: workers that have only the
// secret in common must get the same key. It is kept between guard pages in read-only memory that
// is not dumped and is wiped at the end; it is locked where the system allows it, otherwise
// stretch() reports that once on stderr. Shared by all endpoints and stores of a worker; it cannot
// be printed. Thread contract: any thread.
class SecretKey {
 public:
  // With this at its front a secret is 32 random bytes, in hex, which need no stretching: that of
  // stitch-run.
  static constexpr std::string_view kRandomSecret = "stitch-random:";
  // Takes 64 MiB and in the order of 0.1 s, unless the secret is such. Reports a secret of few
  // bytes on stderr. Throws Error(invalid_argument) for an empty secret, Error(overloaded) when
  // there is no memory for it.
  [[nodiscard]] static std::shared_ptr<const SecretKey> stretch(std::string_view secret);
  // The same without the stretching: for tests, and for secrets that are random bytes already.
  [[nodiscard]] static std::shared_ptr<const SecretKey> from_random(std::string_view secret);
  ~SecretKey();
  SecretKey(const SecretKey&) = delete;
  SecretKey& operator=(const SecretKey&) = delete;

  // BLAKE2b-256 keyed with the secret over `label` and `parts`, each with its length before it, so
  // that no two lists give the same bytes: proofs and keys. Different uses have different labels:

  [[nodiscard]] Key hash(std::string_view label,
                         std::initializer_list<std::span<const std::byte>> parts) const;

 private:
  SecretKey();
  unsigned char* key_;  // of sodium_malloc
};

}  // namespace stitch::transport
