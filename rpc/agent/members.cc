#include "stitch/rpc/agent/members.h"

#include <utility>

#include "stitch/base/name_list.h"

namespace stitch::rpc {

namespace {

std::string quoted_list(const std::vector<std::string>& names) {
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "\"" : ", \"") + name + "\"";
  return list;
}

}  // namespace

Members::Members(std::vector<Member> members) : members_(std::move(members)) {
  for (const auto& member : members_) {
    infos_.push_back(member.info);
    by_name_.emplace(member.info.name, member.info.id);
  }
}

const WorkerInfo& Members::find(std::string_view name) const {
  const auto found = by_name_.find(std::string(name));
  if (found != by_name_.end()) return infos_[found->second.value()];
  std::vector<std::string> names;
  for (const auto& info : infos_) names.push_back(info.name);
  auto nearest = base::nearest_names(std::string(name), names, 5);
  if (nearest.empty() && names.size() <= 8) nearest = std::move(names);
  throw Error(ErrorCode::invalid_argument,
              "worker \"" + std::string(name) + "\" is not in this world of " +
                  std::to_string(infos_.size()) +
                  (nearest.empty() ? "" : "; known are " + quoted_list(nearest)))
      .with_worker(std::string(name));
}

const WorkerInfo& Members::find(WorkerId id) const {
  if (id.value() < infos_.size()) return infos_[id.value()];
  throw Error(ErrorCode::invalid_argument, "worker id " + std::to_string(id.value()) +
                                               " is not in this world; ids are 0 to " +
                                               std::to_string(infos_.size() - 1));
}

const WorkerInfo& Members::find(const WorkerInfo& info) const {
  const WorkerInfo& known = find(info.id);
  if (known == info) return known;
  if (known.name != info.name) {
    throw Error(ErrorCode::invalid_argument, to_string(info) + " is not in this world: id " +
                                                 std::to_string(info.id.value()) + " is worker \"" +
                                                 known.name + "\"")
        .with_worker(info.name);
  }
  throw Error(ErrorCode::disconnected,
              "worker \"" + info.name + "\" epoch " + std::to_string(info.epoch) +
                  " is gone; it is now epoch " + std::to_string(known.epoch))
      .with_worker(info.name);
}

std::string Members::claimed_identity(const transport::Hello& hello) {
  return "worker \"" + hello.name + "\" (id " + std::to_string(hello.id) + ", epoch " +
         std::to_string(hello.epoch) + ")";
}

std::optional<Error> Members::objection(const transport::Hello& hello) const {
  const auto not_here = [&](ErrorCode code) {
    return Error(code, claimed_identity(hello) + " is not in this world");
  };
  if (hello.id >= infos_.size() || infos_[hello.id].name != hello.name)
    return not_here(ErrorCode::unauthenticated);
  if (infos_[hello.id].epoch != hello.epoch) return not_here(ErrorCode::disconnected);
  return std::nullopt;
}

}  // namespace stitch::rpc
