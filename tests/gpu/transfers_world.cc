#include "tests/gpu/transfers_world.h"

#include <algorithm>

namespace stitch::transport::gpu::test {
namespace {

constexpr std::chrono::seconds kLimit(30);

// What the thread that reads messages does: it makes no call of CUDA, which might block it.
class Reading {
 public:
  explicit Reading(const FakeGpu& gpu) : gpu_(gpu), calls_(gpu.calls_of_this_host()) {}
  ~Reading() { EXPECT_EQ(gpu_.calls_of_this_host(), calls_) << "the thread that reads calls CUDA"; }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  const FakeGpu& gpu_;
  const std::uint64_t calls_;
};

}  // namespace

TestNetwork::TestNetwork(std::size_t workers, std::uint64_t seed,
                         std::chrono::microseconds max_delay)
    : random_(seed), max_delay_(max_delay), inboxes_(workers), cut_(workers) {
  for (std::size_t i = 0; i < workers; ++i) {
    inboxes_[i].thread = std::thread([this, i] { run(i); });
  }
}

TestNetwork::~TestNetwork() { stop(); }

void TestNetwork::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (Inbox& inbox : inboxes_) {
    if (inbox.thread.joinable()) inbox.thread.join();
  }
}

void TestNetwork::send(std::size_t from, std::size_t to, Delivery delivery) {
  const std::lock_guard lock(mutex_);
  if (cut_[from] || cut_[to]) return;
  Inbox& inbox = inboxes_[to];
  auto due = Clock::now() + std::chrono::microseconds(
                                random_() % static_cast<std::uint64_t>(max_delay_.count() + 1));
  due = std::max(due, inbox.last[from]);
  inbox.last[from] = due;
  inbox.items.emplace(due, Item{from, std::move(delivery)});
  changed_.notify_all();
}

void TestNetwork::cut(std::size_t worker, const std::function<void(std::size_t)>& lost) {
  const std::lock_guard lock(mutex_);
  if (cut_[worker]) return;
  cut_[worker] = true;
  inboxes_[worker].items.clear();
  for (std::size_t i = 0; i < inboxes_.size(); ++i) {
    if (i == worker || cut_[i]) continue;
    std::erase_if(inboxes_[i].items, [&](const auto& item) { return item.second.from == worker; });
    inboxes_[i].items.emplace(Clock::now(), Item{i, [lost, i] { lost(i); }});
  }
  changed_.notify_all();
}

void TestNetwork::pause(std::size_t worker) {
  const std::lock_guard lock(mutex_);
  inboxes_[worker].paused = true;
}

void TestNetwork::resume(std::size_t worker) {
  const std::lock_guard lock(mutex_);
  inboxes_[worker].paused = false;
  changed_.notify_all();
}

void TestNetwork::run(std::size_t worker) {
  std::unique_lock lock(mutex_);
  Inbox& inbox = inboxes_[worker];
  while (!stopping_) {
    if (inbox.items.empty() || inbox.paused) {
      changed_.wait(lock);
      continue;
    }
    const auto due = inbox.items.begin()->first;
    if (due > Clock::now()) {
      changed_.wait_until(lock, due);
      continue;
    }
    auto node = inbox.items.extract(inbox.items.begin());
    lock.unlock();
    node.mapped().delivery();
    node.mapped().delivery = nullptr;
    lock.lock();
  }
}

TransfersWorld::TransfersWorld(Options options)
    : gpu(options.gpu),
      network(std::make_unique<TestNetwork>(options.workers, options.gpu.seed, options.max_delay)),
      processes_(options.processes),
      closed_(options.workers) {
  for (std::size_t i = processes_.size(); i < options.workers; ++i) {
    processes_.push_back(static_cast<int>(i));
  }
  for (const auto& [of, version] : options.nccl_versions) gpu.set_nccl_version(of, version);
  for (std::size_t i = 0; i < options.workers; ++i) {
    auto& lanes = lanes_[process(i)];
    if (lanes == nullptr) lanes = std::make_shared<Lanes>(cuda(i), &gpu.nccl(process(i)));
    DeviceTransfers::Options of_worker;
    of_worker.self = i;
    of_worker.lanes = lanes;
    of_worker.identity.process = static_cast<std::uint64_t>(process(i));
    of_worker.send_frame = [this, i](PeerId to, base::Bytes frame) {
      auto bytes = std::make_shared<base::Bytes>(std::move(frame));
      network->send(i, to, [this, i, to, bytes] {
        const Reading reading(gpu);
        try {
          transfers[to]->on_frame(i, bytes->span());
        } catch (const Error& error) {
          const std::lock_guard lock(mutex_);
          protocol_error = error.what();
        }
      });
    };
    of_worker.say = [this, i](PeerId peer, const std::string& text) {
      const std::lock_guard lock(mutex_);
      said_[{i, peer}].push_back(text);
    };
    if (options.adjust) options.adjust(i, of_worker);
    transfers.push_back(std::make_unique<DeviceTransfers>(std::move(of_worker)));
  }
}

TransfersWorld::~TransfersWorld() { end(); }

void TransfersWorld::end() {
  if (transfers.empty()) return;
  for (std::size_t i = 0; i < transfers.size(); ++i) shut_down(i, std::chrono::milliseconds(0));
  network->stop();
  transfers.clear();
  lanes_.clear();
  if (may_come.empty() || protocol_error != may_come) {
    EXPECT_EQ(protocol_error, "");
  }
  EXPECT_EQ(gpu.open_communicators(), 0U);
}

std::vector<std::string> TransfersWorld::said(std::size_t worker, std::size_t peer) {
  const std::lock_guard lock(mutex_);
  return said_[{worker, peer}];
}

std::string TransfersWorld::take_protocol_error() {
  const std::lock_guard lock(mutex_);
  return std::exchange(protocol_error, "");
}

void TransfersWorld::ended(TestTransfer::Ends& ends) {
  const std::lock_guard lock(mutex_);
  if (ends.sent > 0 && ends.received > 0) ends.ended = true;
  changed_.notify_all();
}

std::shared_ptr<TestTransfer> TransfersWorld::start(std::size_t from, int from_device,
                                                    std::size_t to, int to_device,
                                                    std::size_t bytes, char value, int gate,
                                                    bool receive) {
  auto transfer = std::make_shared<TestTransfer>();
  transfer->from = from;
  transfer->to = to;
  transfer->from_device = from_device;
  transfer->to_device = to_device;
  transfer->bytes = bytes;
  transfer->value = value;
  // The source's memory and event go when the last of the transfer does.
  struct Source {
    FakeGpu& gpu;
    int process, device;
    void* memory = nullptr;
    cuda::Event event = nullptr;
    cuda::Stream stream = nullptr;
    ~Source() {
      const CudaApi& api = gpu.cuda(process);
      const int before = gpu.current_device(process);
      (void)api.set_device(device);
      if (memory != nullptr) (void)api.free(memory);
      if (event != nullptr) (void)api.event_destroy(event);
      if (stream != nullptr) (void)api.stream_destroy(stream);
      (void)api.set_device(before);
      (void)api.get_last_error();
    }
  };
  const std::shared_ptr<Source> source(new Source{gpu, process(from), from_device});
  const CudaApi& api = cuda(from);
  EXPECT_EQ(api.set_device(from_device), cuda::kSuccess);
  EXPECT_EQ(api.stream_create_with_priority(&source->stream, cuda::kStreamNonBlocking, 0),
            cuda::kSuccess);
  EXPECT_EQ(api.event_create_with_flags(&source->event, cuda::kEventDisableTiming), cuda::kSuccess);
  if (bytes > 0) {
    EXPECT_EQ(api.malloc(&source->memory, bytes), cuda::kSuccess);
    if (source->memory == nullptr) return nullptr;
    EXPECT_EQ(gpu.fill(process(from), source->stream, source->memory, bytes, value, gate),
              cuda::kSuccess);
  }
  EXPECT_EQ(api.event_record(source->event, source->stream), cuda::kSuccess);
  const TransferId id = transfers[from]->new_id();
  transfers[from]->send(id, to, to_device, {from_device, source->memory, bytes}, source->event,
                        source, [this, ends = transfer->ends](std::optional<Error> error) {
                          ends->send_error = std::move(error);
                          ++ends->sent;
                          ended(*ends);
                        });
  // Moved on: the thread that reads is not the last to have it, as that calls CUDA.
  network->send(from, to, [this, from, to, id, transfer, receive]() mutable {
    const Reading reading(gpu);
    if (receive) return this->receive(to, from, id, std::move(transfer));
    transfers[to]->refuse(from, id, Error(ErrorCode::overloaded, "not wanted"));
    ++transfer->received;
    ended(*transfer->ends);
  });
  return transfer;
}

void TransfersWorld::receive(std::size_t worker, std::size_t from, TransferId id,
                             std::shared_ptr<TestTransfer> transfer) {
  const int device = transfer->to_device;
  const std::size_t size = transfer->bytes;
  DeviceTransfers::Allocate allocate =
      [this, worker, transfer](int device, std::size_t bytes, cuda::Stream stream) -> DeviceMemory {
    // libtorch would take it for an error of its own.
    EXPECT_EQ(cuda(worker).get_last_error(), cuda::kSuccess);
    if (failing_allocations > 0 && failing_allocations-- > 0) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(allocation_ms));
    void* memory = nullptr;
    const CudaApi& api = cuda(worker);
    if (api.malloc(&memory, bytes) != cuda::kSuccess) {
      (void)api.get_last_error();
      return {};
    }
    std::shared_ptr<void> owner(memory, [this, worker, &api, device, stream](void* freed) {
      const int before = gpu.current_device(process(worker));
      (void)api.set_device(device);
      // As an allocator does that hands memory out again once its stream is done with it.
      cuda::Event event = nullptr;
      if (api.event_create_with_flags(&event, cuda::kEventDisableTiming) == cuda::kSuccess) {
        (void)api.event_record(event, stream);
        (void)api.event_destroy(event);
      }
      (void)api.free(freed);
      (void)api.set_device(before);
      (void)api.get_last_error();
    });
    transfer->memory = memory;
    transfer->memory_owner = owner;
    return {memory, owner};
  };
  transfers[worker]->receive(from, id, device, size, std::move(allocate),
                             [this, transfer = std::move(transfer)](
                                 std::optional<Error> error, std::shared_ptr<void> acknowledgment) {
                               if (keep_acknowledgments) {
                                 const std::lock_guard lock(mutex_);
                                 acknowledgments.push_back(std::move(acknowledgment));
                               }
                               transfer->receive_error = std::move(error);
                               if (transfer->receive_error) transfer->memory_owner.reset();
                               ++transfer->received;
                               ended(*transfer->ends);
                             });
}

void TransfersWorld::wait(const TestTransfer& transfer) {
  std::unique_lock lock(mutex_);
  ASSERT_TRUE(changed_.wait_for(lock, kLimit, [&] { return transfer.ended.load(); }))
      << "transfer from worker " << transfer.from << " to " << transfer.to << ": sent "
      << transfer.sent << ", received " << transfer.received << "\n"
      << gpu.describe_unfinished();
}

void TransfersWorld::expect_bytes(const TestTransfer& transfer) {
  ASSERT_FALSE(transfer.send_error) << transfer.send_error->what();
  ASSERT_FALSE(transfer.receive_error) << transfer.receive_error->what();
  if (transfer.bytes == 0) return;
  const CudaApi& api = cuda(transfer.to);
  EXPECT_EQ(api.set_device(transfer.to_device), cuda::kSuccess);
  cuda::Stream stream = nullptr;
  EXPECT_EQ(api.stream_create_with_priority(&stream, cuda::kStreamNonBlocking, 0), cuda::kSuccess);
  const auto equal = std::make_shared<bool>(false);
  EXPECT_EQ(gpu.check(process(transfer.to), stream, transfer.memory, transfer.bytes, transfer.value,
                      equal),
            cuda::kSuccess);
  EXPECT_EQ(api.stream_synchronize(stream), cuda::kSuccess);
  EXPECT_TRUE(*equal) << transfer.bytes << " bytes from worker " << transfer.from;
  EXPECT_EQ(api.stream_destroy(stream), cuda::kSuccess);
}

void TransfersWorld::expect_arrival(std::size_t from, int from_device, std::size_t to,
                                    int to_device, std::size_t bytes, char value) {
  const auto transfer = start(from, from_device, to, to_device, bytes, value);
  ASSERT_NO_FATAL_FAILURE(wait(*transfer));
  expect_bytes(*transfer);
}

void TransfersWorld::expect_arrivals(int count, std::size_t from, int from_device, std::size_t to,
                                     int to_device, std::size_t bytes) {
  std::vector<std::shared_ptr<TestTransfer>> started;
  for (int i = 0; i < count; ++i)
    started.push_back(start(from, from_device, to, to_device, bytes, static_cast<char>('a' + i)));
  for (const auto& each : started) {
    ASSERT_NO_FATAL_FAILURE(wait(*each));
    expect_bytes(*each);
  }
}

std::uint64_t TransfersWorld::breaks() const {
  return transfers[0]->counters().breaks + transfers[1]->counters().breaks;
}

void TransfersWorld::on_lane(std::size_t worker, int device,
                             const std::function<void(Lane&)>& task) {
  Lane& lane = lanes(worker)->lane(device);
  std::promise<void> done;
  lane.post([&] {
    task(lane);
    done.set_value();
  });
  done.get_future().wait();
}

void TransfersWorld::await_path(std::size_t from, int from_device, std::size_t to, int to_device,
                                Path path) {
  const auto before = count(from, to, path, true).messages;
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  while (count(from, to, path, true).messages == before) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << to_string(path) << " is never used";
    ASSERT_NO_FATAL_FAILURE(expect_arrival(from, from_device, to, to_device, 1000, 'p'));
  }
}

DeviceTransfers::PathCount TransfersWorld::count(std::size_t worker, std::size_t peer, Path path,
                                                 bool sent) const {
  DeviceTransfers::PathCount sum;
  for (const auto& entry : transfers[worker]->counters().paths) {
    if (entry.peer != peer || entry.path != path || entry.sent != sent) continue;
    sum.messages += entry.messages;
    sum.bytes += entry.bytes;
  }
  return sum;
}

void TransfersWorld::lose(std::size_t worker) {
  const Error why(ErrorCode::disconnected, "worker " + std::to_string(worker) + " is gone");
  network->cut(worker, [this, worker, why](std::size_t other) {
    const Reading reading(gpu);
    transfers[other]->on_peer_lost(worker, why);
  });
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    if (i != worker) transfers[worker]->on_peer_lost(i, why);
  }
}

void TransfersWorld::shut_down(std::size_t worker, std::chrono::milliseconds limit) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_[worker]) return;
    closed_[worker] = true;
  }
  transfers[worker]->shutdown(std::chrono::steady_clock::now() + limit);
}

}  // namespace stitch::transport::gpu::test
