// The bytes of a MemberRecord.
#include <map>
#include <span>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/error.h"
#include "stitch/base/published_table.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/rpc/world/member_record.h"

namespace stitch::rpc {

namespace {

WorkerDevices read_devices(base::ByteReader& in) {
  constexpr std::size_t kStringBytes = 8;  // at least
  WorkerDevices devices;
  const auto count = in.read<std::uint32_t>();
  if (count > static_cast<std::uint32_t>(kMaxDevices)) {
    throw Error(ErrorCode::protocol, "member entry has " + std::to_string(count) +
                                         " CUDA devices; at most " + std::to_string(kMaxDevices));
  }
  devices.count = static_cast<int>(count);
  devices.transfers = in.read<std::uint8_t>() != 0;
  const auto maps = in.read_count(kStringBytes);
  for (std::uint32_t i = 0; i < maps; ++i) {
    std::string peer = in.read_string();
    if (!is_worker_name(peer))
      throw Error(ErrorCode::protocol,
                  "member entry has a device map for what is no worker's name");
    std::map<std::string, std::string> text;
    const auto entries = in.read_count(2 * kStringBytes);
    for (std::uint32_t k = 0; k < entries; ++k) {
      std::string source = in.read_string();
      text[std::move(source)] = in.read_string();
    }
    try {
      devices.maps.insert_or_assign(std::move(peer), DeviceMap(text));
    } catch (const Error& error) {
      throw Error(ErrorCode::protocol, std::string("member entry: ") + error.what());
    }
  }
  return devices;
}

PeerLimits read_limits(base::ByteReader& in) {
  // As Options has them: a peer that took nothing at all would end what must arrive.
  constexpr std::size_t kLeastFrame = 4096;
  PeerLimits limits;
  limits.bytes = in.read<std::uint64_t>();
  limits.calls = in.read<std::uint64_t>();
  limits.frame_bytes = in.read<std::uint64_t>();
  if (limits.bytes < 1 || limits.calls < 1 || limits.calls > PeerLimits::kMaxCalls ||
      limits.frame_bytes < kLeastFrame)
    throw Error(ErrorCode::protocol, "member entry has limits that no worker can set");
  return limits;
}

constexpr std::int64_t kMaxWorkers = base::PublishedTable<MemberRecord>::kMaxSize;

WorldSize read_size(base::ByteReader& in) {
  try {
    return WorldSize(in.read_string());
  } catch (const Error& error) {
    throw Error(ErrorCode::protocol, std::string("member entry: ") + error.what());
  }
}

}  // namespace

std::string MemberRecord::token_of(const std::string& text) {
  std::string token;
  static_cast<void>(base::failure_of([&] {
    base::ByteReader in(std::as_bytes(std::span(text)), "member entry");
    token = in.read_string();
  }));
  return token;
}

std::string MemberRecord::encode() const {
  base::Bytes bytes;
  base::ByteWriter out(bytes);
  out.write_string(token);
  out.write_string(name);
  out.write(rank);
  out.write_string(size.str());
  out.write_string(process);
  out.write_string(host);
  out.write_string(memory);
  out.write(static_cast<std::uint8_t>(prefers_memory));
  out.write(static_cast<std::uint8_t>(uses_loopback));
  out.write(static_cast<std::uint32_t>(devices.count));
  out.write(static_cast<std::uint8_t>(devices.transfers));
  out.write(static_cast<std::uint32_t>(devices.maps.size()));
  for (const auto& [peer, map] : devices.maps) {
    out.write_string(peer);
    out.write(static_cast<std::uint32_t>(map.entries().size()));
    for (const auto& entry : map.entries()) {
      out.write_string(entry.from.str());
      out.write_string(entry.destination_text());
    }
  }
  out.write(std::uint64_t{limits.bytes});
  out.write(std::uint64_t{limits.calls});
  out.write(std::uint64_t{limits.frame_bytes});
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

MemberRecord MemberRecord::decode(const std::string& text) {
  base::ByteReader in(std::as_bytes(std::span(text)), "member entry");
  MemberRecord record;
  record.token = in.read_string();
  record.name = in.read_string();
  if (!record.name.empty() && !is_worker_name(record.name))
    throw Error(ErrorCode::protocol, "member entry has what is no worker's name");
  record.rank = in.read<std::int64_t>();
  if (record.rank != kNoRank && (record.rank < 0 || record.rank >= kMaxWorkers))
    throw Error(ErrorCode::protocol, "member entry has the rank " + std::to_string(record.rank));
  record.size = read_size(in);
  record.process = in.read_string();
  record.host = in.read_string();
  record.memory = in.read_string();
  record.prefers_memory = in.read<std::uint8_t>() != 0;
  record.uses_loopback = in.read<std::uint8_t>() != 0;
  record.devices = read_devices(in);
  record.limits = read_limits(in);
  in.expect_end();
  return record;
}

}  // namespace stitch::rpc
