// One file, though long: a device is one thing, and its parts use each other's tables.
#include "tests/gpu/fake_torch_device.h"

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "tests/gpu/device_on_cpu.h"

// Signatures of virtual functions differ between versions of libtorch: both are there.
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wunknown-warning-option"
#pragma GCC diagnostic ignored "-Winconsistent-missing-override"
#pragma GCC diagnostic ignored "-Woverloaded-virtual"

namespace stitch::testing::fake_device {

namespace {

using device_on_cpu::as_cpu;
using device_on_cpu::as_cpu_if_on_device;
using device_on_cpu::base;
using device_on_cpu::indexed;
using device_on_cpu::make_stream;

constexpr std::int64_t kAll = -1;
constexpr int kPoolStreams = 32;  // of each priority; stream 0 is the default stream
constexpr int kStreams = 1 + 2 * kPoolStreams;

struct EventState {
  bool done = true;
  int device = 0;
};

struct Item {
  std::function<void()> work;         // empty for the others
  std::shared_ptr<EventState> mark;   // done when the queue gets here
  std::shared_ptr<EventState> await;  // the queue waits until it is done
  std::vector<const void*> memory;    // blocks that `work` uses
};

struct Block {
  std::size_t bytes = 0;
  c10::Stream stream = c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCUDA, 0));
  std::vector<c10::Stream> recorded;
  bool freed = false;
};

using Queue = std::deque<Item>;

struct Fake {
  std::recursive_mutex mutex;
  std::condition_variable_any changed;
  std::array<std::array<Queue, kStreams>, kDevices> queues;
  std::array<std::array<int, kStreams>, kDevices> holds{};
  std::array<int, kDevices> all_held{};
  std::array<bool, kDevices> broken{};
  std::array<bool, kDevices> contexts{};
  std::array<int, kDevices> next_stream{};
  int lagging = 0;
  int failing_allocations = 0;
  std::map<const void*, Block> blocks;
  std::vector<std::string> violations;

  static Fake& get() {
    static auto* const fake = new Fake;  // tensors may be freed by destructors of statics
    return *fake;
  }
  [[nodiscard]] bool held(std::size_t device, std::size_t stream) const {
    return all_held[device] > 0 || holds[device][stream] > 0;
  }
  Queue& queue(int device, std::int64_t stream) {
    return queues.at(static_cast<std::size_t>(device)).at(static_cast<std::size_t>(stream));
  }
  void check(int device) const {
    TORCH_CHECK(!broken.at(static_cast<std::size_t>(device)),
                "CUDA error: an illegal memory access was encountered");
  }
  void free_if_unused(const void* memory) {
    const auto found = blocks.find(memory);
    if (found == blocks.end() || !found->second.freed) return;
    for (const auto& device : queues) {
      for (const auto& items : device) {
        for (const auto& item : items) {
          if (std::find(item.memory.begin(), item.memory.end(), memory) != item.memory.end())
            return;
        }
      }
    }
    std::memset(const_cast<void*>(memory), 0xDD, found->second.bytes);
    std::free(const_cast<void*>(memory));
    blocks.erase(found);
  }
  // Runs one item of a queue. False when there is none that may run.
  bool step(int device, int stream) {
    Queue& items = queue(device, stream);
    if (items.empty() || held(static_cast<std::size_t>(device), static_cast<std::size_t>(stream)))
      return false;
    if (items.front().await && !items.front().await->done) return false;
    const Item item = std::move(items.front());
    items.pop_front();
    if (item.work) item.work();
    if (item.mark) item.mark->done = true;
    for (const void* memory : item.memory) free_if_unused(memory);
    changed.notify_all();
    return true;
  }
  // Runs all that may run.
  void run_all() {
    if (lagging > 0) return;
    bool more = true;
    while (more) {
      more = false;
      for (int device = 0; device < kDevices; ++device) {
        for (int stream = 0; stream < kStreams; ++stream) {
          while (step(device, stream)) more = true;
        }
      }
    }
  }
  void push(const c10::Stream& stream, Item item) {
    queue(stream.device_index(), stream.id()).push_back(std::move(item));
    run_all();
  }
  // Waits for what is queued on a stream, as a kernel would.
  void drain(std::unique_lock<std::recursive_mutex>& lock, const c10::Stream& stream) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!queue(stream.device_index(), stream.id()).empty()) {
      TORCH_CHECK(changed.wait_until(lock, end) == std::cv_status::no_timeout,
                  "fake device: waited 30 s for a stream that is held");
    }
  }
};

std::pair<Fake&, std::unique_lock<std::recursive_mutex>> locked() {
  return {Fake::get(), std::unique_lock(Fake::get().mutex)};
}

// ---- streams and events

thread_local int current_device = 0;
thread_local std::array<std::int64_t, kDevices> current_streams{};

// As cudaSetDevice(): to make another device current creates a context there.
void set_device(int device) {
  if (std::exchange(current_device, device) == device) return;
  Fake& fake = Fake::get();
  const std::unique_lock lock(fake.mutex);
  fake.contexts.at(static_cast<std::size_t>(device)) = true;
}

// Libtorch's functions of events make the device of their stream current, and then the one that was
// current before, whether or not that has a context.
class OnDeviceOfEvent {
 public:
  explicit OnDeviceOfEvent(int device) : outer_(current_device) { set_device(device); }
  ~OnDeviceOfEvent() { set_device(outer_); }
  OnDeviceOfEvent(const OnDeviceOfEvent&) = delete;
  OnDeviceOfEvent& operator=(const OnDeviceOfEvent&) = delete;

 private:
  const int outer_;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    set_device(device.index());
    return old;
  }
  c10::Device getDevice() const override {
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(current_device)};
  }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  // Without a context where there is none, as c10::cuda::MaybeSetDevice().
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    const c10::Device exact = indexed(device);
    return make_stream(exact, current_streams[static_cast<std::size_t>(exact.index())]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(indexed(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    Fake& fake = Fake::get();
    const std::unique_lock lock(fake.mutex);
    const c10::Device exact = indexed(device);
    const int next = fake.next_stream[static_cast<std::size_t>(exact.index())]++ % kPoolStreams;
    return make_stream(exact, 1 + next + (high ? kPoolStreams : 0));
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const auto device = static_cast<std::size_t>(stream.device_index());
    return make_stream(stream.device(), std::exchange(current_streams[device], stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    Fake& fake = Fake::get();
    const std::unique_lock lock(fake.mutex);
    fake.check(stream.device_index());
    const OnDeviceOfEvent on(stream.device_index());
    if (*event == nullptr) *event = new std::shared_ptr<EventState>();
    auto state = std::make_shared<EventState>();
    state->done = false;
    state->device = stream.device_index();
    *static_cast<std::shared_ptr<EventState>*>(*event) = state;
    fake.push(stream, {{}, state, {}, {}});
  }
  void block(void* event, const c10::Stream& stream) const override {
    Fake& fake = Fake::get();
    const std::unique_lock lock(fake.mutex);
    fake.check(stream.device_index());
    if (event == nullptr) return;
    const OnDeviceOfEvent on(stream.device_index());
    fake.push(stream, {{}, {}, *static_cast<std::shared_ptr<EventState>*>(event), {}});
  }
  bool queryEvent(void* event) const override {
    Fake& fake = Fake::get();
    const std::unique_lock lock(fake.mutex);
    if (event == nullptr) return true;
    const auto& state = *static_cast<std::shared_ptr<EventState>*>(event);
    fake.check(state->device);
    return state->done;
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    if (event == nullptr) return;
    if (device != current_device) {
      // Libtorch goes there and back, and the way back makes a context on a device that has none.
      Fake& fake = Fake::get();
      const std::unique_lock lock(fake.mutex);
      fake.violations.push_back("an event of device " + std::to_string(device) +
                                " ended on a thread of device " + std::to_string(current_device));
    }
    const OnDeviceOfEvent on(device);
    delete static_cast<std::shared_ptr<EventState>*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Fake& fake = Fake::get();
    const std::unique_lock lock(fake.mutex);
    fake.check(stream.device_index());
    return fake.queue(stream.device_index(), stream.id()).empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Fake& fake = Fake::get();
    std::unique_lock lock(fake.mutex);
    fake.drain(lock, stream);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Fake& fake = Fake::get();
    const std::unique_lock lock(fake.mutex);
    const auto found = fake.blocks.find(data.get());
    if (found != fake.blocks.end()) found->second.recorded.push_back(stream);
  }
};

// ---- memory

void free_block(void* memory) {
  if (memory == nullptr) return;
  Fake& fake = Fake::get();
  const std::unique_lock lock(fake.mutex);
  Block& block = fake.blocks.at(memory);
  block.freed = true;
  // Reused now, on the stream of its allocation: work of other streams must be known.
  for (int device = 0; device < kDevices; ++device) {
    for (int stream = 0; stream < kStreams; ++stream) {
      for (const auto& item : fake.queue(device, stream)) {
        const c10::Stream user =
            make_stream({c10::kCUDA, static_cast<c10::DeviceIndex>(device)}, stream);
        const bool uses =
            std::find(item.memory.begin(), item.memory.end(), memory) != item.memory.end();
        const auto& recorded = block.recorded;
        if (!uses || user == block.stream ||
            std::find(recorded.begin(), recorded.end(), user) != recorded.end())
          continue;
        fake.violations.push_back("memory was freed while stream " + std::to_string(stream) +
                                  " of cuda:" + std::to_string(device) + " was to use it");
      }
    }
  }
  fake.free_if_unused(memory);
}

c10::DataPtr take(std::size_t bytes) {
  Fake& fake = Fake::get();
  const std::unique_lock lock(fake.mutex);
  fake.check(current_device);
  if (fake.failing_allocations > 0) {
    --fake.failing_allocations;
    TORCH_CHECK(false, "CUDA out of memory. Tried to allocate ", bytes, " bytes");
  }
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(current_device));
  if (bytes == 0) return {nullptr, device};
  void* const memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  std::memset(memory, 0xEE, bytes);
  fake.blocks[memory] = {
      bytes,
      make_stream(device, current_streams[static_cast<std::size_t>(current_device)]),
      {},
      false};
  return {memory, memory, &free_block, device};
}

// ---- operators

struct OverQueues final : device_on_cpu::Device {
  int current() const override { return current_device; }
  void make_current(int device) const override { current_device = device; }
  c10::DataPtr allocate(std::size_t bytes) override { return take(bytes); }
  c10::DeleterFnPtr free_memory() const override { return &free_block; }
  void copy(const at::Tensor& to, const at::Tensor& from, bool non_blocking) override {
    Fake& fake = Fake::get();
    const c10::Device device = to.is_cuda() ? to.device() : from.device();
    const c10::Stream stream = current_stream(device);
    std::unique_lock lock(fake.mutex);
    fake.check(device.index());
    Item item;
    if (to.is_cuda()) item.memory.push_back(base(to));
    if (from.is_cuda()) item.memory.push_back(base(from));
    // Memory of the host is kept, as libtorch's allocator of pinned memory keeps it.
    item.work = [to_cpu = as_cpu_if_on_device(to), from_cpu = as_cpu_if_on_device(from)] {
      device_on_cpu::copy_on_cpu(to_cpu, from_cpu);
    };
    fake.push(stream, std::move(item));
    if (!non_blocking) fake.drain(lock, stream);
  }
  // Here and now, once its stream is empty.
  void compute(const std::string&, c10::Device where, const std::vector<at::Tensor>&,
               const std::vector<at::Tensor>&, const std::function<void()>& work) override {
    Fake& fake = Fake::get();
    {
      std::unique_lock lock(fake.mutex);
      fake.check(where.index());
      fake.drain(lock, current_stream(where));
    }
    work();
  }
  void put(const at::Tensor& made, const at::Tensor& result) override {
    device_on_cpu::copy_on_cpu(as_cpu(made), result);
  }
};

}  // namespace

bool install() {
  static const Guard guard;
  static const c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, &guard);
  static OverQueues device;
  device_on_cpu::install(device);
  return true;
}

Hold::Hold(c10::Stream stream) : device_(stream.device()), stream_(stream.id()) {
  Fake& fake = Fake::get();
  const std::unique_lock lock(fake.mutex);
  ++fake.holds[static_cast<std::size_t>(device_.index())][static_cast<std::size_t>(stream_)];
}

Hold::Hold(c10::Device device) : device_(device), stream_(kAll) {
  Fake& fake = Fake::get();
  const std::unique_lock lock(fake.mutex);
  ++fake.all_held[static_cast<std::size_t>(device_.index())];
}

Hold::~Hold() { release(); }

void Hold::release() {
  if (!std::exchange(held_, false)) return;
  Fake& fake = Fake::get();
  const std::unique_lock lock(fake.mutex);
  const auto device = static_cast<std::size_t>(device_.index());
  if (stream_ == kAll) {
    --fake.all_held[device];
  } else {
    --fake.holds[device][static_cast<std::size_t>(stream_)];
  }
  fake.run_all();
}

struct Lag::State {
  std::atomic<bool> ended{false};
  std::thread thread;
};

Lag::Lag(std::uint64_t seed) : state_(std::make_unique<State>()) {
  Fake& fake = Fake::get();
  {
    const std::unique_lock lock(fake.mutex);
    ++fake.lagging;
  }
  state_->thread = std::thread([state = state_.get(), seed] {
    Fake& all = Fake::get();
    std::mt19937_64 random(seed);
    while (!state->ended.load()) {
      {
        const std::unique_lock lock(all.mutex);
        std::vector<std::pair<int, int>> waiting;
        for (int device = 0; device < kDevices; ++device) {
          for (int stream = 0; stream < kStreams; ++stream) {
            if (!all.queue(device, stream).empty()) waiting.emplace_back(device, stream);
          }
        }
        if (!waiting.empty()) {
          const auto [device, stream] = waiting[random() % waiting.size()];
          all.step(device, stream);
        }
      }
      // The lag itself: devices are at another place in their work each time the host looks.
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    }
  });
}

Lag::~Lag() {
  state_->ended.store(true);
  state_->thread.join();
  Fake& fake = Fake::get();
  const std::unique_lock lock(fake.mutex);
  --fake.lagging;
  fake.run_all();
}

c10::Stream current_stream(c10::Device device) {
  const c10::Device exact = indexed(device);
  return make_stream(exact, current_streams[static_cast<std::size_t>(exact.index())]);
}

c10::Stream default_stream(c10::Device device) { return make_stream(indexed(device), 0); }

c10::Stream pool_stream(c10::Device device) {
  return c10::impl::getDeviceGuardImpl(c10::kCUDA)->getStreamFromGlobalPool(device, false);
}

void fill_later(const at::Tensor& tensor, float value) {
  Fake& fake = Fake::get();
  const std::unique_lock lock(fake.mutex);
  Item item;
  item.memory.push_back(base(tensor));
  item.work = [cpu = as_cpu(tensor), value] { cpu.fill_(value); };
  fake.push(current_stream(tensor.device()), std::move(item));
}

bool has_queued_work(c10::Device device) {
  Fake& fake = Fake::get();
  const std::unique_lock lock(fake.mutex);
  const auto& streams = fake.queues.at(static_cast<std::size_t>(device.index()));
  return !std::all_of(streams.begin(), streams.end(), [](const Queue& q) { return q.empty(); });
}

std::vector<c10::Stream> recorded_streams(const at::Tensor& tensor) {
  Fake& fake = Fake::get();
  const std::unique_lock lock(fake.mutex);
  return fake.blocks.at(base(tensor)).recorded;
}

c10::Stream allocation_stream(const at::Tensor& tensor) {
  Fake& fake = Fake::get();
  const std::unique_lock lock(fake.mutex);
  return fake.blocks.at(base(tensor)).stream;
}

std::vector<std::string> take_violations() {
  const auto [fake, lock] = locked();
  return std::exchange(fake.violations, {});
}

std::vector<int> take_contexts() {
  const auto [fake, lock] = locked();
  std::vector<int> devices;
  for (int device = 0; device < kDevices; ++device) {
    if (std::exchange(fake.contexts.at(static_cast<std::size_t>(device)), false))
      devices.push_back(device);
  }
  return devices;
}

void fail_allocations(int count) {
  const auto [fake, lock] = locked();
  fake.failing_allocations = count;
}

void break_device(int index) {
  const auto [fake, lock] = locked();
  fake.broken.at(static_cast<std::size_t>(index)) = true;
}

void heal() {
  const auto [fake, lock] = locked();
  fake.broken = {};
}

}  // namespace stitch::testing::fake_device
