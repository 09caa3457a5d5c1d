#include "stitch/rpc/world/random_number.h"

#include <sodium.h>

#include "stitch/base/error.h"

namespace stitch::rpc {

std::uint64_t random_number() {
  if (sodium_init() < 0) throw Error(ErrorCode::internal, "libsodium cannot be initialised");
  std::uint64_t number = 0;
  randombytes_buf(&number, sizeof(number));
  return number;
}

}  // namespace stitch::rpc
