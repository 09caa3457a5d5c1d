#include "stitch/rpc/world/admission.h"

#include <map>
#include <string>

#include "stitch/base/name_list.h"
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
    if (card.info.id != joiner.info.id) records.push_back(MemberRecord::decode(card.record));
  }
  std::map<std::string, const WorkerDevices*> devices;
  for (const auto& other : records) devices.emplace(other.name, &other.devices);
  devices.emplace(record.name, &record.devices);
  // With a worker missing, or still to come, maps that name it cannot be checked.
  const bool complete = !size.is_elastic() && static_cast<int>(devices.size()) == size.min();
  check_device_maps(devices, !complete);
}

}  // namespace

std::optional<Error> objection_to(const MemberCard& joiner, const std::vector<MemberCard>& live,
                                  const WorldSize& size) {
  return base::failure_of([&] { check_joiner(joiner, live, size); });
}

}  // namespace stitch::rpc
