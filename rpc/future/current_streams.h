#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// Streams of CUDA devices, through libtorch's device-generic interface: nothing of CUDA is named or
// linked, and without a device all of this does nothing.
namespace stitch::rpc {

// The CUDA devices that libtorch sees; 0 where it was built without CUDA.
[[nodiscard]] int cuda_device_count() noexcept;

// The devices that messages of this process have brought tensors to or taken tensors from: bit i is
// cuda:i. A device is left alone until then, since touching it takes memory on it.
inline std::atomic<std::uint64_t> devices_in_use{0};
inline constexpr int kMaxDevices = 64;  // others of a process are not used
[[nodiscard]] inline std::uint64_t device_bit(c10::Device device) noexcept {
  return std::uint64_t{1} << static_cast<unsigned>(device.index());
}
void note_device_in_use(c10::Device device) noexcept;

// One stream for each of some devices. Immutable. Thread contract: any thread.
class StreamSet {
 public:
  explicit StreamSet(std::vector<c10::Stream> streams) : streams_(std::move(streams)) {}
  // Streams of libtorch's pool for the devices in use, which are others' once this is gone. What is
  // queued on them runs after all that has been queued on the default streams of their devices.
  // Null when no device is in use. A device that is lost is left out, unless it is one of `needed`
  // (as devices_in_use): then it throws Error naming it.
  [[nodiscard]] static std::shared_ptr<const StreamSet> from_pool(std::uint64_t needed = 0);
  // Those that are current on this thread, for the devices in use; null when all of them are
  // default streams.
  [[nodiscard]] static std::shared_ptr<const StreamSet> current();

  [[nodiscard]] const std::vector<c10::Stream>& streams() const noexcept { return streams_; }
  // Has them run what is queued from now on after what this thread's current streams have now.
  // Throws Error naming the device that has failed, as the next one does.
  void wait_for_current() const;
  // The same after what the default streams of their devices have now.
  void wait_for_default() const;

 private:
  const std::vector<c10::Stream> streams_;
};

// Makes `streams` current on this thread for a block; null leaves it as it is. Blocks nest.
class StreamSetScope {
 public:
  // Takes no memory but that of `outer` where that has room for as many streams.
  explicit StreamSetScope(const std::shared_ptr<const StreamSet>& streams,
                          std::vector<c10::Stream> outer = {});
  ~StreamSetScope() {
    if (!outer_.empty()) [[unlikely]]
      restore();
  }
  StreamSetScope(const StreamSetScope&) = delete;
  StreamSetScope& operator=(const StreamSetScope&) = delete;

 private:
  void restore() noexcept;
  std::vector<c10::Stream> outer_;  // those that were current
};

// The memory of tensors that a message brought to devices. Keeps none of it alive. Thread contract:
// any thread.
class ArrivedMemory {
 public:
  void add(const c10::Storage& storage, c10::Device device);
  void add(std::shared_ptr<const ArrivedMemory> part) { parts_.push_back(std::move(part)); }
  // Code that runs here gets the tensors now: their memory is not used again, once they are gone,
  // before what it queues on its current streams has ended.
  void use_on_current_streams() const;
  // The same for the default streams.
  void use_on_default_streams() const;

 private:
  struct Piece {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::Device device;
  };
  std::vector<Piece> pieces_;
  std::vector<std::shared_ptr<const ArrivedMemory>> parts_;
};

}  // namespace stitch::rpc
