#include "stitch/transport/stream/shm_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "stitch/base/errno_text.h"
#include "stitch/base/error.h"
#include "stitch/base/signals.h"
#include "stitch/transport/stream/socket_address.h"

namespace stitch::transport {

namespace {

// Sent together with the descriptor of the memory.
struct Offer {
  std::array<char, 8> magic{'S', 'T', 'C', 'H', 'S', 'H', 'M', '1'};
  std::uint64_t ring_bytes = ShmLayout::kRingBytes;
};

[[noreturn]] void fail(const char* what) {
  throw socket_error(errno).with_prefix(std::string("shared memory: ") + what + " failed");
}

// Whether the system counts every page of shared memory against a limit when it is first touched
// (vm.overcommit_memory = 2).
[[nodiscard]] bool pages_are_counted() noexcept {
  const base::Descriptor file(::open("/proc/sys/vm/overcommit_memory", O_RDONLY | O_CLOEXEC));
  char mode = 0;
  return file && ::read(file.get(), &mode, 1) == 1 && mode == '2';
}

[[nodiscard]] bool counts_pages() noexcept {
  static const bool counted = pages_are_counted();
  return counted;
}

// Allocates the memory's pages where the system counts them: there, the first touch of a page that
// is not granted would end the process (SIGBUS), in either of the two. Elsewhere that cannot
// happen, and a connection that carries little should not hold 2 MiB.
void allocate_pages(int memory) {
  if (!counts_pages()) return;
  int result = 0;
  do {
    result = fallocate(memory, 0, 0, static_cast<off_t>(ShmLayout::kMemoryBytes));
  } while (result != 0 && errno == EINTR);
  // Where the kernel cannot allocate in advance, pages are allocated when they are touched.
  if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS) fail("fallocate");
}

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

void check_peer_user(int socket, bool has_secret) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) fail("SO_PEERCRED");
  // In a user namespace every user who has no number there looks like the overflow user, which may
  // then be another user than this one.
  if (peer.uid == geteuid() && !(peer.uid == overflow_user() && some_users_are_unmapped())) {
    if (peer.pid != 0 || has_secret) return;
    throw Error(ErrorCode::unauthenticated,
                "without a secret shared memory is for processes that see each other: the peer "
                "runs in another container");
  }
  throw Error(ErrorCode::unauthenticated,
              "shared memory is for processes of one user: the peer runs as user " +
                  std::to_string(peer.uid) + ", this process as " + std::to_string(geteuid()));
}

void release_shm_pages(std::byte* from, std::size_t bytes) noexcept {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(from);
  const std::uintptr_t first = (begin + page - 1) / page * page;
  const std::uintptr_t end = (begin + bytes) / page * page;
  if (first >= end || counts_pages()) return;
  static_cast<void>(::madvise(from + (first - begin), end - first, MADV_REMOVE));
}

base::Descriptor open_shm_memory() noexcept {
  return base::Descriptor(memfd_create("stitch", MFD_CLOEXEC | MFD_ALLOW_SEALING));
}

void offer_shm_memory(int socket, const base::Descriptor& memory) {
  const base::FileSizeSignalBlocked blocked;
  if (ftruncate(memory.get(), static_cast<off_t>(ShmLayout::kMemoryBytes)) != 0) fail("ftruncate");
  allocate_pages(memory.get());
  // The size cannot change any more: neither side can make the other one access memory past its
  // end.
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
  if (sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(offer)))
    fail("handing it over");
}

base::Descriptor accept_shm_memory(int socket) {
  Offer offer;
  offer.magic = {};
  iovec part{&offer, sizeof(offer)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * 4)> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t count = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
    return base::Descriptor();
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
                "shared memory: no descriptor for the peer's offer: " + base::errno_text(EMFILE));
  }
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorCode::protocol, "shared memory: the peer's offer " + what);
  };
  if (count != static_cast<ssize_t>(sizeof(offer)) || offer.magic != Offer{}.magic)
    refuse("is not one of stitch");
  if (offer.ring_bytes != ShmLayout::kRingBytes)
    refuse("has rings of " + std::to_string(offer.ring_bytes) + " bytes, not " +
           std::to_string(ShmLayout::kRingBytes));
  if (descriptors != 1) refuse("came with " + std::to_string(descriptors) + " descriptors, not 1");
  struct stat status {};
  if (fstat(memory.get(), &status) != 0 ||
      status.st_size != static_cast<off_t>(ShmLayout::kMemoryBytes))
    refuse("has another size than it says");
  const int seals = fcntl(memory.get(), F_GET_SEALS);
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  if (seals < 0 || (seals & kSeals) != kSeals) refuse("could change its size");
  allocate_pages(memory.get());  // the peer may not have
  return memory;
}

}  // namespace stitch::transport
