#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "tests/gpu/double/machine.h"

namespace stitch::transport::gpu::test {

// What the two ranks of a communicator tell each other when they are in different processes, each
// with a machine of its own.
struct FarMessage {
  enum class Kind : std::uint32_t {
    hello,    // version, device, arena
    wants,    // the first transfer in a direction is ready to connect
    sending,  // the next send: bytes at `offset` of the sender's arena
    taken,    // has its bytes
  };
  Kind kind = Kind::hello;
  std::uint32_t direction = 0;  // the rank that sends
  std::int32_t version = 0, device = 0;
  std::uint64_t offset = 0, bytes = 0, total = 0;
  FakeMemory::Arena arena;
};

// The other rank of a communicator, in another process: a Unix socket, and a thread that reads
// it. Bytes are read out of the other's arena. Guarded by the machine's lock; its callbacks are
// called under it, and not once it is being destroyed, which must happen without the lock.
class FarRank {
 public:
  using OnMessage = std::function<void(const FarMessage&)>;
  using OnGone = std::function<void()>;

  // `listener`: a socket that the other will connect to, or -1: it listens at `path`.
  FarRank(Machine& machine, int listener, std::string path, OnMessage on_message, OnGone on_gone);
  ~FarRank();
  FarRank(const FarRank&) = delete;
  FarRank& operator=(const FarRank&) = delete;

  // A socket that listens at `path`.
  [[nodiscard]] static int listen_at(const std::string& path);
  void say(const FarMessage& message);
  // Nothing is said any more, which the other notices.
  void hang_up();

  // What the other rank has said.
  bool there = false;
  std::array<bool, 2> wants{}, wanted{};  // by direction: here, there
  FarMessage offered;                     // while `has_offer`
  bool has_offer = false;
  std::shared_ptr<OtherArena> arena;

 private:
  void run();
  bool meet();

  Machine& machine_;
  const int listener_;
  const std::string path_;
  const OnMessage on_message_;
  const OnGone on_gone_;
  std::atomic<int> socket_{-1};
  std::atomic<bool> closing_{false};
  std::thread thread_;
};

}  // namespace stitch::transport::gpu::test
