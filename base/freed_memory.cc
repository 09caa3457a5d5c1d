#include "stitch/base/freed_memory.h"

#include <cstddef>
#include <cstdlib>

namespace stitch::base {

namespace {

// The largest block, with its header, after which glibc still raises its thresholds: that for
// blocks of their own mapping to the block's size, that for returning memory to twice as much.
constexpr std::size_t kBlockBytes = (std::size_t{32} << 20) - (std::size_t{16} << 10);

bool free_a_large_block() noexcept {
  void* const volatile block = std::malloc(kBlockBytes);  // volatile: the pair is not optimized out
  std::free(block);  // never touched: it costs two system calls
  return true;
}

}  // namespace

void keep_freed_memory() noexcept {
  static const bool done = free_a_large_block();
  static_cast<void>(done);
}

}  // namespace stitch::base
