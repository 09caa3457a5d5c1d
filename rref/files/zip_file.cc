// APPNOTE.TXT of PKWARE has the format. All sizes and offsets are written in its wide form (zip64),
// so that large files are no case of their own.
#include "stitch/rref/files/zip_file.h"

#include <array>
#include <cstring>
#include <type_traits>

#include "stitch/base/printable.h"

namespace stitch::files {

namespace {

constexpr std::uint32_t kLocal = 0x04034b50;
constexpr std::uint32_t kCentral = 0x02014b50;
constexpr std::uint32_t kEnd = 0x06054b50;
constexpr std::uint32_t kWideEnd = 0x06064b50;
constexpr std::uint32_t kWideLocator = 0x07064b50;
constexpr std::uint32_t kWide = 0xffffffff;                // the value is in a field of 8 bytes
constexpr std::uint16_t kWideField = 1;                    // which has this number
constexpr std::uint16_t kPaddingField = 'F' + ('B' << 8);  // of torch.save
constexpr std::uint16_t kVersion = 45;                     // the first one with wide sizes
constexpr std::uint16_t kJanuary1980 = (1 << 5) + 1;
constexpr std::uint64_t kEndBytes = 22;
constexpr std::uint64_t kLocatorBytes = 20;
constexpr std::uint64_t kCentralBytes = 46;
constexpr std::uint64_t kLocalBytes = 30;
constexpr std::uint64_t kAlignment = 64;

// Eight tables: one for each of the bytes that a step takes.
constexpr auto kCrcTables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320U : 0U);
    tables[0][i] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t i = 0; i < 256; ++i)
      tables[k][i] = (tables[k - 1][i] >> 8) ^ tables[0][tables[k - 1][i] & 255];
  }
  return tables;
}();

std::uint32_t crc_of(const void* data, std::size_t size) {
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~0U;
  for (; size >= 8; size -= 8, at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, 8);
    word ^= crc;
    crc = 0;
    for (unsigned k = 0; k < 8; ++k) crc ^= kCrcTables[7 - k][(word >> (8 * k)) & 255];
  }
  for (; size > 0; --size, ++at) crc = (crc >> 8) ^ kCrcTables[0][(crc ^ *at) & 255];
  return ~crc;
}

template <class T>
T number(std::span<std::byte> bytes, std::uint64_t at) {
  T value{};
  std::memcpy(&value, take(bytes, at, sizeof value).data(), sizeof value);
  return value;
}

// Appends integers, each with its own width.
template <class... T>
void append(std::string& to, T... values) {
  static_assert((std::is_unsigned_v<T> && ...));
  (to.append(reinterpret_cast<const char*>(&values), sizeof values), ...);
}

// Reads the wide values of one part of the directory over those that say so.
void read_wide(std::span<std::byte> fields, std::array<std::uint64_t, 3>& values) {
  for (std::uint64_t at = 0; at + 4 <= fields.size();) {
    const auto field = take(fields, at + 4, number<std::uint16_t>(fields, at + 2));
    if (number<std::uint16_t>(fields, at) == kWideField) {
      std::uint64_t in_field = 0;
      for (auto& value : values) {
        if (value != kWide) continue;
        value = number<std::uint64_t>(field, in_field);
        in_field += 8;
      }
    }
    at += 4 + field.size();
  }
}

}  // namespace

std::span<std::byte> take(std::span<std::byte> bytes, std::uint64_t at, std::uint64_t size) {
  if (at > bytes.size() || size > bytes.size() - at)
    refuse("it is damaged or cut short: " + std::to_string(size) + " bytes are wanted from byte " +
           std::to_string(at) + " on, of " + std::to_string(bytes.size()));
  return bytes.subspan(at, size);
}

std::string_view text_of(std::span<std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::map<std::string_view, std::span<std::byte>> read_zip(const FileBytes& file) {
  const auto bytes = file.bytes;
  const std::uint64_t end = bytes.size() - kEndBytes;
  if (bytes.size() < kEndBytes || number<std::uint32_t>(bytes, end) != kEnd)
    refuse(
        "it does not end as a zip file does: it is cut short, or of another format "
        "(before PyTorch 1.6, torch.save wrote one)");
  std::uint64_t count = number<std::uint16_t>(bytes, end + 10);
  std::uint64_t at = number<std::uint32_t>(bytes, end + 16);
  if (end >= kLocatorBytes && number<std::uint32_t>(bytes, end - kLocatorBytes) == kWideLocator) {
    const auto wide = take(bytes, number<std::uint64_t>(bytes, end - kLocatorBytes + 8), 56);
    if (number<std::uint32_t>(wide, 0) != kWideEnd)
      refuse("it is damaged: its directory has no end");
    count = number<std::uint64_t>(wide, 32);
    at = number<std::uint64_t>(wide, 48);
  }
  std::map<std::string_view, std::span<std::byte>> parts;
  std::map<const std::byte*, std::size_t> taken;
  for (; count > 0; --count) {
    const auto entry = take(bytes, at, kCentralBytes);
    if (number<std::uint32_t>(entry, 0) != kCentral)
      refuse("it is damaged: its directory has a gap");
    const auto name = take(bytes, at + kCentralBytes, number<std::uint16_t>(entry, 28));
    const auto fields =
        take(bytes, at + kCentralBytes + name.size(), number<std::uint16_t>(entry, 30));
    at += kCentralBytes + name.size() + fields.size() + number<std::uint16_t>(entry, 32);
    const std::string part = "its part \"" + base::printable(std::string(text_of(name))) + '"';

    std::array<std::uint64_t, 3> values{number<std::uint32_t>(entry, 24),   // size
                                        number<std::uint32_t>(entry, 20),   // compressed
                                        number<std::uint32_t>(entry, 42)};  // where it is
    read_wide(fields, values);
    const bool encrypted = (number<std::uint16_t>(entry, 8) & 1) != 0;
    if (number<std::uint16_t>(entry, 10) != 0 || values[0] != values[1] || encrypted)
      refuse(part + " is compressed or encrypted, which torch.save does not do");
    const auto local = take(bytes, values[2], kLocalBytes);
    if (number<std::uint32_t>(local, 0) != kLocal) refuse(part + " is not where it should be");
    const std::uint64_t begin = values[2] + kLocalBytes + number<std::uint16_t>(local, 26) +
                                number<std::uint16_t>(local, 28);
    const auto content = take(bytes, begin, values[0]);
    if (!parts.emplace(text_of(name), content).second) refuse(part + " is there twice");
    if (!content.empty() && !taken.emplace(content.data(), content.size()).second)
      refuse("its parts overlap");
  }
  const std::byte* end_before = nullptr;
  for (const auto& [begin, size] : taken) {
    if (begin < end_before) refuse("its parts overlap");
    end_before = begin + size;
  }
  return parts;
}

void ZipWriter::write(const void* data, std::size_t size) {
  out_(data, size);
  at_ += size;
}

void ZipWriter::add(const std::string& name, const void* data, std::size_t size) {
  const std::uint64_t where = at_;
  const auto length = static_cast<std::uint16_t>(name.size());
  const std::uint64_t bytes = size;
  std::string both;  // as it stands in the header of the part and in the directory
  append(both, kVersion, std::uint16_t{0}, std::uint16_t{0}, std::uint16_t{0}, kJanuary1980,
         crc_of(data, size), kWide, kWide, length);

  std::string fields;
  append(fields, kWideField, std::uint16_t{16}, bytes, bytes);
  const std::uint64_t begin = where + kLocalBytes + length + fields.size() + 4;
  const auto padding = static_cast<std::uint16_t>(kAlignment - 1 - (begin - 1) % kAlignment);
  append(fields, kPaddingField, padding);
  fields.append(padding, 'Z');
  std::string local;
  append(local, kLocal);
  local += both;
  append(local, static_cast<std::uint16_t>(fields.size()));
  local += name + fields;
  write(local.data(), local.size());
  write(data, size);

  append(directory_, kCentral, kVersion);
  directory_ += both;
  append(directory_, std::uint16_t{28}, std::uint16_t{0}, std::uint16_t{0}, std::uint16_t{0},
         std::uint32_t{0}, kWide);
  directory_ += name;
  append(directory_, kWideField, std::uint16_t{24}, bytes, bytes, where);
  ++count_;
}

void ZipWriter::finish() {
  const std::uint64_t where = at_;
  const std::uint64_t size = directory_.size();
  write(directory_.data(), directory_.size());
  std::string end;
  append(end, kWideEnd, std::uint64_t{44}, kVersion, kVersion, std::uint32_t{0}, std::uint32_t{0},
         count_, count_, size, where);
  append(end, kWideLocator, std::uint32_t{0}, at_, std::uint32_t{1});
  append(end, kEnd, std::uint16_t{0}, std::uint16_t{0}, std::uint16_t{0xffff},
         std::uint16_t{0xffff}, kWide, kWide, std::uint16_t{0});
  write(end.data(), end.size());
}

}  // namespace stitch::files
