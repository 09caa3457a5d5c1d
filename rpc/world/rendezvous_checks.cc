// What the founders of a world check of one another.
#include <map>
#include <set>
#include <string>

#include "stitch/base/error.h"
#include "stitch/base/printable.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/rpc/world/rendezvous.h"

namespace stitch::rpc {

void Rendezvous::check_member(const MemberRecord& record) const {
  const bool elastic = options_.world_size.is_elastic();
  const bool ranked = record.rank != kNoRank;
  const bool rank_fits = ranked ? record.rank >= 0 && record.rank < record.world_size : elastic;
  const bool name_fits = is_worker_name(record.name) || (elastic && !ranked && record.name.empty());
  if (!rank_fits || !name_fits) {
    throw Error(ErrorCode::protocol,
                "an entry in " + store_.describe() + " makes no sense: " + "worker \"" +
                    base::printable(record.name.substr(0, kMaxShown)) + "\", rank " +
                    std::to_string(record.rank) + " of " + std::to_string(record.world_size));
  }
  if (record.world_size != options_.world_size.max() || record.founders != founders_) {
    const std::string theirs =
        record.founders == record.world_size
            ? std::to_string(record.world_size)
            : std::to_string(record.founders) + ':' + std::to_string(record.world_size);
    throw Error(ErrorCode::invalid_argument,
                "worker \"" + record.name + "\" (rank " + std::to_string(record.rank) +
                    ") expects a world of " + theirs + ", worker \"" + options_.name +
                    "\" one of " + options_.world_size.str());
  }
}

// A rank is the id; a worker without one gets the lowest that is free, in the order of the slots.
void Rendezvous::assign_ids() {
  std::set<std::int64_t> taken;
  for (const auto& record : records_) {
    if (record.rank != kNoRank) taken.insert(record.rank);
  }
  ids_.clear();
  std::int64_t next = 0;
  for (auto& record : records_) {
    if (record.rank == kNoRank) {
      while (!taken.insert(next).second) ++next;
      record.rank = next;
    }
    ids_.emplace_back(static_cast<std::uint32_t>(record.rank));
    if (record.name.empty()) record.name = "worker" + std::to_string(record.rank);
  }
}

// Whether the two cannot be in one world: one may be a former life of the other.
bool Rendezvous::in_one_place(const MemberRecord& a, const MemberRecord& b) {
  return (a.rank != kNoRank && a.rank == b.rank) || (!a.name.empty() && a.name == b.name);
}

void Rendezvous::check(const std::vector<MemberRecord>& records) const {
  std::map<std::int64_t, const MemberRecord*> by_rank;
  std::map<std::string, const MemberRecord*> by_name;
  for (const auto& record : records) {
    const auto [same_rank, new_rank] = by_rank.emplace(record.rank, &record);
    if (!new_rank) {
      throw Error(ErrorCode::invalid_argument,
                  "rank " + std::to_string(record.rank) + " is taken twice: by worker \"" +
                      same_rank->second->name + "\" and worker \"" + record.name + "\"");
    }
    const auto [same_name, new_name] = by_name.emplace(record.name, &record);
    if (!new_name) {
      throw Error(ErrorCode::invalid_argument, "worker name \"" + record.name +
                                                   "\" is taken twice: by rank " +
                                                   std::to_string(same_name->second->rank) +
                                                   " and rank " + std::to_string(record.rank));
    }
  }
  std::map<std::string, const WorkerDevices*> devices;
  for (const auto& record : records) devices.emplace(record.name, &record.devices);
  check_device_maps(devices, options_.world_size.is_elastic());
}

}  // namespace stitch::rpc
