#include "tests/gpu/double/fake_memory.h"

#include <sys/mman.h>

#include <cstring>
#include <stdexcept>
#include <utility>

namespace stitch::transport::gpu::test {
namespace {

constexpr std::size_t kArena = std::size_t{64} << 30;  // address space; pages come when touched
constexpr std::size_t kPage = 4096;
constexpr std::size_t kRedZone = 64;
constexpr int kNew = 0xcc, kFreed = 0xdd, kRed = 0xfb;
constexpr std::size_t kPoisoned = std::size_t{64} << 20;  // of a block, at most

std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
const std::byte* address(const void* memory) { return static_cast<const std::byte*>(memory); }

}  // namespace

FakeMemory::FakeMemory(Report report) : report_(std::move(report)) {
  void* const arena = mmap(nullptr, kArena, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED) throw std::runtime_error("the double of the GPU got no address space");
  arena_ = static_cast<std::byte*>(arena);
}

FakeMemory::~FakeMemory() { munmap(arena_, kArena); }

std::string FakeMemory::name(const Block& block) const {
  const char* const kind = block.kind == Kind::device ? "device block " : "pinned block ";
  std::string text = kind + std::to_string(block.id) + " (" + std::to_string(block.bytes) +
                     " bytes, process " + std::to_string(block.process);
  if (block.kind == Kind::device) text += ", device " + std::to_string(block.device);
  return text + ")";
}

void* FakeMemory::allocate(Kind kind, int process, int device, std::size_t bytes,
                           const Actor& actor) {
  const std::size_t length = kPage + pages(bytes + kRedZone);
  if (length > kArena - arena_used_) return nullptr;
  auto block = std::make_unique<Block>();
  block->id = static_cast<int>(blocks_.size());
  block->kind = kind;
  block->process = process;
  block->device = device;
  block->base = arena_ + arena_used_ + kPage;
  block->bytes = bytes;
  arena_used_ += length;
  poison(block->base, bytes);
  std::memset(block->base - kRedZone, kRed, kRedZone);
  std::memset(block->base + bytes, kRed, kRedZone);
  block->cells[0] = Cell{{actor.epoch, std::make_shared<const std::string>("its allocation")}, {}};
  by_address_[block->base] = block->id;
  blocks_.push_back(std::move(block));
  return blocks_.back()->base;
}

bool FakeMemory::release(Kind kind, int process, void* memory, const Actor& actor) {
  const auto found = by_address_.find(address(memory));
  if (found == by_address_.end()) return false;
  Block& block = *blocks_[static_cast<std::size_t>(found->second)];
  if (block.kind != kind || block.process != process) return false;
  if (!block.live) {
    report_(name(block) + " is freed twice, by " + actor.what);
    return false;
  }
  check_red_zone(block);
  check_write(actor, block, 0, block.bytes, "free");
  block.live = false;
  if (block.bytes > (std::size_t{1} << 20)) {
    madvise(block.base, pages(block.bytes), MADV_DONTNEED);
  } else {
    std::memset(block.base, kFreed, block.bytes);
  }
  return true;
}

FakeMemory::Place FakeMemory::find(const void* memory) const {
  Place place;
  const auto found = by_address_.upper_bound(address(memory));
  if (found == by_address_.begin()) return place;
  const Block& block = *blocks_[static_cast<std::size_t>(std::prev(found)->second)];
  const auto offset = static_cast<std::size_t>(address(memory) - block.base);
  // Behind the end but before the next block: outside of this one, which access() will say.
  if (offset >= pages(block.bytes + kRedZone)) return place;
  place = {block.id, block.kind, block.process, block.device, offset, block.bytes, block.live};
  return place;
}

std::size_t FakeMemory::split(Block& block, std::size_t offset) {
  if (offset < block.bytes && !block.cells.contains(offset)) {
    const Cell cell = std::prev(block.cells.upper_bound(offset))->second;
    block.cells.emplace(offset, cell);
  }
  return offset;
}

bool FakeMemory::conflict(const Actor& actor, const Block& block, std::size_t offset,
                          const char* action, const Access& earlier, const char* earlier_action) {
  if (actor.clock->covers(earlier.epoch)) return false;
  report_(std::string(action) + " by " + actor.what + " at offset " + std::to_string(offset) +
          " of " + name(block) + " is not ordered after the " + earlier_action + " by " +
          *earlier.what);
  return true;
}

bool FakeMemory::check_write(const Actor& actor, Block& block, std::size_t begin, std::size_t end,
                             const char* action) {
  for (auto at = block.cells.lower_bound(begin); at != block.cells.end() && at->first < end; ++at) {
    const Access& written = at->second.write;
    if (conflict(actor, block, at->first, action, written, "write")) return false;
    for (const Access& read : at->second.reads) {
      if (conflict(actor, block, at->first, action, read, "read")) return false;
    }
  }
  return true;
}

bool FakeMemory::access(const Actor& actor, const void* memory, std::size_t bytes, bool write) {
  const char* const action = write ? "write" : "read";
  const Place place = find(memory);
  if (bytes == 0) return true;
  if (place.block < 0) {
    if (address(memory) < arena_ || address(memory) >= arena_ + kArena) return true;
    report_(std::string(action) + " by " + actor.what + " is outside of every block");
    return false;
  }
  Block& block = *blocks_[static_cast<std::size_t>(place.block)];
  const std::string where = std::string(action) + " by " + actor.what + ": " + name(block) + " ";
  if (!place.live) {
    report_(where + "was freed before");
    return false;
  }
  if (place.process != actor.process) {
    report_(where + "is not mapped in process " + std::to_string(actor.process));
    return false;
  }
  if (place.offset > block.bytes || bytes > block.bytes - place.offset) {
    report_(where + "ends before offset " + std::to_string(place.offset + bytes));
    return false;
  }
  if (actor.device >= 0 && place.kind == Kind::device && place.device != actor.device &&
      !has_peer_access(actor.process, actor.device, place.device)) {
    report_(where + "is no memory of device " + std::to_string(actor.device) +
            ", and peer access is not enabled");
    return false;
  }
  const std::size_t begin = split(block, place.offset);
  const std::size_t end = split(block, place.offset + bytes);
  const Access access{actor.epoch, std::make_shared<const std::string>(actor.what)};
  if (write) {
    check_write(actor, block, begin, end, action);
    block.cells.erase(block.cells.lower_bound(begin), block.cells.lower_bound(end));
    block.cells[begin] = Cell{access, {}};
    return true;
  }
  bool reported = false;
  for (auto at = block.cells.lower_bound(begin); at != block.cells.end() && at->first < end; ++at) {
    if (!reported) {
      reported = conflict(actor, block, at->first, action, at->second.write, "write");
    }
    std::vector<Access>& reads = at->second.reads;
    const auto same = [&](const Access& read) {
      return read.epoch.timeline == actor.epoch.timeline;
    };
    reads.erase(std::remove_if(reads.begin(), reads.end(), same), reads.end());
    reads.push_back(access);
  }
  return true;
}

void FakeMemory::poison(void* memory, std::size_t bytes) {
  std::memset(memory, kNew, std::min(bytes, kPoisoned));
}

void FakeMemory::enable_peer_access(int process, int device, int peer) {
  peer_access_.insert({process, {device, peer}});
}

bool FakeMemory::has_peer_access(int process, int device, int peer) const {
  return peer_access_.contains({process, {device, peer}});
}

std::size_t FakeMemory::used(int device) const {
  std::size_t bytes = 0;
  for (const auto& block : blocks_) {
    if (block->live && block->device == device) bytes += block->bytes;
  }
  return bytes;
}

void FakeMemory::check_red_zone(const Block& block) {
  for (std::size_t i = 0; i < kRedZone; ++i) {
    const auto red = std::byte{kRed};
    if (block.base[block.bytes + i] != red || *(block.base - 1 - i) != red) {
      report_("the red zone of " + name(block) + " was written");
      std::memset(block.base - kRedZone, kRed, kRedZone);
      std::memset(block.base + block.bytes, kRed, kRedZone);
      return;
    }
  }
}

void FakeMemory::check_red_zones() {
  for (const auto& block : blocks_) {
    if (block->live) check_red_zone(*block);
  }
}

}  // namespace stitch::transport::gpu::test
