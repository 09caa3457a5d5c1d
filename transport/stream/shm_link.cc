#include "stitch/transport/stream/shm_link.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/transport/stream/shm_memory.h"
#include "stitch/transport/stream/socket_address.h"

#if defined(__SANITIZE_THREAD__)
#define STITCH_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define STITCH_TSAN 1
#endif
#endif

namespace stitch::transport {

namespace {

constexpr std::size_t kRingBytes = ShmLayout::kRingBytes;
// Progress is published in steps of so many bytes, so that the other side copies at the same time.
constexpr std::size_t kStepBytes = std::size_t{64} << 10;
// A large transfer fills at most half of the ring, and an eighth of it while small messages are
// about: those wait for at most that many bytes.
constexpr std::size_t kMaxBulkBytes = kRingBytes / 2;
constexpr std::size_t kMaxBulkBytesBesideSmall = kRingBytes / 8;
// Smaller pieces of a large transfer cost more than they save waiting.
constexpr std::size_t kMinBulkBytes = kMaxBulkBytesBesideSmall / 2;
// A writer that waits for room is woken when at most so many bytes are left to read: then a large
// transfer can continue, too.
constexpr std::size_t kRoomAgainBytes = kMaxBulkBytesBesideSmall - kMinBulkBytes;
// A reader that has taken less than this says so later, unless a writer waits: the writer looks at
// that count before each message, and finds it in its cache while it does not change.
constexpr std::size_t kTakenLateBytes = 4096;
static_assert(kRoomAgainBytes >= 2 * kTakenLateBytes);
// The pages of the ring that a writer has touched are given back once so many calls of trim() in a
// row have found less than so many bytes written since the one before (heartbeats, say), unless
// they are few.
constexpr int kTrimmingCalls = 8;
constexpr std::size_t kQuietBytes = std::size_t{16} << 10;
constexpr std::size_t kKeptBytes = std::size_t{64} << 10;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

// One direction, as laid out in the shared memory. Positions count bytes since the beginning and
// never wrap.
struct RingControl {
  alignas(64) std::atomic<std::uint64_t> written;        // by the writer
  alignas(64) std::atomic<std::uint64_t> taken;          // by the reader
  alignas(64) std::atomic<std::uint32_t> reader_sleeps;  // set by the reader, cleared by its waker
  alignas(64) std::atomic<std::uint32_t> writer_waits;   // set by the writer, cleared by its waker
};
static_assert(sizeof(RingControl) * 2 <= ShmLayout::kControlBytes);

// ThreadSanitizer cannot see that two mappings are one memory: when both ends live in one process,
// this orders them. It does so for each link by itself, so that races of others are not hidden.
#ifdef STITCH_TSAN
class TsanOrder {
 public:
  // Both ends find the same word by the number of the file that the memory is.
  explicit TsanOrder(int memory) {
    struct stat status {};
    if (fstat(memory, &status) != 0) return;
    base::MutexLock lock(mutex());
    std::weak_ptr<std::atomic<int>>& shared = words()[status.st_ino];
    word_ = shared.lock();
    if (!word_) shared = word_ = std::make_shared<std::atomic<int>>(0);
  }
  void release() { word_->fetch_add(1, std::memory_order_release); }
  void acquire() { static_cast<void>(word_->load(std::memory_order_acquire)); }

 private:
  static base::Mutex& mutex() {
    static auto* const mutex =
        new base::Mutex;  // never destroyed: links may outlive static objects
    return *mutex;
  }
  static std::map<ino_t, std::weak_ptr<std::atomic<int>>>& words() {
    static auto* const words = new std::map<ino_t, std::weak_ptr<std::atomic<int>>>;
    return *words;
  }
  std::shared_ptr<std::atomic<int>> word_ = std::make_shared<std::atomic<int>>(0);
};
#else
struct TsanOrder {
  explicit TsanOrder(int) {}
  void release() {}
  void acquire() {}
};
#endif

class ShmLink final : public Link {
 public:
  ShmLink(base::Descriptor socket, const base::Descriptor& memory, bool offered)
      : socket_(std::move(socket)), tsan_order_(memory.get()) {
    void* at =
        mmap(nullptr, ShmLayout::kMemoryBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
    if (at == MAP_FAILED) throw socket_error(errno).with_prefix("shared memory: mmap failed");
    memory_ = static_cast<std::byte*>(at);
    auto* controls = reinterpret_cast<RingControl*>(memory_);
    // The first ring carries what the offering side writes.
    out_ = offered ? &controls[0] : &controls[1];
    in_ = offered ? &controls[1] : &controls[0];
    std::byte* rings = memory_ + ShmLayout::kControlBytes;
    out_ring_ = offered ? rings : rings + kRingBytes;
    in_ring_ = offered ? rings + kRingBytes : rings;
    // The reader starts asleep: no thread polls yet.
    in_->reader_sleeps.store(1);
  }
  ~ShmLink() override { munmap(memory_, ShmLayout::kMemoryBytes); }

  int descriptor() const noexcept override { return socket_.get(); }
  bool cheap() const noexcept override { return true; }
  bool exposed() const noexcept override { return false; }
  bool within_host() const noexcept override { return true; }

  std::size_t read(std::span<const iovec> parts) override {
    const std::size_t there = readable();
    if (there == 0) return 0;
    tsan_order_.acquire();
    std::size_t left = there;
    for (const iovec& part : parts) {
      auto* to = static_cast<std::byte*>(part.iov_base);
      std::size_t wanted = std::min(part.iov_len, left);
      left -= wanted;
      while (wanted > 0) {
        const std::size_t at = taken_ % kRingBytes;
        const std::size_t step = std::min({wanted, kRingBytes - at, kStepBytes});
        std::memcpy(to, in_ring_ + at, step);
        to += step;
        wanted -= step;
        taken_ += step;
        if (wanted > 0) in_->taken.store(taken_, std::memory_order_release);
      }
      if (left == 0) break;
    }
    // A writer that is to wait sees more than kRoomAgainBytes unread, so this side is yet to read
    // more than kTakenLateBytes, and to publish that: then one of the two sees the other (Dekker).
    if (taken_ - taken_published_ >= kTakenLateBytes || in_->writer_waits.load() != 0) {
      in_->taken.store(taken_, std::memory_order_seq_cst);
      taken_published_ = taken_;
      if (in_->writer_waits.load(std::memory_order_seq_cst) != 0 && readable() <= kRoomAgainBytes &&
          in_->writer_waits.exchange(0) != 0) {
        ring_doorbell();
      }
    }
    return there - left;
  }

  std::size_t write(std::span<const iovec> parts) override {
    const std::size_t room = kRingBytes - unread();
    if (room == 0 || !socket_) return 0;  // no socket: a forked child, which shares the memory
    if (wants_room_.load(std::memory_order_relaxed))
      wants_room_.store(false, std::memory_order_relaxed);
    tsan_order_.release();
    std::size_t left = room;
    std::uint64_t written = written_.load(std::memory_order_relaxed);
    const auto publish = [&](std::memory_order order) {
      written_.store(written, std::memory_order_relaxed);
      out_->written.store(written, order);
    };
    for (const iovec& part : parts) {
      const auto* from = static_cast<const std::byte*>(part.iov_base);
      std::size_t wanted = std::min(part.iov_len, left);
      left -= wanted;
      while (wanted > 0) {
        const std::size_t at = written % kRingBytes;
        const std::size_t step = std::min({wanted, kRingBytes - at, kStepBytes});
        std::memcpy(out_ring_ + at, from, step);
        from += step;
        wanted -= step;
        written += step;
        if (wanted > 0) publish(std::memory_order_release);
      }
      if (left == 0) break;
    }
    publish(std::memory_order_seq_cst);
    if (out_->reader_sleeps.load(std::memory_order_seq_cst) != 0 &&
        out_->reader_sleeps.exchange(0) != 0)
      ring_doorbell();
    return room - left;
  }

  std::size_t bulk_room(bool few) override {
    const std::size_t most = few ? kMaxBulkBytesBesideSmall : kMaxBulkBytes;
    const std::size_t used = unread();
    if (used >= most) return 0;
    const std::size_t room = most - used;
    return room < kMinBulkBytes ? 0 : room;
  }

  bool await_room() override {
    wants_room_.store(true);
    if (awake_.load()) return true;  // it polls, or will soon, and looks for room before it sleeps
    return wait_for_room();          // true, and never room again, once the ring is corrupt
  }

  std::optional<Error> ended() override {
    if (const char* const what = corrupt_.load())
      return Error(ErrorCode::protocol, std::string("shared-memory ring is corrupt: ") + what);
    if (gone_) return Error(ErrorCode::disconnected, "the peer closed the connection");
    return std::nullopt;
  }

  bool quiet() override { return readable() == 0 && !gone_ && corrupt_.load() == nullptr; }

  void on_descriptor() override {
    std::array<char, 64> wake_ups;
    constexpr int kMaxReads = 16;  // what is left makes the descriptor ready again
    for (int i = 0; i < kMaxReads; ++i) {
      const ssize_t count = recv(socket_.get(), wake_ups.data(), wake_ups.size(), MSG_DONTWAIT);
      if (count == static_cast<ssize_t>(wake_ups.size()) || (count < 0 && errno == EINTR)) continue;
      if (count == 0 || (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) gone_ = true;
      return;
    }
  }

  bool sleep() override {
    awake_.store(false);
    in_->reader_sleeps.store(1, std::memory_order_seq_cst);
    if ((readable() > 0 && !suspended_) || corrupt_.load() != nullptr) return false;
    return !wants_room_.load() || wait_for_room();
  }

  void wake() override {
    awake_.store(true);
    in_->reader_sleeps.store(0, std::memory_order_relaxed);
    if (out_->writer_waits.load(std::memory_order_relaxed) != 0)
      out_->writer_waits.store(0, std::memory_order_relaxed);
  }

  void suspend_reading(bool suspended) override { suspended_ = suspended; }

  void trim() noexcept override {
    if (!socket_) return;  // as in write()
    const std::uint64_t written = written_.load(std::memory_order_relaxed);
    const std::size_t lately = static_cast<std::size_t>(written - written_at_trim_);
    written_at_trim_ = written;
    quiet_calls_ = lately < kQuietBytes ? quiet_calls_ + 1 : 0;
    if (quiet_calls_ < kTrimmingCalls || written - released_at_ < kKeptBytes) return;
    // What the peer has taken, so far as it has said so: nothing is read there before it is
    // written.
    const std::size_t free = kRingBytes - unread();
    const std::size_t at = written % kRingBytes;
    const std::size_t to_end = std::min(free, kRingBytes - at);
    release_shm_pages(out_ring_ + at, to_end);
    release_shm_pages(out_ring_, free - to_end);
    released_at_ = written;
  }

  void close() noexcept override { ::shutdown(socket_.get(), SHUT_RDWR); }

 private:
  [[nodiscard]] std::size_t readable() {
    if (!socket_) return 0;  // as in write()
    const std::uint64_t there = in_->written.load(std::memory_order_seq_cst) - taken_;
    if (there <= kRingBytes) return static_cast<std::size_t>(there);
    found_corrupt("write position out of range");
    return 0;
  }
  // Bytes that the peer has not taken yet. A corrupt ring counts as full. By the thread that
  // writes.
  [[nodiscard]] std::size_t unread() {
    const std::uint64_t used =
        written_.load(std::memory_order_relaxed) - out_->taken.load(std::memory_order_seq_cst);
    if (used <= kRingBytes) return static_cast<std::size_t>(used);
    found_corrupt("read position out of range");
    return kRingBytes;
  }
  // Closing the socket makes its descriptor ready, so that the thread that polls calls ended().
  void found_corrupt(const char* what) noexcept {
    const char* expected = nullptr;
    if (corrupt_.compare_exchange_strong(expected, what)) close();
  }
  // By any thread: while another one writes, the two positions read here may not match, which does
  // not mean that the ring is corrupt. Then there is room, or the thread that writes asks again.
  bool wait_for_room() {
    if (corrupt_.load() != nullptr) return true;
    out_->writer_waits.store(1, std::memory_order_seq_cst);
    const std::uint64_t used =
        written_.load(std::memory_order_relaxed) - out_->taken.load(std::memory_order_seq_cst);
    return used > kRoomAgainBytes && used <= kRingBytes;
  }
  // Wakes the other side. If the socket buffer is full, a wake-up is already pending.
  void ring_doorbell() noexcept {
    const char wake_up = 0;
    static_cast<void>(!::send(socket_.get(), &wake_up, 1, MSG_DONTWAIT | MSG_NOSIGNAL));
  }

  const base::Descriptor socket_;
  [[no_unique_address]] TsanOrder tsan_order_;
  std::byte* memory_ = nullptr;
  RingControl* in_ = nullptr;
  RingControl* out_ = nullptr;
  std::byte* in_ring_ = nullptr;
  std::byte* out_ring_ = nullptr;
  std::uint64_t taken_ = 0;                // our own copies: the shared ones are for the peer
  std::uint64_t taken_published_ = 0;      // seen by every writer that is to wait later
  std::atomic<std::uint64_t> written_{0};  // by the thread that writes
  std::uint64_t written_at_trim_ = 0;      // likewise, and the next two: at the last call
  std::uint64_t released_at_ = 0;          // when pages were last given back
  int quiet_calls_ = 0;
  bool gone_ = false;                          // the thread that polls only
  bool suspended_ = false;                     // likewise
  std::atomic<const char*> corrupt_{nullptr};  // what is wrong with the ring
  std::atomic<bool> awake_{false};
  std::atomic<bool> wants_room_{false};  // the connection waits for room; cleared by the next write
};

}  // namespace

std::unique_ptr<Link> offer_shm_link(base::Descriptor socket, const base::Descriptor& memory) {
  offer_shm_memory(socket.get(), memory);
  return std::make_unique<ShmLink>(std::move(socket), memory, true);
}

std::unique_ptr<Link> accept_shm_link(base::Descriptor& socket) {
  const base::Descriptor memory = accept_shm_memory(socket.get());
  if (!memory) return nullptr;
  return std::make_unique<ShmLink>(std::move(socket), memory, false);
}

}  // namespace stitch::transport
