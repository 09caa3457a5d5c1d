#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/gpu/double/vector_clock.h"

namespace stitch::transport::gpu::test {

// The memory of the simulated machine: device memory and pinned host memory in one arena, with
// poison in what is new and what is freed, red zones around each block, and for each byte range its
// last writer and its readers since. An access that is not ordered after those it conflicts with is
// reported. Freed blocks are never handed out again. Not thread-safe: the machine's lock guards it.
class FakeMemory {
 public:
  using Report = std::function<void(std::string)>;
  enum class Kind { device, pinned };
  // Who accesses: an operation on a stream, or a host thread.
  struct Actor {
    int process = 0;
    int device = -1;  // of a kernel, whose accesses need the device's memory or peer access
    const VectorClock* clock = nullptr;
    Epoch epoch;
    std::string what;
  };
  struct Place {
    int block = -1;  // -1: memory that this machine does not know (pageable host memory)
    Kind kind = Kind::pinned;
    int process = 0;  // that may use this address
    int device = -1;
    std::size_t offset = 0;
    std::size_t bytes = 0;  // of the block
    bool live = true;
  };

  explicit FakeMemory(Report report);
  ~FakeMemory();
  FakeMemory(const FakeMemory&) = delete;
  FakeMemory& operator=(const FakeMemory&) = delete;

  // Null when the arena is used up.
  void* allocate(Kind kind, int process, int device, std::size_t bytes, const Actor& actor);
  // Frees a block at its base. False when there is none of that kind and process at this address. A
  // free that some access is not ordered before is reported, and so are written red zones.
  bool release(Kind kind, int process, void* memory, const Actor& actor);

  [[nodiscard]] Place find(const void* memory) const;
  // Checks and records. False: the bytes must not be touched.
  bool access(const Actor& actor, const void* memory, std::size_t bytes, bool write);
  void poison(void* memory, std::size_t bytes);

  void enable_peer_access(int process, int device, int peer);
  [[nodiscard]] bool has_peer_access(int process, int device, int peer) const;
  // Of a device; -1: pinned.
  [[nodiscard]] std::size_t used(int device) const;
  void check_red_zones();

 private:
  struct Access {
    Epoch epoch;
    std::shared_ptr<const std::string> what;
  };
  struct Cell {  // from its offset to that of the next
    Access write;
    std::vector<Access> reads;
  };
  struct Block {
    int id = 0;
    Kind kind = Kind::device;
    int process = 0, device = -1;
    std::byte* base = nullptr;
    std::size_t bytes = 0;
    bool live = true;
    std::map<std::size_t, Cell> cells;
  };
  std::size_t split(Block& block, std::size_t offset);
  bool conflict(const Actor& actor, const Block& block, std::size_t offset, const char* action,
                const Access& earlier, const char* earlier_action);
  bool check_write(const Actor& actor, Block& block, std::size_t begin, std::size_t end,
                   const char* action);
  void check_red_zone(const Block& block);
  [[nodiscard]] std::string name(const Block& block) const;

  Report report_;
  std::byte* arena_ = nullptr;
  std::size_t arena_used_ = 0;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::map<const std::byte*, int> by_address_;  // blocks by their base
  std::set<std::pair<int, std::pair<int, int>>> peer_access_;
};

}  // namespace stitch::transport::gpu::test
