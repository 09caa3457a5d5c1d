#include "stitch/rpc/future/current_streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "stitch/rpc/future/execution_context.h"

namespace stitch::rpc {

namespace {

using c10::impl::VirtualGuardImpl;

VirtualGuardImpl cuda() { return VirtualGuardImpl(c10::kCUDA); }

template <class F>
void for_each_device_in_use(F f) {
  std::uint64_t left = devices_in_use.load(std::memory_order_acquire);
  for (int index = 0; left != 0; ++index, left >>= 1) {
    if ((left & 1) != 0) f(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)));
  }
}

}  // namespace

int cuda_device_count() noexcept {
  if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return 0;
  return std::min<int>(cuda().deviceCount(), kMaxDevices);
}

void note_device_in_use(c10::Device device) noexcept {
  const std::uint64_t bit = device_bit(device);
  if ((devices_in_use.load(std::memory_order_relaxed) & bit) == 0) devices_in_use.fetch_or(bit);
}

std::shared_ptr<const StreamSet> StreamSet::current() {
  std::vector<c10::Stream> streams;
  bool all_default = true;
  for_each_device_in_use([&](c10::Device device) {
    streams.push_back(cuda().getStream(device));
    all_default = all_default && streams.back() == cuda().getDefaultStream(device);
  });
  if (all_default) return nullptr;
  const auto& here = ExecutionContext::current().streams;
  if (here && here->streams() == streams) return here;
  return std::make_shared<const StreamSet>(std::move(streams));
}

StreamSetScope::StreamSetScope(const std::shared_ptr<const StreamSet>& streams) {
  if (!streams) return;
  for (const auto& stream : streams->streams()) outer_.push_back(cuda().exchangeStream(stream));
}

void StreamSetScope::restore() noexcept {
  for (const auto& stream : outer_) static_cast<void>(cuda().exchangeStream(stream));
}

void ArrivedMemory::add(const c10::Storage& storage, c10::Device device) {
  pieces_.push_back({storage.getWeakStorageImpl(), device});
}

void ArrivedMemory::use_on_current_streams() const {
  for (const auto& piece : pieces_) {
    if (const auto storage = piece.storage.lock())
      cuda().recordDataPtrOnStream(storage->data_ptr(), cuda().getStream(piece.device));
  }
  for (const auto& part : parts_) part->use_on_current_streams();
}

void ArrivedMemory::use_on_default_streams() const {
  for (const auto& piece : pieces_) {
    if (const auto storage = piece.storage.lock())
      cuda().recordDataPtrOnStream(storage->data_ptr(), cuda().getDefaultStream(piece.device));
  }
  for (const auto& part : parts_) part->use_on_default_streams();
}

void use_on_current_streams(const ArrivedMemory& memory) { memory.use_on_current_streams(); }

std::shared_ptr<const ArrivedMemory> together(
    std::vector<std::shared_ptr<const ArrivedMemory>> parts) {
  std::erase(parts, nullptr);
  if (parts.empty()) return nullptr;
  if (parts.size() == 1) return std::move(parts.front());
  auto memory = std::make_shared<ArrivedMemory>();
  for (auto& part : parts) memory->add(std::move(part));
  return memory;
}

}  // namespace stitch::rpc
