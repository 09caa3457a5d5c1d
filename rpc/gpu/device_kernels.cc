#include "stitch/rpc/gpu/device_kernels.h"

#include <algorithm>
#include <array>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/gpu/device_bridge.h"
#include "stitch/transport/gpu/kernel_table.h"

namespace stitch::rpc {

namespace {

using transport::gpu::KernelTable;

constexpr int kUsable = 0;
constexpr int kNoLibrary = -1;

// Values of cudaError_t by which CUDA says that code does not fit the device or the driver.
constexpr std::array kCannotRun{
    35,   // cudaErrorInsufficientDriver
    36,   // cudaErrorCallRequiresNewerDriver
    98,   // cudaErrorInvalidDeviceFunction
    200,  // cudaErrorInvalidKernelImage
    209,  // cudaErrorNoKernelImageForDevice
    218,  // cudaErrorInvalidPtx
    221,  // cudaErrorJitCompilerNotFound
    222,  // cudaErrorUnsupportedPtxVersion
    223,  // cudaErrorJitCompilationDisabled
    801,  // cudaErrorNotSupported
    803,  // cudaErrorSystemDriverMismatch
    804   // cudaErrorCompatNotSupportedOnDevice
};

bool cannot_run(int status) {
  return std::find(kCannotRun.begin(), kCannotRun.end(), status) != kCannotRun.end();
}

const KernelTable* table_of_process() {
  const DeviceBridge* const bridge = device_bridge();
  if (bridge != nullptr && bridge->kernels != nullptr) return bridge->kernels;
  static const transport::gpu::KernelLibrary library =
      transport::gpu::load_kernels(cuda_device_count());
  return library.table;
}

// Which devices can run which kernels. Thread contract: any thread.
class KnownDevices {
 public:
  static KnownDevices& of_process() {
    static auto* const known = new KnownDevices;  // never destroyed: objects may be after statics
    return *known;
  }
  // kUsable, kNoLibrary or a cudaError_t.
  int status(const KernelTable* table, c10::DeviceIndex device) {
    {
      const base::MutexLock lock(mutex_);
      const auto found = by_table_[table].find(device);
      if (found != by_table_[table].end()) return found->second;
    }
    // Two threads may both ask the device: it says the same.
    const int found_out = table == nullptr ? kNoLibrary : table->load(device);
    // Any other error, no memory say, may be over the next time.
    if (found_out == kUsable || found_out == kNoLibrary || cannot_run(found_out))
      note(table, device, found_out);
    return found_out;
  }
  void note(const KernelTable* table, c10::DeviceIndex device, int status) {
    const base::MutexLock lock(mutex_);
    by_table_[table].insert_or_assign(device, status);
  }
  std::map<c10::DeviceIndex, int> left_out(const KernelTable* table) {
    const base::MutexLock lock(mutex_);
    auto devices = by_table_[table];
    std::erase_if(devices, [](const auto& each) { return each.second == kUsable; });
    return devices;
  }

 private:
  base::Mutex mutex_;
  std::map<const KernelTable*, std::map<c10::DeviceIndex, int>> by_table_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace

const KernelTable* device_kernels(c10::Device device) {
  if (cuda_device_count() <= 0) return nullptr;
  const KernelTable* const table = table_of_process();
  return KnownDevices::of_process().status(table, device.index()) == kUsable ? table : nullptr;
}

bool kernels_cannot_run(c10::Device device, int status) {
  if (!cannot_run(status)) return false;
  KnownDevices::of_process().note(table_of_process(), device.index(), status);
  return true;
}

std::map<c10::DeviceIndex, int> kernels_left_out() {
  if (cuda_device_count() <= 0) return {};
  return KnownDevices::of_process().left_out(table_of_process());
}

}  // namespace stitch::rpc
