#pragma once

namespace stitch::base {

// Has this process keep up to 64 MiB of freed memory in each of malloc's arenas, instead of
// returning it to the kernel: a training step frees what the next one takes, and fetching it back
// costs a page fault for every 4 KiB. It is the state that glibc gets into by itself when the
// program frees one block of 32 MiB. MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ and mallopt()
// go before it. Only the first call does anything. Thread contract: any thread.
void keep_freed_memory() noexcept;

}  // namespace stitch::base
