#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

#include "stitch/transport/ip_address.h"
#include "stitch/transport/stream/link.h"
#include "stitch/transport/wire/handshake.h"
#include "stitch/transport/wire/record.h"
#include "tests/support/plain_test.h"
#include "tests/transport/recorder.h"

namespace stitch::transport {

// Polls for a condition that no event reports. False when `timeout` has passed.
template <class Condition>
[[nodiscard]] bool wait_until(Condition condition,
                              std::chrono::milliseconds timeout = kTestTimeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return condition();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

// A blocking socket connected to "tcp://127.0.0.1:4711" or "shm://name", -1 when that fails.
[[nodiscard]] inline base::Descriptor connect_raw(const std::string& address) {
  const std::string rest = address.substr(address.find("://") + 3);
  if (address.starts_with("tcp://")) {
    const auto ip = IpAddress::parse_with_port(rest);
    if (!ip) return base::Descriptor();
    base::Descriptor socket(::socket(ip->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&ip->address), ip->bytes) != 0)
      return base::Descriptor();
    return socket;
  }
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path + 1, rest.data(), std::min(rest.size(), sizeof(name.sun_path) - 1));
  base::Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + rest.size());
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), bytes) != 0)
    return base::Descriptor();
  return socket;
}

// Sends what the other side takes; it may hang up meanwhile.
inline void send_raw(int socket, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count <= 0) return;
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
}

// Reads and drops until the other side ends the connection. False when it does not.
[[nodiscard]] inline bool wait_hung_up(int socket,
                                       std::chrono::milliseconds timeout = kTestTimeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::array<char, 4096> dropped;
  while (std::chrono::steady_clock::now() < deadline) {
    pollfd event{socket, POLLIN, 0};
    if (::poll(&event, 1, 100) <= 0) continue;
    const ssize_t count = ::recv(socket, dropped.data(), dropped.size(), MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) return true;
  }
  return false;
}

// What the connecting side of shared memory hands over, right or wrong.
struct RawOffer {
  std::string words = std::string("STCHSHM1") + std::string("\0\0\x10\0\0\0\0\0", 8);
  std::size_t descriptors = 1;
  off_t bytes = 4096 + 2 * 1048576;
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  bool sealable = true;
  // Contents of the memory when it is handed over: offsets and words.
  std::vector<std::pair<off_t, std::uint64_t>> words_in_memory;
};

// Sends the words with these descriptors; as sendmsg(2).
inline ssize_t send_with_descriptors(int socket, std::string words,
                                     const std::vector<int>& descriptors) {
  iovec part{words.data(), words.size()};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * std::max<std::size_t>(1, descriptors.size())));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), sizeof(int) * descriptors.size());
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL);
}

// Makes the memory that the offer describes and sends it; returns its descriptor.
inline base::Descriptor send_offer(int socket, const RawOffer& offer) {
  base::Descriptor memory(
      ::memfd_create("stitch-test", MFD_CLOEXEC | (offer.sealable ? MFD_ALLOW_SEALING : 0U)));
  EXPECT_EQ(::ftruncate(memory.get(), offer.bytes), 0);
  for (const auto& [at, word] : offer.words_in_memory)
    EXPECT_EQ(::pwrite(memory.get(), &word, sizeof(word), at), 8);
  if (offer.sealable && offer.seals != 0) {
    EXPECT_EQ(::fcntl(memory.get(), F_ADD_SEALS, offer.seals), 0);
  }
  EXPECT_EQ(
      send_with_descriptors(socket, offer.words, std::vector<int>(offer.descriptors, memory.get())),
      static_cast<ssize_t>(offer.words.size()));
  return memory;
}

// One record, with its bytes.
[[nodiscard]] inline std::string record_text(RecordKind kind, std::uint32_t buffers,
                                             std::uint64_t bytes, std::string_view content = {}) {
  std::array<std::byte, RecordHeader::kBytes> head{};
  RecordHeader{kind, buffers, bytes}.encode(head.data());
  return std::string(reinterpret_cast<const char*>(head.data()), head.size()) +
         std::string(content);
}

// The connecting side of a connection, written from WIRE.md by hand: it can do what no
// endpoint does. One thread.
class RawPeer {
 public:
  // Connects, and over shared memory hands it over.
  explicit RawPeer(const std::string& address) : socket_(connect_raw(address)) {
    EXPECT_TRUE(socket_) << address;
    if (!address.starts_with("shm://")) return;
    const base::Descriptor memory = send_offer(socket_.get(), {});
    void* at = ::mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
    EXPECT_NE(at, MAP_FAILED);
    memory_ = static_cast<std::byte*>(at);
  }
  ~RawPeer() {
    if (memory_ != nullptr) ::munmap(memory_, kMemory);
  }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  [[nodiscard]] int socket() const { return socket_.get(); }
  void hang_up() { socket_ = base::Descriptor(); }

  // Writes everything; false when the other side takes nothing for long or has ended.
  bool write(std::string_view bytes) {
    return wait_until([&] {
             const ssize_t count = memory_ != nullptr
                                       ? write_ring(bytes)
                                       : ::send(socket_.get(), bytes.data(), bytes.size(),
                                                MSG_NOSIGNAL | MSG_DONTWAIT);
             if (count > 0) bytes.remove_prefix(static_cast<std::size_t>(count));
             return bytes.empty() || (count < 0 && errno != EAGAIN);
           }) &&
           bytes.empty();
  }
  // Reads as many bytes; fewer when the other side sends nothing for long.
  std::string read(std::size_t bytes) {
    std::string all;
    static_cast<void>(wait_until([&] {
      std::string some(bytes - all.size(), '\0');
      const ssize_t count = memory_ != nullptr
                                ? read_ring(some)
                                : ::recv(socket_.get(), some.data(), some.size(), MSG_DONTWAIT);
      if (count > 0) all.append(some, 0, static_cast<std::size_t>(count));
      return all.size() == bytes || count == 0 || (count < 0 && errno != EAGAIN);
    }));
    return all;
  }
  // The next message record's frame; empty at the end.
  std::string read_message() {
    const std::string head = read(RecordHeader::kBytes);
    if (head.size() < RecordHeader::kBytes) return {};
    const RecordHeader header =
        RecordHeader::decode(reinterpret_cast<const std::byte*>(head.data()));
    if (header.kind != RecordKind::message || header.buffers != 0) return {};
    return read(static_cast<std::size_t>(header.bytes));
  }
  bool write_message(std::string_view frame) {
    return write(record_text(RecordKind::message, 0, frame.size(), frame));
  }
  [[nodiscard]] static std::string hello() {
    const base::Bytes greeting = Handshake(named(), Wanted{1}, {}).greeting();
    return std::string(reinterpret_cast<const char*>(greeting.data()), greeting.size());
  }
  // False when the other side refuses.
  bool shake_hands() {
    Handshake handshake(named(), Wanted{1}, {});
    const auto say = [this](const base::Bytes& words) {
      return write_message({reinterpret_cast<const char*>(words.data()), words.size()});
    };
    if (!say(handshake.greeting())) return false;
    for (int i = 0; i < 4 && handshake.state() != Handshake::State::open; ++i) {
      const std::string heard = read_message();
      for (const base::Bytes& answer : handshake.receive(std::as_bytes(std::span(heard)))) {
        if (!say(answer)) return false;
      }
    }
    return handshake.state() == Handshake::State::open;
  }

  // The shared memory. `ours`: what concerns the ring that we write.
  enum Field : std::size_t { written = 0, taken = 64, reader_sleeps = 128, writer_waits = 192 };
  template <class T>
  [[nodiscard]] std::atomic_ref<T> at(bool ours, Field field) {
    return std::atomic_ref<T>(*reinterpret_cast<T*>(memory_ + (ours ? 0 : 256) + field));
  }
  void ring_doorbell() {
    static_cast<void>(!::send(socket_.get(), "", 1, MSG_NOSIGNAL | MSG_DONTWAIT));
  }

  static constexpr std::size_t kRing = 1048576;

 private:
  static constexpr std::size_t kMemory = 4096 + 2 * kRing;
  [[nodiscard]] static Hello named() {
    Hello self;
    self.id = 77;
    self.name = "raw";
    return self;
  }
  ssize_t write_ring(std::string_view bytes) {
    auto count = at<std::uint64_t>(true, written);
    const std::uint64_t before = count.load();
    const std::size_t step = std::min<std::size_t>(
        bytes.size(),
        kRing - static_cast<std::size_t>(before - at<std::uint64_t>(true, taken).load()));
    errno = EAGAIN;
    if (step == 0) return -1;
    for (std::size_t i = 0; i < step; ++i)
      memory_[4096 + (before + i) % kRing] = static_cast<std::byte>(bytes[i]);
    count.store(before + step);
    if (at<std::uint32_t>(true, reader_sleeps).exchange(0) != 0) ring_doorbell();
    return static_cast<ssize_t>(step);
  }
  ssize_t read_ring(std::string& into) {
    auto count = at<std::uint64_t>(false, taken);
    const std::uint64_t before = count.load();
    const std::uint64_t there = at<std::uint64_t>(false, written).load() - before;
    const std::size_t step = std::min<std::size_t>(into.size(), static_cast<std::size_t>(there));
    errno = EAGAIN;
    if (step == 0) {
      char bell = 0;
      const ssize_t heard = ::recv(socket_.get(), &bell, 1, MSG_DONTWAIT);
      return heard == 0 ? 0 : -1;
    }
    for (std::size_t i = 0; i < step; ++i)
      into[i] = static_cast<char>(memory_[4096 + kRing + (before + i) % kRing]);
    count.store(before + step);
    if (there - step <= kRing / 4 && at<std::uint32_t>(false, writer_waits).exchange(0) != 0)
      ring_doorbell();
    return static_cast<ssize_t>(step);
  }

  base::Descriptor socket_;
  std::byte* memory_ = nullptr;
};

}  // namespace stitch::transport
