#include "stitch/transport/stream/shm_link.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <new>
#include <string>
#include <utility>

#include "stitch/base/mutex.h"

#if defined(__SANITIZE_THREAD__)
#define STITCH_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define STITCH_TSAN 1
#endif
#endif

namespace stitch::transport {

namespace {

constexpr std::size_t kRingBytes = std::size_t{1} << 20;
// Progress is published in steps, so that the other side copies at the same time.
constexpr std::size_t kStepBytes = std::size_t{64} << 10;
// Large transfers leave half of the ring free, and most of it when small messages are about: those
// wait for that much at most.
constexpr std::size_t kBulkBytes = kRingBytes / 2;
constexpr std::size_t kFewBulkBytes = kRingBytes / 8;
constexpr std::size_t kMinBulkBytes = kFewBulkBytes / 2;
// A writer that waits for room is woken when this much or less is left to read: then a large
// transfer can go on, too.
constexpr std::size_t kRoomAgainBytes = kFewBulkBytes - kMinBulkBytes;
constexpr std::size_t kControlBytes = 4096;
constexpr std::size_t kMemoryBytes = kControlBytes + 2 * kRingBytes;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

// One direction, as it lies in the shared memory. Positions count bytes since the beginning and
// never wrap.
struct RingControl {
  alignas(64) std::atomic<std::uint64_t> written;  // by the writer
  alignas(64) std::atomic<std::uint64_t> taken;    // by the reader
  alignas(64)
      std::atomic<std::uint32_t> reader_sleeps;  // set by the reader, cleared by whoever wakes it
  alignas(64)
      std::atomic<std::uint32_t> writer_waits;  // set by the writer, cleared by whoever wakes it
};
static_assert(sizeof(RingControl) * 2 <= kControlBytes);

// What goes with the descriptor of the memory.
struct Offer {
  std::array<char, 8> magic{'S', 'T', 'C', 'H', 'S', 'H', 'M', '1'};
  std::uint64_t ring_bytes = kRingBytes;
};

// ThreadSanitizer cannot see that two mappings are one memory: when both ends live in one process,
// this orders them, and no other links, whose races would be hidden by that.
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

[[noreturn]] void fail(const char* what) {
  throw Error(ErrorCode::disconnected,
              std::string("shared memory: ") + what + " failed: " + std::strerror(errno));
}

// Whether the system counts every page of shared memory against a limit when it is first touched
// (vm.overcommit_memory = 2).
[[nodiscard]] bool pages_are_counted() {
  std::ifstream file("/proc/sys/vm/overcommit_memory");
  int mode = 0;
  return file >> mode && mode == 2;
}

// The memory's pages are there from now on. Where they are counted, the first touch of one that is
// not granted would end the process (SIGBUS), in either of the two. Elsewhere that cannot happen,
// and a connection that carries little had better not hold 2 MiB.
void take_pages(int memory) {
  static const bool counted = pages_are_counted();
  if (!counted) return;
  int result = 0;
  do {
    result = fallocate(memory, 0, 0, static_cast<off_t>(kMemoryBytes));
  } while (result != 0 && errno == EINTR);
  // A kernel that cannot do it in advance is as good as before.
  if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS) fail("fallocate");
}

class ShmLink final : public Link {
 public:
  ShmLink(base::Descriptor socket, const base::Descriptor& memory, bool offered)
      : socket_(std::move(socket)), tsan_order_(memory.get()) {
    void* at = mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
    if (at == MAP_FAILED) fail("mmap");
    memory_ = static_cast<std::byte*>(at);
    auto* controls = reinterpret_cast<RingControl*>(memory_);
    // The first ring carries what the offering side writes.
    out_ = offered ? &controls[0] : &controls[1];
    in_ = offered ? &controls[1] : &controls[0];
    std::byte* rings = memory_ + kControlBytes;
    out_ring_ = offered ? rings : rings + kRingBytes;
    in_ring_ = offered ? rings + kRingBytes : rings;
    // Nobody polls yet.
    in_->reader_sleeps.store(1);
  }
  ~ShmLink() override { munmap(memory_, kMemoryBytes); }
  ShmLink(const ShmLink&) = delete;
  ShmLink& operator=(const ShmLink&) = delete;

  int descriptor() const noexcept override { return socket_.get(); }
  bool cheap() const noexcept override { return true; }
  bool exposed() const noexcept override { return false; }

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
    in_->taken.store(taken_, std::memory_order_seq_cst);
    if (in_->writer_waits.load(std::memory_order_seq_cst) != 0 && readable() <= kRoomAgainBytes &&
        in_->writer_waits.exchange(0) != 0) {
      ring();
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
      ring();
    return room - left;
  }

  std::size_t bulk_room(bool few) override {
    const std::size_t most = few ? kFewBulkBytes : kBulkBytes;
    const std::size_t used = unread();
    if (used >= most) return 0;
    const std::size_t room = most - used;
    return room < kMinBulkBytes ? 0 : room;
  }

  bool await_room() override {
    wants_room_.store(true);
    if (awake_.load()) return true;  // it polls, and looks for room before it sleeps
    return wait_for_room();          // which is full for good when the peer has broken the rules
  }

  std::optional<Error> ended() override {
    if (broken_.load())
      return Error(ErrorCode::protocol, "the peer wrote nonsense into the shared memory");
    if (gone_) return Error(ErrorCode::disconnected, "the peer closed the connection");
    return std::nullopt;
  }

  void on_descriptor() override {
    std::array<char, 64> bells;
    constexpr int kAtOnce = 16;  // what is left makes the descriptor ready again
    for (int i = 0; i < kAtOnce; ++i) {
      const ssize_t count = recv(socket_.get(), bells.data(), bells.size(), MSG_DONTWAIT);
      if (count == static_cast<ssize_t>(bells.size()) || (count < 0 && errno == EINTR)) continue;
      if (count == 0 || (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) gone_ = true;
      return;
    }
  }

  bool sleep() override {
    awake_.store(false);
    in_->reader_sleeps.store(1, std::memory_order_seq_cst);
    if ((readable() > 0 && !held_) || broken_.load()) return false;
    return !wants_room_.load() || wait_for_room();
  }

  void wake() override {
    awake_.store(true);
    in_->reader_sleeps.store(0, std::memory_order_relaxed);
    if (out_->writer_waits.load(std::memory_order_relaxed) != 0)
      out_->writer_waits.store(0, std::memory_order_relaxed);
  }

  void hold(bool held) override { held_ = held; }

  void close() noexcept override { ::shutdown(socket_.get(), SHUT_RDWR); }

 private:
  [[nodiscard]] std::size_t readable() {
    if (!socket_) return 0;  // as in write()
    const std::uint64_t there = in_->written.load(std::memory_order_seq_cst) - taken_;
    if (there <= kRingBytes) return static_cast<std::size_t>(there);
    break_off();
    return 0;
  }
  // What the peer has not taken yet. The ring of a peer that lies counts as full. By the thread
  // that writes.
  [[nodiscard]] std::size_t unread() {
    const std::uint64_t used =
        written_.load(std::memory_order_relaxed) - out_->taken.load(std::memory_order_seq_cst);
    if (used <= kRingBytes) return static_cast<std::size_t>(used);
    break_off();
    return kRingBytes;
  }
  // The peer broke the rules. The end of the socket has the thread that polls look at ended().
  void break_off() noexcept {
    if (!broken_.exchange(true)) close();
  }
  // By any thread: while another one writes, the two counts may not fit each other, which says
  // nothing of the peer. Then there is room, or the one that writes asks again.
  bool wait_for_room() {
    if (broken_.load()) return true;
    out_->writer_waits.store(1, std::memory_order_seq_cst);
    const std::uint64_t used =
        written_.load(std::memory_order_relaxed) - out_->taken.load(std::memory_order_seq_cst);
    return used > kRoomAgainBytes && used <= kRingBytes;
  }
  // Wakes the other side. When its socket is full it has bells to hear already.
  void ring() noexcept {
    const char bell = 0;
    static_cast<void>(!::send(socket_.get(), &bell, 1, MSG_DONTWAIT | MSG_NOSIGNAL));
  }

  const base::Descriptor socket_;
  [[no_unique_address]] TsanOrder tsan_order_;
  std::byte* memory_ = nullptr;
  RingControl* in_ = nullptr;
  RingControl* out_ = nullptr;
  std::byte* in_ring_ = nullptr;
  std::byte* out_ring_ = nullptr;
  std::uint64_t taken_ = 0;                // our own copies: the shared ones are for the peer
  std::atomic<std::uint64_t> written_{0};  // by the thread that writes
  bool gone_ = false;                      // the thread that polls only
  bool held_ = false;                      // likewise
  std::atomic<bool> broken_{false};
  std::atomic<bool> awake_{false};
  std::atomic<bool> wants_room_{false};  // the connection waits for room; cleared by the next write
};

}  // namespace

namespace {

[[nodiscard]] uid_t overflow_user() {
  uid_t user = 65534;
  if (std::ifstream file("/proc/sys/kernel/overflowuid"); file) file >> user;
  return user;
}

// Whether this process is in a user namespace that has no numbers for some users.
[[nodiscard]] bool some_users_are_unmapped() {
  std::ifstream file("/proc/self/uid_map");
  std::uint64_t inside = 0;
  std::uint64_t outside = 0;
  std::uint64_t count = 0;
  const bool whole = file >> inside >> outside >> count && inside == 0 && outside == 0 &&
                     count >= std::numeric_limits<std::uint32_t>::max();
  return !whole;
}

}  // namespace

void check_peer_user(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) fail("SO_PEERCRED");
  // In a user namespace every user who has no number there looks like the overflow user: nobody can
  // tell whether that is this one.
  if (peer.uid == geteuid() && !(peer.uid == overflow_user() && some_users_are_unmapped())) return;
  throw Error(ErrorCode::unauthenticated,
              "shared memory is for processes of one user: the peer runs as user " +
                  std::to_string(peer.uid) + ", this process as " + std::to_string(geteuid()));
}

base::Descriptor open_shm_memory() noexcept {
  return base::Descriptor(memfd_create("stitch", MFD_CLOEXEC | MFD_ALLOW_SEALING));
}

std::unique_ptr<Link> offer_shm_link(base::Descriptor socket, const base::Descriptor& memory) {
  if (ftruncate(memory.get(), static_cast<off_t>(kMemoryBytes)) != 0) fail("ftruncate");
  take_pages(memory.get());
  // Of a size for good: neither side can make the other one read past its end.
  if (fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail("sealing");
  const int fd = memory.get();
  Offer offer;
  iovec part{&offer, sizeof(offer)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
  if (sendmsg(socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) !=
      static_cast<ssize_t>(sizeof(offer)))
    fail("handing it over");
  return std::make_unique<ShmLink>(std::move(socket), memory, true);
}

std::unique_ptr<Link> accept_shm_link(base::Descriptor& socket) {
  Offer offer;
  offer.magic = {};
  iovec part{&offer, sizeof(offer)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * 4)> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t count = recvmsg(socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return nullptr;
  if (count == 0)
    throw Error(ErrorCode::disconnected,
                "the peer closed the connection before it handed over memory");
  if (count < 0) fail("recvmsg");

  base::Descriptor memory;
  std::size_t descriptors = 0;
  for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr;
       each = CMSG_NXTHDR(&message, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t many = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < many; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(each) + i * sizeof(int), sizeof(int));
      memory = base::Descriptor(fd);
      ++descriptors;
    }
  }
  // The kernel drops descriptors for which this process has no number: not the peer's fault.
  if (descriptors == 0 && (message.msg_flags & MSG_CTRUNC) != 0) {
    throw Error(ErrorCode::overloaded,
                "shared memory: this process has no descriptor left for the peer's offer");
  }
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorCode::protocol, "shared memory: the peer's offer " + what);
  };
  if (count != static_cast<ssize_t>(sizeof(offer)) || offer.magic != Offer{}.magic)
    refuse("is not one of stitch");
  if (offer.ring_bytes != kRingBytes)
    refuse("has rings of " + std::to_string(offer.ring_bytes) + " bytes, not " +
           std::to_string(kRingBytes));
  if (descriptors != 1) refuse("came with " + std::to_string(descriptors) + " descriptors, not 1");
  struct stat status {};
  if (fstat(memory.get(), &status) != 0 || status.st_size != static_cast<off_t>(kMemoryBytes))
    refuse("has another size than it says");
  const int seals = fcntl(memory.get(), F_GET_SEALS);
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  if (seals < 0 || (seals & kSeals) != kSeals) refuse("could change its size");
  take_pages(memory.get());  // the peer may not have
  return std::make_unique<ShmLink>(std::move(socket), memory, false);
}

}  // namespace stitch::transport
