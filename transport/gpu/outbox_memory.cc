// Memory of the host is a file without a name (memfd), which a peer opens by the number that it has
// here: no file is left behind when a process is killed, the limits of /dev/shm are not in the way,
// and the system lets only those open it that may trace this process: of its user. Its size is
// sealed: no process can cut it off under the other's copies. A peer says which file, and might
// name another program's: only who was told its key gets it.

#include "stitch/transport/gpu/outbox_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "stitch/base/errno_text.h"
#include "stitch/base/random.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::size_t kHostBytes = OutboxLayout::bytes(Path::shared);
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

void write_pattern(void* memory) {
  auto* const bytes = static_cast<unsigned char*>(memory);
  for (std::size_t i = 0; i < OutboxLayout::kPatternBytes; ++i) bytes[i] = OutboxLayout::pattern(i);
}

bool is_pattern(const void* memory) {
  const auto* const bytes = static_cast<const unsigned char*>(memory);
  for (std::size_t i = 0; i < OutboxLayout::kPatternBytes; ++i) {
    if (bytes[i] != OutboxLayout::pattern(i)) return false;
  }
  return true;
}

OutboxStep refused(std::string why) {
  OutboxStep step;
  step.refusal = std::move(why);
  return step;
}
OutboxStep failed(const char* call) {
  return refused(std::string(call) + " failed: " + base::errno_text(errno));
}
// The same for all that may be wrong with a peer's file: a peer learns nothing of other files.
OutboxStep not_here() {
  return refused("its file is not to be found here (another PID namespace or user?)");
}

// The pages, now: where the system grants none later, the first touch would end the process.
bool allocate_pages(int file) {
  int result = 0;
  do {
    result = fallocate(file, 0, 0, static_cast<off_t>(kHostBytes));
  } while (result != 0 && errno == EINTR);
  return result == 0 || errno == EOPNOTSUPP || errno == ENOSYS;
}

std::byte* map_file(int file) {
  void* const memory = mmap(nullptr, kHostBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return nullptr;
  (void)madvise(memory, kHostBytes, MADV_DONTFORK);
  return static_cast<std::byte*>(memory);
}

// What an OutboxHandle says of host memory: whose file it is, and which.
struct HostHandle {
  std::uint64_t process = 0;
  std::uint64_t file = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::array<std::byte, OutboxLayout::kKeyBytes> key{};
};
static_assert(sizeof(HostHandle) <= sizeof(OutboxHandle));

bool is_file(const struct stat& status, const HostHandle& handle) {
  return S_ISREG(status.st_mode) && status.st_dev == handle.device &&
         status.st_ino == handle.inode && status.st_size == static_cast<off_t>(kHostBytes);
}

bool cannot_share(cuda::Status status) {
  return status == cuda::kNotSupported || status == cuda::kInvalidDevice;
}
OutboxStep unsupported(cuda::Status status) {
  OutboxStep step{status};
  step.unsupported = true;
  return step;
}

class DeviceOutboxMemory : public OutboxMemory {
 public:
  explicit DeviceOutboxMemory(const CudaApi& cuda) : cuda_(cuda) {}

  OutboxStep prepare(cuda::Stream stream) override {
    if (data_ == nullptr) {
      void* memory = nullptr;
      const cuda::Status status = cuda_.malloc(&memory, OutboxLayout::bytes(Path::ipc));
      if (status != cuda::kSuccess) return {status};
      data_ = static_cast<std::byte*>(memory);
    }
    cuda::Status status = cuda_.ipc_get_mem_handle(&handle_, data_);
    if (cannot_share(status)) return unsupported(status);
    if (status == cuda::kSuccess && pattern_ == nullptr)
      status = cuda_.host_alloc(&pattern_, OutboxLayout::kPatternBytes, cuda::kHostAllocPortable);
    if (status == cuda::kSuccess) {
      write_pattern(pattern_);
      status = cuda_.memcpy_async(data_ + OutboxLayout::pattern_at(Path::ipc), pattern_,
                                  OutboxLayout::kPatternBytes, cuda::kHostToDevice, stream);
    }
    return {status};
  }
  OutboxHandle handle() const override {
    OutboxHandle handle{};
    static_assert(sizeof(handle_.reserved) == sizeof(handle));
    std::memcpy(handle.data(), handle_.reserved, handle.size());
    return handle;
  }
  // Freed memory that another process has mapped is undefined: then it stays until this one ends.
  void free_memory(bool mapped) override {
    if (pattern_ != nullptr) (void)cuda_.free_host(pattern_);
    if (data_ != nullptr && !mapped) (void)cuda_.free(data_);
    pattern_ = nullptr;
    data_ = nullptr;
  }

 private:
  const CudaApi& cuda_;
  void* pattern_ = nullptr;  // pinned
  cuda::IpcMemHandle handle_{};
};

class HostOutboxMemory : public OutboxMemory {
 public:
  explicit HostOutboxMemory(const CudaApi& cuda) : cuda_(cuda) {}
  // Where a device hangs nothing was freed: it may still write to what is registered.
  ~HostOutboxMemory() override {
    if (data_ != nullptr && !registered_) (void)munmap(data_, kHostBytes);
  }

  OutboxStep prepare(cuda::Stream stream) override {
    if (OutboxStep made = make_file(); !made.ok()) return made;
    cuda::Status status = cuda::kSuccess;
    if (!registered_) {
      status = cuda_.host_register(data_, kHostBytes, cuda::kHostRegisterPortable);
      if (cannot_share(status)) return unsupported(status);
      registered_ = status == cuda::kSuccess;
    }
    if (status == cuda::kSuccess && test_ == nullptr)
      status = cuda_.malloc(&test_, OutboxLayout::kPatternBytes);
    std::byte* const first = data_ + OutboxLayout::pattern_at(Path::shared);
    if (status == cuda::kSuccess) {
      write_pattern(first);
      status = cuda_.memcpy_async(test_, first, OutboxLayout::kPatternBytes, cuda::kHostToDevice,
                                  stream);
    }
    if (status == cuda::kSuccess)
      status = cuda_.memcpy_async(first + OutboxLayout::kPatternBytes, test_,
                                  OutboxLayout::kPatternBytes, cuda::kDeviceToHost, stream);
    return {status};
  }
  OutboxHandle handle() const override {
    struct stat status {};
    (void)fstat(file_.get(), &status);
    HostHandle host{static_cast<std::uint64_t>(getpid()), static_cast<std::uint64_t>(file_.get()),
                    status.st_dev, status.st_ino};
    std::memcpy(host.key.data(), data_ + OutboxLayout::key_at(), host.key.size());
    OutboxHandle handle{};
    std::memcpy(handle.data(), &host, sizeof(host));
    return handle;
  }
  // Pages that another process has mapped are its own, too.
  void free_memory(bool) override {
    if (test_ != nullptr) (void)cuda_.free(test_);
    test_ = nullptr;
    if (data_ == nullptr) return;
    if (!registered_ || cuda_.host_unregister(data_) == cuda::kSuccess)
      (void)munmap(data_, kHostBytes);
    registered_ = false;
    data_ = nullptr;
    file_ = base::Descriptor();
  }

 private:
  OutboxStep make_file() {
    if (data_ != nullptr) return {};
    base::Descriptor file(memfd_create("stitch_outbox", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!file) return failed("memfd_create");
    if (ftruncate(file.get(), static_cast<off_t>(kHostBytes)) != 0) return failed("ftruncate");
    if (!allocate_pages(file.get())) return failed("fallocate");
    if (fcntl(file.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) return failed("sealing");
    data_ = map_file(file.get());
    if (data_ == nullptr) return failed("mmap");
    file_ = std::move(file);
    base::fill_random({data_ + OutboxLayout::key_at(), OutboxLayout::kKeyBytes});
    return {};
  }

  const CudaApi& cuda_;
  base::Descriptor file_;
  bool registered_ = false;
  void* test_ = nullptr;  // on the device
};

// The file is looked at before it is opened: to open one of another kind may have effects.
OutboxStep open_file(const HostHandle& handle, base::Descriptor& file) {
  const std::string path =
      "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || !is_file(status, handle)) return not_here();
  file = base::Descriptor(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file) return errno == EMFILE || errno == ENFILE ? failed("opening its file") : not_here();
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (fstat(file.get(), &status) != 0 || !is_file(status, handle) || seals < 0 ||
      (seals & kSeals) != kSeals)
    return not_here();
  if (!allocate_pages(file.get())) return failed("fallocate");  // the peer may not have
  return {};
}

OutboxStep map_host(const CudaApi& cuda, const OutboxHandle& handle, std::byte** mapped) {
  HostHandle host;
  std::memcpy(&host, handle.data(), sizeof(host));
  base::Descriptor file;
  if (OutboxStep opened = open_file(host, file); !opened.ok()) return opened;
  std::byte* const memory = map_file(file.get());
  if (memory == nullptr) return failed("mmap");
  if (std::memcmp(memory + OutboxLayout::key_at(), host.key.data(), host.key.size()) != 0) {
    (void)munmap(memory, kHostBytes);
    return not_here();
  }
  const cuda::Status status = cuda.host_register(memory, kHostBytes, cuda::kHostRegisterPortable);
  if (status != cuda::kSuccess) {
    (void)munmap(memory, kHostBytes);
    return {status};
  }
  *mapped = memory;
  return {};
}

}  // namespace

std::unique_ptr<OutboxMemory> OutboxMemory::of(Path path, const CudaApi& cuda) {
  if (path == Path::ipc) return std::make_unique<DeviceOutboxMemory>(cuda);
  return std::make_unique<HostOutboxMemory>(cuda);
}

OutboxStep map_outbox_memory(const CudaApi& cuda, Path path, const OutboxHandle& handle,
                             std::byte** mapped) {
  if (path == Path::shared) return map_host(cuda, handle, mapped);
  cuda::IpcMemHandle ipc{};
  std::memcpy(ipc.reserved, handle.data(), handle.size());
  void* memory = nullptr;
  const cuda::Status status = cuda.ipc_open_mem_handle(&memory, ipc, cuda::kIpcLazyPeerAccess);
  if (status == cuda::kSuccess) *mapped = static_cast<std::byte*>(memory);
  return {status, "IPC"};
}

bool unmap_outbox_memory(const CudaApi& cuda, Path path, std::byte* mapped) {
  const cuda::Status status =
      path == Path::ipc ? cuda.ipc_close_mem_handle(mapped) : cuda.host_unregister(mapped);
  if (status != cuda::kSuccess) {
    (void)cuda.get_last_error();
    return false;
  }
  return path == Path::ipc || munmap(mapped, kHostBytes) == 0;
}

OutboxTest::~OutboxTest() {
  if (!done_) return;
  if (host_ != nullptr) (void)cuda_.free_host(host_);
  if (device_ != nullptr) (void)cuda_.free(device_);
}

OutboxStep OutboxTest::begin(const std::byte* mapped, cuda::Stream stream) {
  mapped_ = mapped;
  constexpr std::size_t kBytes = OutboxLayout::kPatternBytes;
  const std::byte* from = mapped + OutboxLayout::pattern_at(path_);
  cuda::Status status = cuda_.host_alloc(&host_, kBytes, cuda::kHostAllocPortable);
  if (status == cuda::kSuccess) std::memset(host_, 0, kBytes);
  if (status == cuda::kSuccess && path_ == Path::shared) {
    status = cuda_.malloc(&device_, kBytes);
    if (status == cuda::kSuccess)
      status = cuda_.memcpy_async(device_, from, kBytes, cuda::kHostToDevice, stream);
    from = static_cast<const std::byte*>(device_);
  }
  if (status == cuda::kSuccess)
    status = cuda_.memcpy_async(host_, from, kBytes, cuda::kDeviceToHost, stream);
  return {status, "testing the memory of another process"};
}

bool OutboxTest::right() const {
  if (!is_pattern(host_)) return false;
  return path_ == Path::ipc ||
         is_pattern(mapped_ + OutboxLayout::pattern_at(path_) + OutboxLayout::kPatternBytes);
}

}  // namespace stitch::transport::gpu
