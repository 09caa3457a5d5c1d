#include "stitch/transport/wire/frame.h"

#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/error.h"
#include "stitch/transport/wire/record.h"

namespace stitch::transport {

namespace {

// The layout of WIRE.md. Every field is little-endian and at a multiple of its size.
constexpr std::array<char, 4> kMagic{'S', 'T', 'C', 'H'};
constexpr std::uint16_t kVersion = 2;
constexpr std::size_t kAtVersion = 4;
constexpr std::size_t kAtKind = 6;
constexpr std::size_t kAtTotalBytes = 8;
constexpr std::size_t kAtBodyOffset = 12;
constexpr std::size_t kAtBodyBytes = 16;
constexpr std::size_t kAtSectionTable = 20;
constexpr std::size_t kAtBufferTable = 24;
constexpr std::size_t kAtSectionCount = 28;
constexpr std::size_t kAtBufferCount = 32;
constexpr std::size_t kAtReserved = 36;
constexpr std::size_t kAtNumber = 40;
constexpr std::size_t kAtReceived = 48;
constexpr std::size_t kSectionEntryBytes = 16;  // kind u16, 0 u16, offset u32, bytes u32, 0 u32
constexpr std::size_t kBufferEntryBytes =
    16;  // device type u8, device index u8, 0 u16, offset u32, bytes u64
constexpr std::size_t kTableAlignment = 8;
constexpr std::size_t kMaxFrameBytes = std::numeric_limits<std::uint32_t>::max();

template <class T>
void put(std::byte* at, T value) noexcept {
  value = base::to_wire_order(value);
  std::memcpy(at, &value, sizeof(T));
}

template <class T>
[[nodiscard]] T get(const std::byte* at) noexcept {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return base::to_wire_order(value);
}

[[noreturn]] void malformed(const std::string& field, const std::string& problem) {
  throw Error(ErrorCode::protocol, "frame is malformed: " + field + " " + problem);
}

[[nodiscard]] std::string name_entry(const char* what, std::size_t index) {
  return std::string(what) + " " + std::to_string(index);
}

// True when [offset, offset + bytes) is not within `total`. Cannot overflow.
[[nodiscard]] bool outside(std::uint64_t offset, std::uint64_t bytes,
                           std::uint64_t total) noexcept {
  return offset > total || bytes > total - offset;
}

[[noreturn]] void out_of_frame(const std::string& field, std::uint64_t offset, std::uint64_t bytes,
                               std::uint64_t total) {
  malformed(field, "of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                       " does not lie in the frame of " + std::to_string(total) + " bytes");
}

// Before one more is added.
void check_count(const char* what, std::size_t count, std::size_t most) {
  if (count < most) return;
  throw Error(ErrorCode::out_of_range,
              std::string("frame cannot have more than ") + std::to_string(most) + " " + what);
}

[[nodiscard]] std::string name_device(Device device) {
  return device.type == DeviceType::cpu
             ? "cpu"
             : "device " + std::to_string(static_cast<int>(device.type)) + ":" +
                   std::to_string(device.index);
}

// Throws unless a table of `count` entries lies in the frame.
void check_table(const char* name, std::uint64_t table, std::uint32_t count, std::size_t most,
                 std::size_t entry_bytes, std::uint64_t total) {
  if (count <= most && table >= FrameBuilder::kHeaderBytes &&
      !outside(table, std::uint64_t{count} * entry_bytes, total))
    return;
  malformed(name, "of " + std::to_string(count) + " entries at offset " + std::to_string(table) +
                      " has too many or does not lie in the frame of " + std::to_string(total) +
                      " bytes");
}

// Throws for buffer `i`, which lies in the frame, unless it may lie there, behind `last_end`.
void check_inside(std::uint32_t i, Device device, std::uint32_t offset, std::uint64_t bytes,
                  std::uint64_t total, std::uint64_t last_end) {
  if (device != Device{}) {
    malformed(name_entry("buffer", i),
              "lies in the frame but is said to be on " + name_device(device));
  }
  if (offset < FrameBuilder::kHeaderBytes || outside(offset, bytes, total))
    out_of_frame(name_entry("buffer", i), offset, bytes, total);
  if (offset % base::Bytes::kAlignment != 0) {
    malformed(name_entry("buffer", i), "at offset " + std::to_string(offset) +
                                           " is not aligned to " +
                                           std::to_string(base::Bytes::kAlignment));
  }
  // Readers copy such buffers: overlapping ones could take many times the memory of the frame.
  if (offset < last_end) {
    malformed(name_entry("buffer", i), "at offset " + std::to_string(offset) +
                                           " overlaps the one before it, which ends at " +
                                           std::to_string(last_end));
  }
}

// Throws for buffer `i`, which has come beside the frame, unless it is as announced.
void check_beside(std::uint32_t i, Device device, std::uint64_t bytes, const Buffer& arrived) {
  if (arrived.bytes != bytes) {
    malformed(name_entry("buffer", i), "was announced with " + std::to_string(bytes) + " bytes, " +
                                           std::to_string(arrived.bytes) + " came");
  }
  if (arrived.device != device) {
    malformed(name_entry("buffer", i), "was announced on " + name_device(device) + " and came on " +
                                           name_device(arrived.device));
  }
}

}  // namespace

FrameBuilder::FrameBuilder(std::uint16_t kind) : kind_(kind) { frame_.resize(kHeaderBytes); }

void FrameBuilder::end_body() { body_bytes_ = frame_.size() - kHeaderBytes; }

std::size_t FrameBuilder::add_section(std::uint16_t kind, std::span<const std::byte> bytes) {
  const std::size_t offset = frame_.size();
  check_count("sections", sections_.size(), FrameView::kMaxSections);
  if (outside(offset, bytes.size(), kMaxFrameBytes)) {
    throw Error(ErrorCode::out_of_range, "section of " + std::to_string(bytes.size()) +
                                             " bytes does not fit into a frame of at most " +
                                             std::to_string(kMaxFrameBytes) + " bytes");
  }
  frame_.append(bytes.data(), bytes.size());
  sections_.push_back(SectionEntry{kind, static_cast<std::uint32_t>(offset),
                                   static_cast<std::uint32_t>(bytes.size())});
  return offset;
}

std::uint32_t FrameBuilder::add_buffer(Buffer buffer) {
  const auto index = static_cast<std::uint32_t>(entries_.size());
  check_count("buffers", entries_.size(), kMaxBuffers);
  std::uint32_t offset = 0;
  if (buffer.device.type == DeviceType::cpu && buffer.bytes <= inline_bytes_) {
    frame_.pad_to(base::Bytes::kAlignment);
    if (outside(frame_.size(), buffer.bytes, kMaxFrameBytes)) {
      throw Error(ErrorCode::out_of_range, "buffer of " + std::to_string(buffer.bytes) +
                                               " bytes does not fit into a frame that has " +
                                               std::to_string(frame_.size()) + " of at most " +
                                               std::to_string(kMaxFrameBytes) + " bytes");
    }
    offset = static_cast<std::uint32_t>(frame_.size());
    frame_.append(buffer.data, buffer.bytes);
    entries_.push_back(BufferEntry{buffer.device, buffer.bytes, offset});
  } else {
    entries_.push_back(BufferEntry{buffer.device, buffer.bytes, offset});
    beside_.push_back(std::move(buffer));
  }
  return index;
}

Message FrameBuilder::finish() && {
  std::size_t section_table = 0;
  std::size_t buffer_table = 0;
  if (!sections_.empty() || !entries_.empty()) frame_.pad_to(kTableAlignment);
  if (!sections_.empty()) {
    section_table = frame_.size();
    frame_.resize(section_table + sections_.size() * kSectionEntryBytes);
    std::byte* at = frame_.data() + section_table;
    for (const SectionEntry& entry : sections_) {
      put<std::uint16_t>(at, entry.kind);
      put<std::uint16_t>(at + 2, 0);
      put<std::uint32_t>(at + 4, entry.offset);
      put<std::uint32_t>(at + 8, entry.bytes);
      put<std::uint32_t>(at + 12, 0);
      at += kSectionEntryBytes;
    }
  }
  if (!entries_.empty()) {
    buffer_table = frame_.size();
    frame_.resize(buffer_table + entries_.size() * kBufferEntryBytes);
    std::byte* at = frame_.data() + buffer_table;
    for (const BufferEntry& entry : entries_) {
      put<std::uint8_t>(at, static_cast<std::uint8_t>(entry.device.type));
      put<std::uint8_t>(at + 1, entry.device.index);
      put<std::uint16_t>(at + 2, 0);
      put<std::uint32_t>(at + 4, entry.offset);
      put<std::uint64_t>(at + 8, entry.bytes);
      at += kBufferEntryBytes;
    }
  }
  if (frame_.size() > kMaxFrameBytes) {
    throw Error(ErrorCode::out_of_range, "frame of " + std::to_string(frame_.size()) +
                                             " bytes exceeds the limit of " +
                                             std::to_string(kMaxFrameBytes) + " bytes");
  }
  std::byte* header = frame_.data();
  std::memcpy(header, kMagic.data(), kMagic.size());
  put<std::uint16_t>(header + kAtVersion, kVersion);
  put<std::uint16_t>(header + kAtKind, kind_);
  put<std::uint32_t>(header + kAtTotalBytes, static_cast<std::uint32_t>(frame_.size()));
  put<std::uint32_t>(header + kAtBodyOffset, static_cast<std::uint32_t>(kHeaderBytes));
  put<std::uint32_t>(header + kAtBodyBytes, static_cast<std::uint32_t>(body_bytes_));
  put<std::uint32_t>(header + kAtSectionTable, static_cast<std::uint32_t>(section_table));
  put<std::uint32_t>(header + kAtBufferTable, static_cast<std::uint32_t>(buffer_table));
  put<std::uint32_t>(header + kAtSectionCount, static_cast<std::uint32_t>(sections_.size()));
  put<std::uint32_t>(header + kAtBufferCount, static_cast<std::uint32_t>(entries_.size()));
  put<std::uint32_t>(header + kAtReserved, 0);
  put<std::uint64_t>(header + kAtNumber, 0);
  put<std::uint64_t>(header + kAtReceived, 0);
  put<std::uint64_t>(header + kAtReceived + 8, 0);
  return Message{std::move(frame_), std::move(beside_)};
}

std::optional<FrameHead> peek_frame(const base::Bytes& frame) noexcept {
  const std::byte* at = frame.data();
  if (frame.size() < FrameBuilder::kHeaderBytes ||
      std::memcmp(at, kMagic.data(), kMagic.size()) != 0)
    return std::nullopt;
  if (get<std::uint16_t>(at + kAtVersion) != kVersion) return std::nullopt;
  const auto offset = std::uint64_t{get<std::uint32_t>(at + kAtBodyOffset)};
  const auto bytes = std::uint64_t{get<std::uint32_t>(at + kAtBodyBytes)};
  if (outside(offset, bytes, frame.size())) return std::nullopt;
  return FrameHead{get<std::uint16_t>(at + kAtKind),
                   {at + offset, static_cast<std::size_t>(bytes)}};
}

void put_numbers(base::Bytes& frame, const FrameNumbers& numbers) noexcept {
  put<std::uint64_t>(frame.data() + kAtNumber, numbers.number);
  put<std::uint64_t>(frame.data() + kAtReceived, numbers.received[0]);
  put<std::uint64_t>(frame.data() + kAtReceived + 8, numbers.received[1]);
}

std::optional<FrameNumbers> numbers_of(const base::Bytes& frame) noexcept {
  if (frame.size() < FrameBuilder::kHeaderBytes) return std::nullopt;
  const std::byte* at = frame.data();
  return FrameNumbers{
      get<std::uint64_t>(at + kAtNumber),
      {get<std::uint64_t>(at + kAtReceived), get<std::uint64_t>(at + kAtReceived + 8)}};
}

FrameView::FrameView(const Message& message) {
  const std::byte* frame = message.frame.data();
  const std::uint64_t total = message.frame.size();
  if (total < FrameBuilder::kHeaderBytes) {
    malformed("size", std::to_string(total) + " is below the header's " +
                          std::to_string(FrameBuilder::kHeaderBytes) + " bytes");
  }
  if (std::memcmp(frame, kMagic.data(), kMagic.size()) != 0) malformed("magic", "is not \"STCH\"");
  if (const auto version = get<std::uint16_t>(frame + kAtVersion); version != kVersion) {
    malformed("version",
              std::to_string(version) + " is not the " + std::to_string(kVersion) + " spoken here");
  }
  kind_ = get<std::uint16_t>(frame + kAtKind);
  if (const auto announced = std::uint64_t{get<std::uint32_t>(frame + kAtTotalBytes)};
      announced != total) {
    malformed("total size", std::to_string(announced) + " differs from the " +
                                std::to_string(total) + " bytes that arrived");
  }
  const auto body_offset = std::uint64_t{get<std::uint32_t>(frame + kAtBodyOffset)};
  const auto body_bytes = std::uint64_t{get<std::uint32_t>(frame + kAtBodyBytes)};
  if (body_offset < FrameBuilder::kHeaderBytes || outside(body_offset, body_bytes, total)) {
    out_of_frame("body", body_offset, body_bytes, total);
  }
  body_ = message.frame.span().subspan(body_offset, body_bytes);

  read_sections(message);
  read_buffers(message);
}

void FrameView::read_sections(const Message& message) {
  const std::byte* frame = message.frame.data();
  const std::uint64_t total = message.frame.size();
  const auto table = std::uint64_t{get<std::uint32_t>(frame + kAtSectionTable)};
  const auto count = get<std::uint32_t>(frame + kAtSectionCount);
  if (count == 0) return;
  check_table("section table", table, count, kMaxSections, kSectionEntryBytes, total);
  sections_.reserve(count);
  const std::byte* at = frame + table;
  for (std::uint32_t i = 0; i < count; ++i, at += kSectionEntryBytes) {
    const auto offset = get<std::uint32_t>(at + 4);
    const auto bytes = get<std::uint32_t>(at + 8);
    if (offset < FrameBuilder::kHeaderBytes || outside(offset, bytes, total))
      out_of_frame(name_entry("section", i), offset, bytes, total);
    sections_.push_back(
        Section{get<std::uint16_t>(at), message.frame.span().subspan(offset, bytes)});
  }
}

void FrameView::read_buffers(const Message& message) {
  const std::byte* frame = message.frame.data();
  const std::uint64_t total = message.frame.size();
  const auto table = std::uint64_t{get<std::uint32_t>(frame + kAtBufferTable)};
  const auto count = get<std::uint32_t>(frame + kAtBufferCount);
  if (count > 0) {
    check_table("buffer table", table, count, kMaxBuffers, kBufferEntryBytes, total);
    buffers_.reserve(count);
  }
  const std::byte* at = count > 0 ? frame + table : frame;
  std::size_t beside = 0;
  std::uint64_t last_end = 0;  // of the buffers in the frame so far
  for (std::uint32_t i = 0; i < count; ++i, at += kBufferEntryBytes) {
    const auto type = get<std::uint8_t>(at);
    if (type > static_cast<std::uint8_t>(DeviceType::cuda)) {
      malformed(name_entry("buffer", i),
                "names device type " + std::to_string(type) + ", known are 0 (cpu) and 1 (cuda)");
    }
    const Device device{static_cast<DeviceType>(type), get<std::uint8_t>(at + 1)};
    const auto offset = get<std::uint32_t>(at + 4);
    const auto bytes = get<std::uint64_t>(at + 8);
    if (offset == 0) {
      if (beside >= message.buffers.size()) {
        malformed(name_entry("buffer", i), "should have come beside the frame, but only " +
                                               std::to_string(message.buffers.size()) + " did");
      }
      const Buffer& arrived = message.buffers[beside++];
      check_beside(i, device, bytes, arrived);
      buffers_.push_back(BufferView{arrived, false});
      continue;
    }
    check_inside(i, device, offset, bytes, total, last_end);
    last_end = offset + bytes;
    // The view returns plain Buffers; readers copy those inside the frame before they write.
    void* data = const_cast<std::byte*>(frame + offset);
    buffers_.push_back(
        BufferView{Buffer{device, data, static_cast<std::size_t>(bytes), nullptr}, true});
  }
  if (beside != message.buffers.size()) {
    malformed("buffer count", std::to_string(beside) + " beside the frame differs from the " +
                                  std::to_string(message.buffers.size()) + " that came");
  }
}

const FrameView::Section* FrameView::section(std::uint16_t kind) const noexcept {
  for (const Section& section : sections_) {
    if (section.kind == kind) return &section;
  }
  return nullptr;
}

}  // namespace stitch::transport
