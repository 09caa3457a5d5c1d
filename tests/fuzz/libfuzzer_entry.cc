// The entry points of libFuzzer for the target STITCH_FUZZ_TARGET, and the check of its memory.
#include <sanitizer/allocator_interface.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/fuzz/targets.h"

namespace {

using stitch::fuzz::Target;

// Bytes that have been allocated and not freed; and the most of them since it was set to that.
std::atomic<std::ptrdiff_t> g_live{0};
std::atomic<std::ptrdiff_t> g_most{0};

void on_malloc(const volatile void*, std::size_t bytes) {
  const auto live =
      g_live.fetch_add(static_cast<std::ptrdiff_t>(bytes)) + static_cast<std::ptrdiff_t>(bytes);
  if (live > g_most.load(std::memory_order_relaxed)) g_most.store(live, std::memory_order_relaxed);
}
void on_free(const volatile void* data) {
  if (data == nullptr) return;
  g_live.fetch_sub(
      static_cast<std::ptrdiff_t>(__sanitizer_get_allocated_size(const_cast<const void*>(data))));
}

const Target& target() { return stitch::fuzz::STITCH_FUZZ_TARGET; }

}  // namespace

// The seeds go into the first folder that is named: where new inputs go, too.
extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  for (int i = 1; i < *count; ++i) {
    const std::string argument = (*arguments)[i];
    if (argument.starts_with("-")) continue;
    if (!std::filesystem::is_directory(argument)) break;  // one input, to be repeated
    int number = 0;
    for (const auto& seed : target().seeds()) {
      std::ofstream(argument + "/seed" + std::to_string(number++), std::ios::binary)
          .write(reinterpret_cast<const char*>(seed.data()),
                 static_cast<std::streamsize>(seed.size()));
    }
    break;
  }
  __sanitizer_install_malloc_and_free_hooks(&on_malloc, &on_free);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::ptrdiff_t before = g_live.load();
  g_most.store(before);
  static_cast<void>(target().run({reinterpret_cast<const std::byte*>(data), size}));
  const std::ptrdiff_t most = g_most.load() - before;
  const auto allowed = static_cast<std::ptrdiff_t>(target().factor * size + target().constant);
  if (most > allowed) {
    std::fprintf(stderr, "%s: an input of %zu bytes took %td bytes of memory, more than %td\n",
                 target().name, size, most, allowed);
    std::abort();
  }
  return 0;
}
