#include "stitch/base/random.h"

#include <sodium.h>

#include "stitch/base/error.h"

namespace stitch::base {

void start_sodium() {
  static const int started = sodium_init();
  if (started < 0) throw Error(ErrorCode::internal, "libsodium cannot be initialized");
}

void fill_random(std::span<std::byte> bytes) {
  start_sodium();
  if (!bytes.empty()) randombytes_buf(bytes.data(), bytes.size());
}

std::uint64_t random_number() {
  std::uint64_t number = 0;
  fill_random(std::as_writable_bytes(std::span(&number, 1)));
  return number;
}

}  // namespace stitch::base
