// The entry points of libFuzzer, and the check of what an input takes. Besides libFuzzer's options:
//
//   --target=NAME      which of the targets is fuzzed
//   --write-seeds=DIR  writes its seeds there, as seed-NAME, and ends
#include <sanitizer/allocator_interface.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "tests/fuzz/broken_target.h"
#include "tests/fuzz/targets.h"

namespace {

using stitch::fuzz::Target;

constexpr const Target* kTargets[] = {STITCH_FUZZ_TARGETS};

const Target* g_target = nullptr;

// Bytes that have been allocated and not freed; and the most of them since it was set to that.
std::atomic<std::ptrdiff_t> g_live{0};
std::atomic<std::ptrdiff_t> g_most{0};

void on_malloc(const volatile void*, std::size_t bytes) {
  const auto size = static_cast<std::ptrdiff_t>(bytes);
  const auto live = g_live.fetch_add(size) + size;
  if (live > g_most.load(std::memory_order_relaxed)) g_most.store(live, std::memory_order_relaxed);
}
void on_free(const volatile void* data) {
  if (data == nullptr) return;
  const std::size_t bytes = __sanitizer_get_allocated_size(const_cast<const void*>(data));
  g_live.fetch_sub(static_cast<std::ptrdiff_t>(bytes));
}

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(2);
}

void write_seeds(const std::string& folder) {
  std::filesystem::create_directories(folder);
  for (const auto& seed : g_target->seeds()) {
    std::ofstream file(folder + "/seed-" + seed.name, std::ios::binary);
    file.write(reinterpret_cast<const char*>(seed.bytes.data()),
               static_cast<std::streamsize>(seed.bytes.size()));
    if (!file.flush()) stop("the seeds cannot be written to \"" + folder + "\"");
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  constexpr std::string_view kTargetOption = "--target=";
  constexpr std::string_view kWriteOption = "--write-seeds=";
  std::string names;
  for (const Target* target : kTargets) names += std::string(" ") + target->name;
  for (int i = 1; i < *count; ++i) {
    const std::string_view argument = (*arguments)[i];
    if (!argument.starts_with(kTargetOption)) continue;
    for (const Target* target : kTargets) {
      if (argument.substr(kTargetOption.size()) == target->name) g_target = target;
    }
  }
  if (g_target == nullptr) stop("--target= is one of" + names);
  for (int i = 1; i < *count; ++i) {
    const std::string_view argument = (*arguments)[i];
    if (!argument.starts_with(kWriteOption)) continue;
    write_seeds(std::string(argument.substr(kWriteOption.size())));
    std::exit(0);
  }
  for (const auto& seed : g_target->seeds()) {
    if (!g_target->run(seed.bytes.span()))
      stop("the seed \"" + seed.name + "\" of " + g_target->name + " is refused");
  }
  __sanitizer_install_malloc_and_free_hooks(&on_malloc, &on_free);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::ptrdiff_t before = g_live.load();
  g_most.store(before);
  static_cast<void>(g_target->run({reinterpret_cast<const std::byte*>(data), size}));
  const std::ptrdiff_t most = g_most.load() - before;
  const auto allowed = static_cast<std::ptrdiff_t>(g_target->factor * size + g_target->constant);
  if (most > allowed) {
    std::fprintf(stderr, "%s: an input of %zu bytes took %td bytes of memory, more than %td\n",
                 g_target->name, size, most, allowed);
    std::abort();
  }
  return 0;
}
