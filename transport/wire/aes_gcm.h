#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace stitch::transport {

// AES-256-GCM (NIST SP 800-38D) with nonces of 12 bytes and tags of 16, under one key. By libcrypto
// where the build has found it, since that uses the vector AES instructions of newer processors and
// is two to three times as fast; else by libsodium. Both give the same bytes. Not thread-safe.
// REQUIRES: has_aes_instructions().
class AesGcm {
 public:
  static constexpr std::size_t kNonceBytes = 12;
  static constexpr std::size_t kTagBytes = 16;

  explicit AesGcm(std::span<const unsigned char, 32> key);
  ~AesGcm();
  AesGcm(const AesGcm&) = delete;
  AesGcm& operator=(const AesGcm&) = delete;

  // Encrypts `bytes` bytes of `plain`, which may be `out`, and writes the tag to `tag`.
  void seal(const unsigned char* nonce, const unsigned char* plain, std::size_t bytes,
            unsigned char* out, unsigned char* tag);
  // The reverse, likewise in place. False when the tag does not match; `out` has no plain text
  // then.
  [[nodiscard]] bool open(const unsigned char* nonce, const unsigned char* sealed,
                          std::size_t bytes, unsigned char* out, const unsigned char* tag);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stitch::transport
