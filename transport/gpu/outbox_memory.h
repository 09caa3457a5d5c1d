#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "stitch/base/descriptor.h"
#include "stitch/transport/gpu/cuda_api.h"
#include "stitch/transport/gpu/path_choice.h"

namespace stitch::transport::gpu {

// Where the slots of an outbox of a path lie in its memory: device memory that CUDA IPC shares
// (Path::ipc), or host memory that both processes have mapped and pinned (Path::shared). Behind the
// slots are patterns that do not change, by which a process that has mapped the memory sees that it
// reads the right one. In host memory there are two: one that the processor has written, and one
// that has been on the source's device and back.
struct OutboxLayout {
  static constexpr std::size_t kSlots = 8;
  static constexpr std::size_t kPatternBytes = 65536;
  static constexpr std::size_t kKeyBytes = 16;

  [[nodiscard]] static constexpr std::size_t slot_bytes(Path path) {
    return std::size_t{path == Path::ipc ? 8U : 4U} << 20;
  }
  [[nodiscard]] static constexpr std::size_t pattern_at(Path path) {
    return kSlots * slot_bytes(path);
  }
  [[nodiscard]] static constexpr std::size_t bytes(Path path) {
    return path == Path::ipc ? pattern_at(path) + kPatternBytes : key_at() + kPage;
  }
  // Of host memory: a random key that the handle tells. Who guesses the rest of a handle does not
  // get the memory.
  [[nodiscard]] static constexpr std::size_t key_at() {
    return pattern_at(Path::shared) + 2 * kPatternBytes;
  }
  // What the byte at that place of a pattern is.
  [[nodiscard]] static unsigned char pattern(std::size_t at) {
    return static_cast<unsigned char>(at * 13 + at / 241 + 7);
  }

 private:
  static constexpr std::size_t kPage = 4096;
};

// Names memory to another process of the host.
using OutboxHandle = std::array<char, 64>;

// How a step went: which call of CUDA failed, or why the system or stitch refuses it.
struct OutboxStep {
  cuda::Status status = cuda::kSuccess;
  const char* what = "memory for other processes";  // that CUDA was called for
  std::string refusal = {};
  bool unsupported = false;  // CUDA shares no such memory of this device at all
  [[nodiscard]] bool ok() const noexcept { return status == cuda::kSuccess && refusal.empty(); }
};

// The memory of an outbox, at the process that owns it. Used on the lane of its device.
class OutboxMemory {
 public:
  OutboxMemory() = default;
  OutboxMemory(const OutboxMemory&) = delete;
  OutboxMemory& operator=(const OutboxMemory&) = delete;
  virtual ~OutboxMemory() = default;

  // For Path::ipc or Path::shared. `cuda` must outlive it.
  [[nodiscard]] static std::unique_ptr<OutboxMemory> of(Path path, const CudaApi& cuda);

  // Allocates what is not allocated yet, and queues the writing of the patterns on `stream`.
  [[nodiscard]] virtual OutboxStep prepare(cuda::Stream stream) = 0;
  // REQUIRES: prepare() has succeeded.
  [[nodiscard]] virtual OutboxHandle handle() const = 0;
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  // REQUIRES: nothing of this process uses it. `mapped`: other processes may have mapped it.
  virtual void free_memory(bool mapped) = 0;

 protected:
  std::byte* data_ = nullptr;
};

// A peer's outbox, mapped here. Used on the lane of the device that copies out of it.
// Maps what `handle` names, which a peer says: what is no outbox is refused.
[[nodiscard]] OutboxStep map_outbox_memory(const CudaApi& cuda, Path path,
                                           const OutboxHandle& handle, std::byte** mapped);
// False: it is still mapped, in part or whole.
[[nodiscard]] bool unmap_outbox_memory(const CudaApi& cuda, Path path, std::byte* mapped);

// Whether a mapped outbox is the right one, and the lane's device can read it: queues a copy of
// the pattern to host memory of this process, and compares it once that is done.
class OutboxTest {
 public:
  OutboxTest(const CudaApi& cuda, Path path) : cuda_(cuda), path_(path) {}
  OutboxTest(const OutboxTest&) = delete;
  OutboxTest& operator=(const OutboxTest&) = delete;
  ~OutboxTest();  // frees what it has if it is done(): else copies may still use it

  [[nodiscard]] OutboxStep begin(const std::byte* mapped, cuda::Stream stream);
  // What begin() has queued is done, or the device is lost.
  void done() { done_ = true; }
  // REQUIRES: done(), without an error.
  [[nodiscard]] bool right() const;

 private:
  const CudaApi& cuda_;
  const Path path_;
  const std::byte* mapped_ = nullptr;
  void* host_ = nullptr;    // pinned
  void* device_ = nullptr;  // through which host memory takes its way
  bool done_ = false;
};

}  // namespace stitch::transport::gpu
