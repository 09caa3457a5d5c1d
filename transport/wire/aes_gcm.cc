#include "stitch/transport/wire/aes_gcm.h"

#include <sodium.h>

#ifdef STITCH_HAS_LIBCRYPTO
#include <openssl/evp.h>
#endif

#include <algorithm>

#include "stitch/base/error.h"

namespace stitch::transport {

#ifdef STITCH_HAS_LIBCRYPTO

namespace {

void check(int result) {
  if (result != 1) throw Error(ErrorCode::internal, "AES-256-GCM of libcrypto failed");
}

// libcrypto counts in int.
constexpr std::size_t kMaxStepBytes = std::size_t{1} << 30;

template <class Update>
void update_all(Update update, EVP_CIPHER_CTX* context, const unsigned char* from,
                std::size_t bytes, unsigned char* out) {
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t step = std::min(bytes - done, kMaxStepBytes);
    int written = 0;
    check(update(context, out + done, &written, from + done, static_cast<int>(step)));
    done += step;
  }
}

}  // namespace

struct AesGcm::State {
  struct Free {
    void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
  };
  std::unique_ptr<EVP_CIPHER_CTX, Free> sealing{EVP_CIPHER_CTX_new()};
  std::unique_ptr<EVP_CIPHER_CTX, Free> opening{EVP_CIPHER_CTX_new()};
};

AesGcm::AesGcm(std::span<const unsigned char, 32> key) : state_(std::make_unique<State>()) {
  if (!state_->sealing || !state_->opening)
    throw Error(ErrorCode::overloaded, "there is no memory for a cipher");
  check(EVP_EncryptInit_ex(state_->sealing.get(), EVP_aes_256_gcm(), nullptr, key.data(), nullptr));
  check(EVP_DecryptInit_ex(state_->opening.get(), EVP_aes_256_gcm(), nullptr, key.data(), nullptr));
}

AesGcm::~AesGcm() = default;  // libcrypto wipes what it frees

void AesGcm::seal(const unsigned char* nonce, const unsigned char* plain, std::size_t bytes,
                  unsigned char* out, unsigned char* tag) {
  EVP_CIPHER_CTX* const context = state_->sealing.get();
  check(EVP_EncryptInit_ex(context, nullptr, nullptr, nullptr, nonce));
  update_all(&EVP_EncryptUpdate, context, plain, bytes, out);
  int written = 0;
  unsigned char none[kTagBytes];
  check(EVP_EncryptFinal_ex(context, none, &written));
  check(EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_GET_TAG, kTagBytes, tag));
}

bool AesGcm::open(const unsigned char* nonce, const unsigned char* sealed, std::size_t bytes,
                  unsigned char* out, const unsigned char* tag) {
  EVP_CIPHER_CTX* const context = state_->opening.get();
  unsigned char expected[kTagBytes];
  std::copy_n(tag, kTagBytes, expected);
  check(EVP_DecryptInit_ex(context, nullptr, nullptr, nullptr, nonce));
  update_all(&EVP_DecryptUpdate, context, sealed, bytes, out);
  check(EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_SET_TAG, kTagBytes, expected));
  int written = 0;
  unsigned char none[kTagBytes];
  if (EVP_DecryptFinal_ex(context, none, &written) == 1) return true;
  if (bytes > 0) sodium_memzero(out, bytes);
  return false;
}

#else

struct AesGcm::State {
  alignas(16) crypto_aead_aes256gcm_state aes;
};

AesGcm::AesGcm(std::span<const unsigned char, 32> key) : state_(std::make_unique<State>()) {
  crypto_aead_aes256gcm_beforenm(&state_->aes, key.data());
}

AesGcm::~AesGcm() { sodium_memzero(&state_->aes, sizeof(state_->aes)); }

void AesGcm::seal(const unsigned char* nonce, const unsigned char* plain, std::size_t bytes,
                  unsigned char* out, unsigned char* tag) {
  crypto_aead_aes256gcm_encrypt_detached_afternm(out, tag, nullptr, plain, bytes, nullptr, 0,
                                                 nullptr, nonce, &state_->aes);
}

bool AesGcm::open(const unsigned char* nonce, const unsigned char* sealed, std::size_t bytes,
                  unsigned char* out, const unsigned char* tag) {
  return crypto_aead_aes256gcm_decrypt_detached_afternm(out, nullptr, sealed, bytes, tag, nullptr,
                                                        0, nonce, &state_->aes) == 0;
}

#endif

}  // namespace stitch::transport
