#include "stitch/rpc/world/admission.h"

#include <map>
#include <set>
#include <string>

#include "stitch/base/name_list.h"
#include "stitch/base/published_table.h"
#include "stitch/rpc/world/member_record.h"

namespace stitch::rpc {

namespace {

// Throws why not.
void check_joiner(const MemberCard& joiner, const std::vector<MemberCard>& live,
                  const WorldSize& size) {
  const auto taken = [](const std::string& text) { throw Error(ErrorCode::already_exists, text); };
  std::vector<std::string> names;
  for (const auto& card : live) {
    if (card.info.id == joiner.info.id && card.info.name == joiner.info.name) continue;
    names.push_back(card.info.name);
    if (card.info.id == joiner.info.id) {
      taken("rank " + std::to_string(joiner.info.id.value()) + " is taken twice: by worker \"" +
            card.info.name + "\" and worker \"" + joiner.info.name + "\"");
    }
    if (card.info.name == joiner.info.name) {
      taken("worker name \"" + joiner.info.name + "\" is taken twice: by rank " +
            std::to_string(card.info.id.value()) + " and rank " +
            std::to_string(joiner.info.id.value()));
    }
  }
  if (static_cast<std::int64_t>(names.size()) >= size.max()) {
    throw Error(ErrorCode::invalid_argument, "worker \"" + joiner.info.name +
                                                 "\" is one too many: the world of " + size.str() +
                                                 " has " + std::to_string(names.size()) +
                                                 " workers: " + base::join_names(names));
  }
  const MemberRecord record = MemberRecord::decode(joiner.record);
  std::vector<MemberRecord> records;
  for (const auto& card : live) {
    if (card.info.id == joiner.info.id) continue;
    // One that cannot be read is no reason to refuse another.
    static_cast<void>(
        base::failure_of([&] { records.push_back(MemberRecord::decode(card.record)); }));
  }
  std::map<std::string, const WorkerDevices*> devices;
  for (const auto& other : records) devices.emplace(other.name, &other.devices);
  devices.emplace(record.name, &record.devices);
  // With a worker missing, or still to come, maps that name it cannot be checked.
  const bool complete = !size.is_elastic() && static_cast<int>(devices.size()) == size.min();
  check_device_maps(devices, !complete);
}

}  // namespace

WorkerInfo place_for(const MemberRecord& joiner, const std::vector<KnownLife>& lives,
                     const WorldSize& size, const std::string& where) {
  const std::string self =
      joiner.name.empty() ? "a worker without a name" : "worker \"" + joiner.name + "\"";
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::invalid_argument, text);
  };
  if (size.is_elastic() ? !joiner.size.is_elastic() : joiner.size != size)
    refuse(self + " expects a world of " + joiner.size.str() + "; the one that runs at " + where +
           " is of " + size.str());
  std::set<std::string> names;
  std::map<std::uint32_t, std::string> ids;
  std::vector<std::string> live;
  for (const auto& life : lives) {
    const WorkerInfo& info = life.card.info;
    if (!joiner.name.empty() && info.name == joiner.name) {
      if (joiner.rank != MemberRecord::kNoRank && joiner.rank != info.id.value())
        refuse(self + " has rank " + std::to_string(joiner.rank) + "; in the world at " + where +
               " it was rank " + std::to_string(info.id.value()));
      return {info.name, info.id, info.epoch + 1};
    }
    names.insert(info.name);
    ids.emplace(info.id.value(), info.name);
    if (life.state == LifeState::alive) live.push_back(info.name);
  }
  if (!size.is_elastic())
    refuse(self + " is one too many: the world of " + size.str() + " at " + where +
           " is full; its workers are " + base::join_names(live));
  const auto place = [&](std::uint32_t id) {
    const std::string name = joiner.name.empty() ? "worker" + std::to_string(id) : joiner.name;
    return WorkerInfo{name, WorkerId(id), 1};
  };
  if (joiner.rank != MemberRecord::kNoRank) {
    const auto id = static_cast<std::uint32_t>(joiner.rank);
    if (const auto other = ids.find(id); other != ids.end())
      throw Error(ErrorCode::already_exists, "rank " + std::to_string(id) +
                                                 " is taken twice: by worker \"" + other->second +
                                                 "\" and " + self);
    return place(id);
  }
  constexpr std::uint32_t kMaxIds = base::PublishedTable<MemberRecord>::kMaxSize;
  for (std::uint32_t id = 0; id < kMaxIds; ++id) {
    if (!ids.contains(id) && !names.contains(place(id).name)) return place(id);
  }
  refuse(self + " cannot join the world at " + where + ": it has had " + std::to_string(kMaxIds) +
         " names, and each keeps its id; take the name of a worker that is gone");
  return {};
}

std::optional<Error> objection_to(const MemberCard& joiner, const std::vector<MemberCard>& live,
                                  const WorldSize& size) {
  return base::failure_of([&] { check_joiner(joiner, live, size); });
}

}  // namespace stitch::rpc
