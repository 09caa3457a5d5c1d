#pragma once

namespace stitch::base {

// Has malloc keep up to 64 MiB of freed memory in each arena, as glibc does by itself once a block
// of 32 MiB has been freed: a training step frees what the next one takes. MALLOC_TRIM_THRESHOLD_,
// MALLOC_MMAP_THRESHOLD_ and mallopt() go before it. Any thread.
void keep_freed_memory() noexcept;

}  // namespace stitch::base
