#include "stitch/transport/gpu/gpu_libraries.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>

#include "stitch/transport/gpu/lane.h"

namespace stitch::transport::gpu {
namespace {

std::atomic<const GpuLibraries*> override_libraries{nullptr};

std::string fill(CudaApi& api, const LoadedLibrary& runtime, const LoadedLibrary& driver) {
  TableFiller of_runtime(runtime);
  TableFiller of_driver(driver);
#define STITCH_FILL(member, symbol) of_runtime.fill(api.member, #symbol);
  STITCH_CUDA_RUNTIME_FUNCTIONS(STITCH_FILL)
#undef STITCH_FILL
#define STITCH_FILL(member, symbol) of_driver.fill(api.member, #symbol);
  STITCH_CUDA_DRIVER_FUNCTIONS(STITCH_FILL)
#undef STITCH_FILL
  return of_runtime.why_not().empty() ? of_driver.why_not() : of_runtime.why_not();
}

std::string fill(NcclApi& api, const LoadedLibrary& library) {
  TableFiller table(library);
#define STITCH_FILL(member, symbol) table.fill(api.member, #symbol);
  STITCH_NCCL_FUNCTIONS(STITCH_FILL)
#undef STITCH_FILL
  return table.why_not();
}

}  // namespace

LoadedLibrary LoadedLibrary::find(const std::vector<std::string>& names) {
  LoadedLibrary found;
  found.why_not_.clear();
  for (const int already : {RTLD_NOLOAD, 0}) {
    for (const std::string& name : names) {
      found.handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | already);
      if (found.handle_ != nullptr) {
        found.name_ = name;
        const link_map* map = nullptr;
        const bool known = dlinfo(found.handle_, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr;
        found.path_ = known && *map->l_name != '\0' ? map->l_name : name;
        found.why_not_.clear();
        return found;
      }
      if (already == RTLD_NOLOAD) continue;
      const char* const error = dlerror();  // names the missing library
      if (!found.why_not_.empty()) found.why_not_ += "; ";
      found.why_not_ +=
          "the library " + name + " is not there: " + (error == nullptr ? "unknown error" : error);
    }
  }
  return found;
}

void* LoadedLibrary::function(const char* name) const {
  return handle_ == nullptr ? nullptr : dlsym(handle_, name);
}

std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

const GpuLibraries& GpuLibraries::of_process() {
  const GpuLibraries* const other = override_libraries.load(std::memory_order_acquire);
  if (other != nullptr) return *other;
  static const GpuLibraries found{Names()};
  return found;
}

GpuLibraries::Override::Override(const GpuLibraries& libraries) {
  override_libraries.store(&libraries, std::memory_order_release);
}

GpuLibraries::Override::~Override() {
  override_libraries.store(nullptr, std::memory_order_release);
}

GpuLibraries::GpuLibraries(const CudaApi* cuda, const NcclApi* nccl, const std::string& why_not)
    : streams_(std::make_shared<StreamPool>()),
      has_cuda_(cuda != nullptr),
      has_nccl_(cuda != nullptr && nccl != nullptr) {
  if (has_cuda_) cuda_ = *cuda;
  if (has_nccl_) nccl_ = *nccl;
  if (!has_cuda_) why_no_cuda_ = why_not;
  if (!has_nccl_) why_no_nccl_ = why_not;
}

GpuLibraries::GpuLibraries(const Names& names) : streams_(std::make_shared<StreamPool>()) {
  find_cuda(names);
  if (has_cuda_) {
    find_nccl(names);
  } else {
    why_no_nccl_ = "NCCL was not looked for: " + why_no_cuda_;
  }
}

void GpuLibraries::find_cuda(const Names& names) {
  const LoadedLibrary driver = LoadedLibrary::find(names.driver);
  if (!driver.loaded()) {
    why_no_cuda_ = "no CUDA device: " + driver.why_not();
    return;
  }
  // A newer runtime may need a newer driver than there is, where an older one still finds devices.
  std::vector<std::string> left = names.runtime;
  while (!has_cuda_ && !left.empty()) {
    const LoadedLibrary runtime = LoadedLibrary::find(left);
    if (!runtime.loaded()) {
      if (why_no_cuda_.empty()) why_no_cuda_ = "no CUDA device: " + runtime.why_not();
      return;
    }
    std::string why_not = fill(cuda_, runtime, driver);
    if (why_not.empty()) {
      int devices = 0;
      int version = 0;
      const cuda::Status status = cuda_.get_device_count(&devices);
      cuda_.runtime_get_version(&version);
      if (status != cuda::kSuccess) {
        cuda_.get_last_error();  // no error of ours stays for the program to find
        why_not = std::string(cuda_.get_error_string(status)) + " (" +
                  cuda_.get_error_name(status) + ", from " + runtime.path() + ")";
      } else if (devices == 0) {
        why_not = runtime.path() + " sees none";
      } else if (version < kOldestCuda) {
        why_not = runtime.path() + " is of CUDA " + cuda_version_text(version) + "; at least " +
                  cuda_version_text(kOldestCuda) + " is needed";
      }
    }
    if (why_not.empty()) {
      has_cuda_ = true;
      why_no_cuda_.clear();
      return;
    }
    if (why_no_cuda_.empty()) why_no_cuda_ = "no CUDA device: " + why_not;
    std::erase(left, runtime.name());
  }
  cuda_ = CudaApi{};
}

void GpuLibraries::find_nccl(const Names& names) {
  const LoadedLibrary library = LoadedLibrary::find(names.nccl);
  if (!library.loaded()) {
    why_no_nccl_ = "no NCCL: " + library.why_not();
    return;
  }
  std::string why_not = fill(nccl_, library);
  if (why_not.empty()) {
    int version = 0;
    const nccl::Result result = nccl_.get_version(&version);
    if (result != nccl::kSuccess) {
      why_not = library.path() + " does not tell its version: " + nccl_.get_error_string(result);
    } else if (version < kOldestNccl) {
      why_not = library.path() + " is NCCL " + nccl_version_text(version) + "; at least " +
                nccl_version_text(kOldestNccl) + " is needed";
    }
  }
  if (!why_not.empty()) {
    why_no_nccl_ = "no NCCL: " + why_not;
    nccl_ = NcclApi{};
    return;
  }
  has_nccl_ = true;
}

}  // namespace stitch::transport::gpu
