#include "tests/gpu/device/pair_end.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>

namespace stitch::transport::gpu::check {

namespace {

constexpr auto kLongestWait = std::chrono::minutes(1);
constexpr char kFrame = 'F';
constexpr char kNamed = 'N';     // a transfer: Named
constexpr char kVerified = 'V';  // a transfer that was looked at: Verified
constexpr char kDone = 'D';      // nothing more is sent, and all of it has been looked at

struct Named {
  std::uint64_t id;
  std::uint64_t bytes;
  std::uint8_t value;
};
struct Verified {
  std::uint64_t id;
  std::uint8_t right;
};

bool read_exactly(int socket, void* to, std::size_t count) {
  auto* at = static_cast<std::byte*>(to);
  while (count > 0) {
    const ssize_t got = ::recv(socket, at, count, 0);
    if (got <= 0) return false;
    at += got;
    count -= static_cast<std::size_t>(got);
  }
  return true;
}

template <class T>
T as(const std::vector<std::byte>& bytes) {
  T value{};
  std::memcpy(&value, bytes.data(), std::min(sizeof(T), bytes.size()));
  return value;
}

}  // namespace

void require(const CudaApi& cuda, cuda::Status status, const char* what) {
  if (status != cuda::kSuccess)
    throw std::runtime_error(std::string(what) + ": " + cuda.get_error_string(status));
}

Memory::Memory(const CudaApi& cuda, std::size_t bytes) : cuda_(cuda) {
  require(cuda_, cuda_.set_device(0), "set_device");
  require(cuda_, cuda_.malloc(&data_, bytes), "malloc");
  require(cuda_, cuda_.stream_create_with_priority(&stream_, cuda::kStreamNonBlocking, 0),
          "stream_create");
}
Memory::~Memory() {
  static_cast<void>(cuda_.set_device(0));
  static_cast<void>(cuda_.stream_synchronize(stream_));
  static_cast<void>(cuda_.stream_destroy(stream_));
  static_cast<void>(cuda_.free(data_));
}

int writes_that_take(const CudaApi& cuda, std::size_t bytes, std::chrono::milliseconds time) {
  const Memory memory(cuda, bytes);
  constexpr int kMost = 1 << 14;
  for (int times = 4; times < kMost; times *= 2) {
    require(cuda, cuda.stream_synchronize(memory.stream()), "stream_synchronize");
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < times; ++i)
      require(cuda, cuda.memset_async(memory.data(), i, bytes, memory.stream()), "memset");
    require(cuda, cuda.stream_synchronize(memory.stream()), "stream_synchronize");
    if (std::chrono::steady_clock::now() - begin >= time) return times;
  }
  return kMost;
}

PairEnd::PairEnd(Options options)
    : options_(std::move(options)), cuda_(options_.lanes->cuda()), consumer_(source_of(256)) {
  DeviceTransfers::Options of_transfers;
  of_transfers.self = options_.number;
  of_transfers.lanes = options_.lanes;
  of_transfers.use_nccl = options_.path == Path::nccl;
  // One GPU is taken for those of two hosts: NCCL does the same for distinct NCCL_HOSTID.
  if (options_.path == Path::nccl) of_transfers.identity.host[0] ^= options_.host + 1;
  of_transfers.send_frame = [this](PeerId, base::Bytes frame) {
    write(kFrame, frame.data(), frame.size());
  };
  transfers_ = std::make_unique<DeviceTransfers>(std::move(of_transfers));
  verifier_ = std::thread([this] { verify_all(); });
  reader_ = std::thread([this] { read_all(); });
}

PairEnd::~PairEnd() {
  ::shutdown(options_.socket, SHUT_RDWR);
  reader_.join();
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  verifier_.join();
  transfers_.reset();
  ::close(options_.socket);
}

// Errors show at the reader.
void PairEnd::write(char kind, const void* bytes, std::size_t count) {
  const auto size = static_cast<std::uint32_t>(count);
  std::array<char, 1 + sizeof(size)> head{kind};
  std::memcpy(head.data() + 1, &size, sizeof(size));
  const std::lock_guard lock(writing_);
  for (auto part : {std::span(reinterpret_cast<const char*>(head.data()), head.size()),
                    std::span(static_cast<const char*>(bytes), count)}) {
    while (!part.empty()) {
      const ssize_t done = ::send(options_.socket, part.data(), part.size(), MSG_NOSIGNAL);
      if (done <= 0) return;
      part = part.subspan(static_cast<std::size_t>(done));
    }
  }
}

void PairEnd::read_all() {
  const PeerId peer = 1 - options_.number;
  char kind = 0;
  std::uint32_t size = 0;
  while (read_exactly(options_.socket, &kind, 1) &&
         read_exactly(options_.socket, &size, sizeof(size))) {
    std::vector<std::byte> body(size);
    if (!read_exactly(options_.socket, body.data(), size)) break;
    if (kind == kFrame) transfers_->on_frame(peer, body);
    if (kind == kNamed) on_named(body);
    if (kind == kVerified) on_verified(body);
    if (kind == kDone) {
      const std::lock_guard lock(mutex_);
      other_is_done_ = true;
      changed_.notify_all();
    }
  }
  transfers_->on_peer_lost(peer, Error(ErrorCode::disconnected, "the other process is gone"));
  const std::lock_guard lock(mutex_);
  lost_ = true;
  changed_.notify_all();
}

void PairEnd::on_named(const std::vector<std::byte>& body) {
  const auto named = as<Named>(body);
  const auto arriving = std::make_shared<Arrived>();
  arriving->id = named.id;
  arriving->bytes = named.bytes;
  arriving->value = named.value;
  transfers_->receive(
      1 - options_.number, named.id, 0, named.bytes,
      [this, arriving](int, std::size_t bytes, cuda::Stream) {
        arriving->memory = std::make_shared<Memory>(cuda_, bytes);
        return DeviceMemory{arriving->memory->data(), arriving->memory};
      },
      [this, arriving](const std::optional<Error>& error, std::shared_ptr<void>) {
        if (error) return;  // its source says so
        const std::lock_guard lock(mutex_);
        arrived_.push_back(std::move(*arriving));
        changed_.notify_all();
      });
}

void PairEnd::on_verified(const std::vector<std::byte>& body) {
  const auto verified = as<Verified>(body);
  const std::lock_guard lock(mutex_);
  outcomes_[verified.id].verified = verified.right != 0;
  changed_.notify_all();
}

std::shared_ptr<Memory> PairEnd::source_of(std::size_t bytes) const {
  return std::make_shared<Memory>(cuda_, bytes + options_.delay_bytes);
}

// Writes what lies behind the bytes to send, again and again.
void PairEnd::delay(const Memory& memory, std::size_t behind) {
  for (int i = 0; i < options_.delay_times && options_.delay_bytes > 0; ++i) {
    require(cuda_,
            cuda_.memset_async(static_cast<std::byte*>(memory.data()) + behind, i,
                               options_.delay_bytes, memory.stream()),
            "memset");
  }
}

// The consumer: behind a delay, and long after its source has heard of the arrival.
bool PairEnd::holds(const Arrived& arrived) {
  std::vector<std::uint8_t> host(arrived.bytes);
  require(cuda_, cuda_.set_device(0), "set_device");
  delay(*consumer_, 256);
  require(cuda_,
          cuda_.memcpy_async(host.data(), arrived.memory->data(), arrived.bytes,
                             cuda::kDeviceToHost, consumer_->stream()),
          "memcpy");
  require(cuda_, cuda_.stream_synchronize(consumer_->stream()), "stream_synchronize");
  return std::all_of(host.begin(), host.end(),
                     [&](std::uint8_t byte) { return byte == arrived.value; });
}

void PairEnd::verify_all() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || !arrived_.empty(); });
    if (arrived_.empty()) return;
    const Arrived next = std::move(arrived_.front());
    arrived_.pop_front();
    lock.unlock();
    const Verified verified{next.id, static_cast<std::uint8_t>(holds(next) ? 1 : 0)};
    write(kVerified, &verified, sizeof(verified));
    lock.lock();
  }
}

std::uint64_t PairEnd::send(std::shared_ptr<Memory> source, std::size_t bytes, std::uint8_t value,
                            bool ordered) {
  struct Kept {
    const CudaApi& cuda;
    const std::shared_ptr<Memory> memory;
    cuda::Event event = nullptr;
    ~Kept() {
      static_cast<void>(cuda.set_device(0));
      if (event != nullptr) static_cast<void>(cuda.event_destroy(event));
    }
  };
  const std::shared_ptr<Kept> kept(new Kept{cuda_, std::move(source)});
  const cuda::Stream stream = kept->memory->stream();
  require(cuda_, cuda_.set_device(0), "set_device");
  require(cuda_, cuda_.event_create_with_flags(&kept->event, cuda::kEventDisableTiming),
          "event_create");
  require(cuda_, cuda_.memset_async(kept->memory->data(), 0xDD, bytes, stream), "memset");
  delay(*kept->memory, bytes);
  require(cuda_, cuda_.memset_async(kept->memory->data(), value, bytes, stream), "memset");
  require(cuda_, cuda_.event_record(kept->event, stream), "event_record");
  const TransferId id = transfers_->new_id();
  {
    const std::lock_guard lock(mutex_);
    outcomes_[id] = {};
  }
  const Named named{id, bytes, value};
  write(kNamed, &named, sizeof(named));
  transfers_->send(
      id, 1 - options_.number, 0, {0, kept->memory->data(), bytes}, ordered ? kept->event : nullptr,
      kept, [this, id, bytes, memory = kept->memory](std::optional<Error> error) {
        if (!error) {
          static_cast<void>(cuda_.memset_async(memory->data(), 0xEE, bytes, memory->stream()));
        }
        const std::lock_guard lock(mutex_);
        outcomes_[id].sent = true;
        outcomes_[id].error = std::move(error);
        changed_.notify_all();
      });
  return id;
}

bool PairEnd::wait() {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kLongestWait, [this] {
    return std::all_of(outcomes_.begin(), outcomes_.end(), [this](const auto& at) {
      const Outcome& outcome = at.second;
      return outcome.sent && (outcome.verified || outcome.error || lost_);
    });
  });
}

std::vector<PairEnd::Outcome> PairEnd::take_outcomes() {
  const std::lock_guard lock(mutex_);
  std::vector<Outcome> all;
  for (auto& [id, outcome] : outcomes_) all.push_back(std::move(outcome));
  outcomes_.clear();
  return all;
}

std::uint64_t PairEnd::sent_by(Path path) const {
  std::uint64_t sum = 0;
  for (const auto& each : transfers_->counters().paths) {
    if (each.sent && each.path == path) sum += each.messages;
  }
  return sum;
}

bool PairEnd::finish() {
  write(kDone, nullptr, 0);
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kLongestWait, [this] { return other_is_done_ || lost_; }) &&
         other_is_done_;
}

void PairEnd::serve() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return lost_; });
}

}  // namespace stitch::transport::gpu::check
