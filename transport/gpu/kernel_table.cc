#include "stitch/transport/gpu/kernel_table.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace stitch::transport::gpu {
namespace {

constexpr const char* kFile = "libstitch_kernels.so";

// The folder of the program or shared object that this function is part of; empty if unknown.
std::filesystem::path own_folder() {
  std::error_code error;
  Dl_info info{};
  std::filesystem::path file;
  if (dladdr(reinterpret_cast<const void*>(&own_folder), &info) != 0 && info.dli_fname != nullptr)
    file = std::filesystem::canonical(info.dli_fname, error);
  // A program may be known by the name it was started with, which is found on PATH only.
  if (file.empty()) file = std::filesystem::read_symlink("/proc/self/exe", error);
  return file.parent_path();
}

KernelLibrary without(std::string why) { return {nullptr, {}, std::move(why)}; }

}  // namespace

KernelLibrary load_kernels_from(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    return without("kernels were not loaded: " + std::string(why != nullptr ? why : path));
  }
  const auto get =
      reinterpret_cast<StitchKernelTableFunction>(dlsym(library, STITCH_KERNEL_TABLE_SYMBOL));
  const KernelTable* const table = get != nullptr ? get() : nullptr;
  if (table == nullptr) {
    dlclose(library);
    return without("kernels were not loaded: " + path + " has no " STITCH_KERNEL_TABLE_SYMBOL);
  }
  if (table->abi != kKernelAbi || table->bytes != sizeof(KernelTable)) {
    std::string why = "kernels were not loaded: " + path + " has version " +
                      std::to_string(table->abi) + " of the kernel table (" +
                      std::to_string(table->bytes) + " bytes); this stitch needs version " +
                      std::to_string(kKernelAbi) + " (" + std::to_string(sizeof(KernelTable)) +
                      " bytes)";
    dlclose(library);
    return without(std::move(why));
  }
  return {table, path, {}};
}

KernelLibrary load_kernels(int devices) {
  if (devices <= 0) return without("kernels were not loaded: there is no CUDA device");
  if (const char* const chosen = std::getenv("STITCH_KERNELS");
      chosen != nullptr && *chosen != '\0') {
    KernelLibrary library = load_kernels_from(chosen);
    if (library.table == nullptr) library.why_not += " (STITCH_KERNELS names this file)";
    return library;
  }
  const std::filesystem::path folder = own_folder();
  for (const auto& candidate : {folder / kFile, folder / ".." / "lib" / kFile}) {
    std::error_code error;
    if (std::filesystem::is_regular_file(candidate, error))
      return load_kernels_from(candidate.string());
  }
  KernelLibrary library = load_kernels_from(kFile);
  if (library.table == nullptr)
    library.why_not += "; nor is it in " + folder.string() + "; STITCH_KERNELS can name the file";
  return library;
}

Error kernel_error(const KernelTable& table, std::string_view what, int status) {
  const bool refused = status < 0 && status != kKernelCutShort;
  return {refused ? ErrorCode::invalid_argument : ErrorCode::internal,
          std::string(what) + ": " + table.describe(status) + " (" + std::to_string(status) + ")"};
}

}  // namespace stitch::transport::gpu
