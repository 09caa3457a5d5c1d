#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

// What a worker makes known about one life of itself: in the store of its world, and to the members
// of a running world that it joins. A plain value.
struct MemberCard {
  // All cards of a world are in one value of its store.
  static constexpr std::size_t kMaxRecordBytes = std::size_t{64} << 10;

  WorkerInfo info;
  std::vector<std::string> addresses;  // all that it listens on, best first
  // Its MemberRecord, encoded (rpc/world/member_record.h); at most kMaxRecordBytes.
  std::string record;

  void write(base::ByteWriter& out) const;
  // Throws Error(protocol) for what is no card, or names no worker.
  [[nodiscard]] static MemberCard read(base::ByteReader& in);
  friend bool operator==(const MemberCard&, const MemberCard&) = default;
};

// Who a worker is, as peers and stores say it. All of it is read here, so that a worker never keeps
// what those refuse that it tells: a name, an id below 65,536, an epoch that another can follow.
void write_info(base::ByteWriter& out, const WorkerInfo& info);
// Throws Error(protocol) for anything else.
[[nodiscard]] WorkerInfo read_info(base::ByteReader& in);

}  // namespace stitch::rpc
