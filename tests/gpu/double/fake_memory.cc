#include "tests/gpu/double/fake_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>
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

// Which pages of which file are mapped for others to see at this address; empty: none.
std::string shared_pages(const void* memory) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    std::uint64_t offset = 0;
    char dash = 0;
    std::string rights, device, inode;
    words >> std::hex >> begin >> dash >> end >> rights >> offset >> device >> inode;
    const auto at = reinterpret_cast<std::uintptr_t>(memory);
    if (at < begin || at >= end) continue;
    if (rights.find('s') == std::string::npos || inode == "0") return "";
    return device + " " + inode + " " + std::to_string(offset + (at - begin));
  }
  return "";
}

}  // namespace

FakeMemory::FakeMemory(Report report) : report_(std::move(report)) {
  arena_fd_ = memfd_create("fake_gpu", MFD_CLOEXEC);
  if (arena_fd_ < 0 || ftruncate(arena_fd_, static_cast<off_t>(kArena)) != 0) {
    throw std::runtime_error("the double of the GPU got no memory");
  }
  void* const arena =
      mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena_fd_, 0);
  if (arena == MAP_FAILED) throw std::runtime_error("the double of the GPU got no address space");
  arena_ = static_cast<std::byte*>(arena);
}

FakeMemory::~FakeMemory() {
  for (const auto& [base, mapping] : mappings_) {
    if (!mapping.registered && blocks_[static_cast<std::size_t>(mapping.block)]->other == nullptr)
      munmap(mapping.base, mapping.length);
  }
  munmap(arena_, kArena);
  close(arena_fd_);
}

std::string FakeMemory::name(const Block& block) const {
  const char* const kind = block.kind == Kind::device   ? "device block "
                           : block.kind == Kind::pinned ? "pinned block "
                                                        : "registered block ";
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
  block->arena_offset = arena_used_ + kPage;
  block->base = arena_ + block->arena_offset;
  block->bytes = bytes;
  arena_used_ += length;
  poison(block->base, bytes);
  std::memset(block->base - kRedZone, kRed, kRedZone);
  std::memset(block->base + bytes, kRed, kRedZone);
  block->cells[0] =
      Cell{{process, actor.epoch, std::make_shared<const std::string>("its allocation")}, {}};
  by_address_[block->base] = block->id;
  blocks_.push_back(std::move(block));
  return blocks_.back()->base;
}

bool FakeMemory::register_host(int process, void* memory, std::size_t bytes, const Actor& actor) {
  const auto next = by_address_.lower_bound(address(memory));
  if (bytes == 0 || find(memory).block >= 0) return false;
  if (next != by_address_.end() && next->first < address(memory) + bytes) return false;
  const std::string file = shared_pages(memory);
  for (const auto& known : blocks_) {
    if (file.empty() || !known->live || known->file != file || known->bytes != bytes) continue;
    auto* const base = static_cast<std::byte*>(memory);
    mappings_[base] = Mapping{base, bytes, known->id, process, -1, 1, true};
    ++known->mappings;
    return true;
  }
  auto block = std::make_unique<Block>();
  block->id = static_cast<int>(blocks_.size());
  block->kind = Kind::registered;
  block->process = process;
  block->base = static_cast<std::byte*>(memory);
  block->bytes = bytes;
  block->file = file;
  block->cells[0] =
      Cell{{process, actor.epoch, std::make_shared<const std::string>("its registration")}, {}};
  by_address_[block->base] = block->id;
  blocks_.push_back(std::move(block));
  return true;
}

// Pages that are registered at several addresses live as long as one of them is.
bool FakeMemory::release_registered(int process, void* memory, const Actor& actor) {
  const auto mapped = mappings_.find(address(memory));
  const auto found = by_address_.find(address(memory));
  const bool alias = mapped != mappings_.end() && mapped->second.registered;
  if (!alias && found == by_address_.end()) return false;
  Block& block = *blocks_[static_cast<std::size_t>(alias ? mapped->second.block : found->second)];
  if (block.kind != Kind::registered ||
      (alias ? mapped->second.process : block.process) != process) {
    return false;
  }
  check_write(actor, block, 0, block.bytes, "unregistration", false);
  if (alias) {
    mappings_.erase(mapped);
    --block.mappings;
  } else {
    by_address_.erase(found);  // the memory may be registered again
    block.base = nullptr;
  }
  block.live = block.base != nullptr || block.mappings > 0;
  return true;
}

bool FakeMemory::release(Kind kind, int process, void* memory, const Actor& actor) {
  if (kind == Kind::registered) return release_registered(process, memory, actor);
  const auto found = by_address_.find(address(memory));
  if (found == by_address_.end()) return false;
  Block& block = *blocks_[static_cast<std::size_t>(found->second)];
  if (block.kind != kind || block.process != process) return false;
  if (!block.live) {
    report_(name(block) + " is freed twice, by " + actor.what);
    return false;
  }
  if (block.mappings > 0) {
    report_(name(block) + " is freed while another process has it mapped");
  }
  check_red_zone(block);
  check_write(actor, block, 0, block.bytes, "free");
  block.live = false;
  if (block.bytes > (std::size_t{1} << 20)) {
    madvise(block.base, pages(block.bytes), MADV_REMOVE);
  } else {
    std::memset(block.base, kFreed, block.bytes);
  }
  return true;
}

void FakeMemory::release_process(int process) {
  for (auto found = mappings_.begin(); found != mappings_.end();) {
    if (found->second.process == process) {
      blocks_[static_cast<std::size_t>(found->second.block)]->mappings -= found->second.opened;
      if (!found->second.registered &&
          blocks_[static_cast<std::size_t>(found->second.block)]->other == nullptr)
        munmap(found->second.base, found->second.length);
      found = mappings_.erase(found);
    } else {
      ++found;
    }
  }
  for (const auto& block : blocks_) {
    if (block->process == process)
      block->live = block->kind == Kind::registered && block->mappings > 0;
  }
}

FakeMemory::Place FakeMemory::find(const void* memory) const {
  Place place;
  const auto mapped = mappings_.upper_bound(address(memory));
  if (mapped != mappings_.begin()) {
    const Mapping& mapping = std::prev(mapped)->second;
    if (address(memory) < mapping.base + mapping.length) {
      const Block& block = *blocks_[static_cast<std::size_t>(mapping.block)];
      place = {block.id,
               block.kind,
               mapping.process,
               mapping.device,
               0,
               block.bytes,
               block.live && mapping.opened > 0,
               true};
      place.offset = static_cast<std::size_t>(address(memory) - mapping.base);
      return place;
    }
  }
  const auto found = by_address_.upper_bound(address(memory));
  if (found == by_address_.begin()) return place;
  const Block& block = *blocks_[static_cast<std::size_t>(std::prev(found)->second)];
  const auto offset = static_cast<std::size_t>(address(memory) - block.base);
  const bool arena = block.kind != Kind::registered;
  // Behind the end but before the next block: outside of this one, which access() will say.
  if (offset >= block.bytes + (arena ? pages(block.bytes + kRedZone) - block.bytes : 0)) {
    return place;
  }
  place = {block.id, block.kind,  block.process, block.device,
           offset,   block.bytes, block.live,    false};
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
                             const char* action, bool all) {
  const auto counts = [&](const Access& access) { return all || access.process == actor.process; };
  for (auto at = block.cells.lower_bound(begin); at != block.cells.end() && at->first < end; ++at) {
    const Access& written = at->second.write;
    if (counts(written) && conflict(actor, block, at->first, action, written, "write"))
      return false;
    for (const Access& read : at->second.reads) {
      if (counts(read) && conflict(actor, block, at->first, action, read, "read")) return false;
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
    report_(where + (block.live ? "was unmapped before" : "was freed before"));
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
  const Access access{actor.process, actor.epoch, std::make_shared<const std::string>(actor.what)};
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

void* FakeMemory::base(int block) const {
  if (block < 0 || static_cast<std::size_t>(block) >= blocks_.size()) return nullptr;
  return blocks_[static_cast<std::size_t>(block)]->base;
}

void* FakeMemory::map(int id, int process, int device) {
  if (id < 0 || static_cast<std::size_t>(id) >= blocks_.size()) return nullptr;
  Block& block = *blocks_[static_cast<std::size_t>(id)];
  if (!block.live || block.kind != Kind::device) return nullptr;
  ++block.mappings;
  for (auto& [base, mapping] : mappings_) {
    if (mapping.block == id && mapping.process == process && mapping.opened > 0) {
      ++mapping.opened;
      return mapping.base;
    }
  }
  const std::size_t length = pages(block.bytes);
  void* const memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, arena_fd_,
                            static_cast<off_t>(block.arena_offset));
  if (memory == MAP_FAILED) return nullptr;
  auto* const base = static_cast<std::byte*>(memory);
  mappings_[base] = Mapping{base, length, id, process, device, 1};
  return base;
}

FakeMemory::Arena FakeMemory::arena() const { return {getpid(), arena_fd_}; }

std::size_t FakeMemory::arena_offset(const void* memory) const {
  return static_cast<std::size_t>(address(memory) - arena_);
}

void* FakeMemory::map_other(const std::shared_ptr<OtherArena>& arena, std::size_t offset,
                            std::size_t bytes, int process, int device) {
  std::byte* const base = arena == nullptr ? nullptr : arena->at(offset, bytes);
  if (base == nullptr) return nullptr;
  auto block = std::make_unique<Block>();
  block->id = static_cast<int>(blocks_.size());
  block->process = process;
  block->device = device;
  block->bytes = bytes;
  block->mappings = 1;
  block->other = arena;
  block->cells[0] = Cell{{-1, Epoch{}, std::make_shared<const std::string>("another process")}, {}};
  mappings_[base] = Mapping{base, bytes, block->id, process, device, 1};
  blocks_.push_back(std::move(block));
  return base;
}

bool FakeMemory::unmap(int process, void* memory) {
  const auto found = mappings_.find(address(memory));
  if (found == mappings_.end() || found->second.process != process || found->second.opened == 0) {
    return false;
  }
  // The address stays known, so that a later access is reported and not a fault.
  --found->second.opened;
  --blocks_[static_cast<std::size_t>(found->second.block)]->mappings;
  return true;
}

void FakeMemory::enable_peer_access(int process, int device, int peer) {
  peer_access_[{process, {device, peer}}] = true;
}

bool FakeMemory::has_peer_access(int process, int device, int peer) const {
  return peer_access_.contains({process, {device, peer}});
}

std::size_t FakeMemory::used(int device) const {
  std::size_t bytes = 0;
  for (const auto& block : blocks_) {
    if (block->live && block->kind == Kind::device && block->device == device && !block->other) {
      bytes += block->bytes;
    }
  }
  return bytes;
}

std::size_t FakeMemory::pinned() const {
  std::size_t bytes = 0;
  for (const auto& block : blocks_) {
    if (block->live && block->kind != Kind::device) bytes += block->bytes;
  }
  return bytes;
}

void FakeMemory::check_red_zone(const Block& block) {
  if (block.kind == Kind::registered || block.other) return;
  for (std::size_t i = 0; i < kRedZone; ++i) {
    const auto red = std::byte{kRed};
    if (block.base[block.bytes + i] != red || *(block.base - 1 - i) != red) {
      report_("the red zone of " + name(block) + " was written");
      return;
    }
  }
}

void FakeMemory::check_red_zones() {
  for (const auto& block : blocks_) {
    if (block->live) check_red_zone(*block);
  }
}

std::shared_ptr<OtherArena> OtherArena::open(const FakeMemory::Arena& arena) {
  const std::string path =
      "/proc/" + std::to_string(arena.process) + "/fd/" + std::to_string(arena.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* const base =
      mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (base == MAP_FAILED) return nullptr;
  return std::make_shared<OtherArena>(static_cast<std::byte*>(base));
}

OtherArena::~OtherArena() { munmap(base_, kArena); }

std::byte* OtherArena::at(std::size_t offset, std::size_t bytes) const {
  return offset <= kArena && bytes <= kArena - offset ? base_ + offset : nullptr;
}

}  // namespace stitch::transport::gpu::test
