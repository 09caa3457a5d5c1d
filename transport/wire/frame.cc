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

namespace {

using FrameBytes = std::span<const std::byte>;

// The entries of a table; none for an empty table.
[[nodiscard]] const std::byte* entries_of(FrameBytes frame, const char* table,
                                          std::size_t at_offset, std::uint32_t count,
                                          std::size_t max_count, std::size_t entry_bytes) {
  if (count == 0) return nullptr;
  const auto offset = std::uint64_t{get<std::uint32_t>(frame.data() + at_offset)};
  if (count > max_count || offset < FrameBuilder::kHeaderBytes ||
      outside(offset, std::uint64_t{count} * entry_bytes, frame.size())) {
    malformed(table, "of " + std::to_string(count) + " entries at offset " +
                         std::to_string(offset) + " has too many or does not lie in the frame of " +
                         std::to_string(frame.size()) + " bytes");
  }
  return frame.data() + offset;
}

[[nodiscard]] std::vector<FrameView::Section> read_sections(FrameBytes frame) {
  const auto count = get<std::uint32_t>(frame.data() + kAtSectionCount);
  const std::byte* at = entries_of(frame, "section table", kAtSectionTable, count,
                                   FrameView::kMaxSections, kSectionEntryBytes);
  std::vector<FrameView::Section> sections;
  sections.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i, at += kSectionEntryBytes) {
    const auto offset = get<std::uint32_t>(at + 4);
    const auto bytes = get<std::uint32_t>(at + 8);
    if (offset < FrameBuilder::kHeaderBytes || outside(offset, bytes, frame.size()))
      out_of_frame(name_entry("section", i), offset, bytes, frame.size());
    sections.push_back({get<std::uint16_t>(at), frame.subspan(offset, bytes)});
  }
  return sections;
}

[[noreturn]] void bad_buffer(std::uint32_t index, const std::string& problem) {
  malformed(name_entry("buffer", index), problem);
}

// `last_end`: of the buffer before it in the frame, then of this buffer. Readers copy buffers in
// the frame: overlapping buffers could take many times the memory of the frame.
[[nodiscard]] FrameView::BufferView read_in_frame(FrameBytes frame, std::uint32_t index,
                                                  Device device, std::uint32_t offset,
                                                  std::uint64_t bytes, std::uint64_t& last_end) {
  if (device != Device{})
    bad_buffer(index, "lies in the frame but is said to be on " + name_device(device));
  if (offset < FrameBuilder::kHeaderBytes || outside(offset, bytes, frame.size()))
    out_of_frame(name_entry("buffer", index), offset, bytes, frame.size());
  if (offset % base::Bytes::kAlignment != 0) {
    bad_buffer(index, "at offset " + std::to_string(offset) + " is not aligned to " +
                          std::to_string(base::Bytes::kAlignment));
  }
  if (offset < last_end) {
    bad_buffer(index, "at offset " + std::to_string(offset) +
                          " overlaps the one before it, which ends at " + std::to_string(last_end));
  }
  last_end = offset + bytes;
  // The view returns plain Buffers; readers copy those inside the frame before they write.
  void* data = const_cast<std::byte*>(frame.data() + offset);
  return {Buffer{device, data, static_cast<std::size_t>(bytes), nullptr}, true};
}

[[nodiscard]] std::vector<FrameView::BufferView> read_buffers(const Message& message) {
  const FrameBytes frame = message.frame.span();
  const auto count = get<std::uint32_t>(frame.data() + kAtBufferCount);
  const std::byte* at =
      entries_of(frame, "buffer table", kAtBufferTable, count, kMaxBuffers, kBufferEntryBytes);
  std::vector<FrameView::BufferView> buffers;
  buffers.reserve(count);
  const std::size_t came = message.buffers.size();
  std::size_t beside = 0;
  std::uint64_t last_end = 0;
  for (std::uint32_t i = 0; i < count; ++i, at += kBufferEntryBytes) {
    const auto type = get<std::uint8_t>(at);
    if (type > static_cast<std::uint8_t>(DeviceType::cuda)) {
      bad_buffer(i,
                 "names device type " + std::to_string(type) + ", known are 0 (cpu) and 1 (cuda)");
    }
    const Device device{static_cast<DeviceType>(type), get<std::uint8_t>(at + 1)};
    const auto offset = get<std::uint32_t>(at + 4);
    const auto bytes = get<std::uint64_t>(at + 8);
    if (offset != 0) {
      buffers.push_back(read_in_frame(frame, i, device, offset, bytes, last_end));
      continue;
    }
    if (beside >= came) {
      bad_buffer(i, "should have come beside the frame, but only " + std::to_string(came) + " did");
    }
    const Buffer& arrived = message.buffers[beside++];
    if (arrived.bytes != bytes) {
      bad_buffer(i, "was announced with " + std::to_string(bytes) + " bytes, " +
                        std::to_string(arrived.bytes) + " came");
    }
    if (arrived.device != device) {
      bad_buffer(i, "was announced on " + name_device(device) + " and came on " +
                        name_device(arrived.device));
    }
    buffers.push_back({arrived, false});
  }
  if (beside == came) return buffers;
  malformed("buffer count", std::to_string(beside) + " beside the frame differs from the " +
                                std::to_string(came) + " that came");
}

}  // namespace

FrameView::FrameView(const Message& message) {
  const FrameBytes frame = message.frame.span();
  const std::uint64_t total = frame.size();
  if (total < FrameBuilder::kHeaderBytes) {
    malformed("size", std::to_string(total) + " is below the header's " +
                          std::to_string(FrameBuilder::kHeaderBytes) + " bytes");
  }
  const std::byte* const at = frame.data();
  if (std::memcmp(at, kMagic.data(), kMagic.size()) != 0) malformed("magic", "is not \"STCH\"");
  if (const auto version = get<std::uint16_t>(at + kAtVersion); version != kVersion) {
    malformed("version",
              std::to_string(version) + " is not the " + std::to_string(kVersion) + " spoken here");
  }
  kind_ = get<std::uint16_t>(at + kAtKind);
  if (const auto announced = std::uint64_t{get<std::uint32_t>(at + kAtTotalBytes)};
      announced != total) {
    malformed("total size", std::to_string(announced) + " differs from the " +
                                std::to_string(total) + " bytes that arrived");
  }
  const auto offset = std::uint64_t{get<std::uint32_t>(at + kAtBodyOffset)};
  const auto bytes = std::uint64_t{get<std::uint32_t>(at + kAtBodyBytes)};
  if (offset < FrameBuilder::kHeaderBytes || outside(offset, bytes, total))
    out_of_frame("body", offset, bytes, total);
  body_ = frame.subspan(offset, bytes);
  sections_ = read_sections(frame);
  buffers_ = read_buffers(message);
}

const FrameView::Section* FrameView::section(std::uint16_t kind) const noexcept {
  for (const Section& section : sections_) {
    if (section.kind == kind) return &section;
  }
  return nullptr;
}

}  // namespace stitch::transport
