#include "stitch/transport/wire/secret_key.h"

#include <sodium.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "stitch/base/byte_io.h"
#include "stitch/base/error.h"
#include "stitch/base/random.h"

namespace stitch::transport {

namespace {

static_assert(Key::kBytes == crypto_generichash_BYTES);
static_assert(Key::kBytes == crypto_generichash_KEYBYTES);

[[nodiscard]] const unsigned char* raw(const void* at) {
  return static_cast<const unsigned char*>(at);
}

void check_not_empty(std::string_view secret) {
  if (secret.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "the secret is empty: give one, or leave it out to run without authentication");
  }
}

// What is shorter can be guessed by trying.
constexpr std::size_t kFewBytes = 16;

void say_short(std::size_t bytes) {
  static std::atomic<bool> said{false};
  if (said.exchange(true)) return;
  std::fprintf(stderr,
               "stitch: the secret has %zu bytes and can be guessed by trying; use a random one of "
               "%zu or more: head -c 32 /dev/urandom | base64\n",
               bytes, kFewBytes);
}

// Once: the limit of this process does not change.
void say_not_locked(int error) {
  static std::atomic<bool> said{false};
  if (said.exchange(true)) return;
  std::fprintf(stderr,
               "stitch: the key of the secret is not in locked memory and may be swapped out: %s "
               "(RLIMIT_MEMLOCK)\n",
               std::strerror(error));
}

}  // namespace

Key Key::random() {
  Key key;
  base::fill_random(key.bytes_);
  return key;
}

Key::~Key() { sodium_memzero(bytes_.data(), bytes_.size()); }

bool Key::equals(std::span<const std::byte> other) const noexcept {
  return other.size() == kBytes && sodium_memcmp(bytes_.data(), other.data(), kBytes) == 0;
}

SecretKey::SecretKey()
    : key_((base::start_sodium(), static_cast<unsigned char*>(sodium_malloc(Key::kBytes)))) {
  if (key_ == nullptr) {
    throw Error(ErrorCode::overloaded,
                "there are no guarded pages of memory for the key of the secret");
  }
}

SecretKey::~SecretKey() { sodium_free(key_); }  // which wipes it

std::shared_ptr<const SecretKey> SecretKey::stretch(std::string_view secret) {
  if (secret.starts_with(kRandomSecret) && secret.size() == kRandomSecret.size() + 2 * Key::kBytes)
    return from_random(secret);
  check_not_empty(secret);
  if (secret.size() < kFewBytes) say_short(secret.size());
  const std::shared_ptr<SecretKey> made(new SecretKey());
  // sodium_malloc() has tried this, but does not report a failure.
  if (sodium_mlock(made->key_, Key::kBytes) != 0) say_not_locked(errno);
  constexpr std::string_view kSaltLabel = "stitch secret 1";
  std::array<unsigned char, crypto_pwhash_SALTBYTES> salt{};
  crypto_generichash(salt.data(), salt.size(), raw(kSaltLabel.data()), kSaltLabel.size(), nullptr,
                     0);
  if (crypto_pwhash(made->key_, Key::kBytes, secret.data(), secret.size(), salt.data(),
                    crypto_pwhash_OPSLIMIT_INTERACTIVE, crypto_pwhash_MEMLIMIT_INTERACTIVE,
                    crypto_pwhash_ALG_ARGON2ID13) != 0) {
    throw Error(ErrorCode::overloaded,
                "the secret could not be stretched: " +
                    std::to_string(crypto_pwhash_MEMLIMIT_INTERACTIVE >> 20) +
                    " MiB of memory are needed for it");
  }
  sodium_mprotect_readonly(made->key_);
  return made;
}

std::shared_ptr<const SecretKey> SecretKey::from_random(std::string_view secret) {
  check_not_empty(secret);
  const std::shared_ptr<SecretKey> made(new SecretKey());
  crypto_generichash(made->key_, Key::kBytes, raw(secret.data()), secret.size(), nullptr, 0);
  sodium_mprotect_readonly(made->key_);
  return made;
}

Key SecretKey::hash(std::string_view label,
                    std::initializer_list<std::span<const std::byte>> parts) const {
  Key result;
  crypto_generichash_state state;
  crypto_generichash_init(&state, key_, Key::kBytes, Key::kBytes);
  const auto add = [&state](std::span<const std::byte> part) {
    const auto bytes = base::to_wire_order(static_cast<std::uint64_t>(part.size()));
    crypto_generichash_update(&state, raw(&bytes), sizeof(bytes));
    crypto_generichash_update(&state, raw(part.data()), part.size());
  };
  add(std::as_bytes(std::span(label)));
  for (const auto part : parts) add(part);
  crypto_generichash_final(&state, reinterpret_cast<unsigned char*>(result.data()), Key::kBytes);
  sodium_memzero(&state, sizeof(state));
  return result;
}

}  // namespace stitch::transport
