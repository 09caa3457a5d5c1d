#include "stitch/rpc/world/world_record.h"

#include <algorithm>
#include <set>
#include <span>

#include "stitch/base/error.h"

namespace stitch::rpc {

namespace {
constexpr std::uint8_t kVersion = 1;
constexpr std::uint64_t kMaxEpoch = std::uint64_t{1} << 62;  // the store counts up to 2^63 - 1
}  // namespace

const WorldRecord::Entry* WorldRecord::find(const std::string& name) const {
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const Entry& entry) { return entry.card.info.name == name; });
  return found == entries.end() ? nullptr : &*found;
}

const WorldRecord::Entry* WorldRecord::find(WorkerId id) const {
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const Entry& entry) { return entry.card.info.id == id; });
  return found == entries.end() ? nullptr : &*found;
}

std::vector<std::string> WorldRecord::live_names() const {
  std::vector<std::string> names;
  for (const auto& entry : entries) {
    if (entry.live) names.push_back(entry.card.info.name);
  }
  return names;
}

std::string WorldRecord::encode() const {
  base::Bytes bytes;
  base::ByteWriter out(bytes);
  out.write(kVersion);
  out.write(number);
  out.write_string(size.str());
  out.write(static_cast<std::uint32_t>(entries.size()));
  for (const auto& entry : entries) {
    out.write(static_cast<std::uint8_t>(entry.live));
    entry.card.write(out);
  }
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

WorldRecord WorldRecord::decode(const std::string& text) {
  constexpr std::size_t kEntryBytes = 25;  // at least
  base::ByteReader in(std::as_bytes(std::span(text)), "record of a world");
  if (const auto version = in.read<std::uint8_t>(); version != kVersion) {
    throw Error(ErrorCode::protocol, "record of a world has version " + std::to_string(version) +
                                         "; known is " + std::to_string(kVersion));
  }
  WorldRecord record;
  record.number = in.read<std::uint64_t>();
  try {
    record.size = WorldSize(in.read_string());
  } catch (const Error& error) {
    throw Error(ErrorCode::protocol, std::string("record of a world: ") + error.what());
  }
  const auto count = in.read_count(kEntryBytes);
  std::set<std::string> names;
  std::set<WorkerId> ids;
  for (std::uint32_t i = 0; i < count; ++i) {
    Entry entry;
    entry.live = in.read<std::uint8_t>() != 0;
    entry.card = MemberCard::read(in);
    if (entry.card.info.epoch > kMaxEpoch)
      throw Error(ErrorCode::protocol, "record of a world has " + to_string(entry.card.info) +
                                           " in an epoch that none can follow");
    const bool new_name = names.insert(entry.card.info.name).second;
    if (!ids.insert(entry.card.info.id).second || !new_name)
      throw Error(ErrorCode::protocol,
                  "record of a world has " + to_string(entry.card.info) + " twice");
    record.entries.push_back(std::move(entry));
  }
  in.expect_end();
  return record;
}

}  // namespace stitch::rpc
