// What the founders of a world check of one another, and say of those that are missing.
#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <string>

#include "stitch/base/error.h"
#include "stitch/base/name_list.h"
#include "stitch/base/printable.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/rpc/world/rendezvous.h"

namespace stitch::rpc {

MemberRecord Rendezvous::decode(const std::string& text) const {
  try {
    return MemberRecord::decode(text);
  } catch (const Error& error) {
    throw Error(error.code(),
                "an entry in " + store_.describe() + " makes no sense: " + error.what());
  }
}

void Rendezvous::check_member(const MemberRecord& record) const {
  const std::string name = base::printable(record.name.substr(0, kMaxShown));
  const bool ranked = record.rank != kNoRank;
  if (record.world_size != options_.world_size.max() || record.founders != founders_) {
    const std::string theirs =
        record.founders == record.world_size
            ? std::to_string(record.world_size)
            : std::to_string(record.founders) + ':' + std::to_string(record.world_size);
    throw Error(ErrorCode::invalid_argument,
                (name.empty() ? "a worker without a name" : "worker \"" + name + '"') +
                    (ranked ? " (rank " + std::to_string(record.rank) + ')' : "") +
                    " expects a world of " + theirs + ", worker \"" + options_.name + "\" one of " +
                    options_.world_size.str());
  }
  const bool elastic = options_.world_size.is_elastic();
  const bool rank_fits = ranked ? record.rank >= 0 && record.rank < record.world_size : elastic;
  const bool name_fits = is_worker_name(record.name) || (elastic && !ranked && record.name.empty());
  if (!rank_fits || !name_fits) {
    throw Error(ErrorCode::protocol, "an entry in " + store_.describe() +
                                         " makes no sense: " + "worker \"" + name + "\", rank " +
                                         std::to_string(record.rank) + " of " +
                                         std::to_string(record.world_size));
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
      throw Error(ErrorCode::already_exists,
                  "rank " + std::to_string(record.rank) + " is taken twice: by worker \"" +
                      same_rank->second->name + "\" and worker \"" + record.name + "\"");
    }
    const auto [same_name, new_name] = by_name.emplace(record.name, &record);
    if (!new_name) {
      throw Error(ErrorCode::already_exists, "worker name \"" + record.name +
                                                 "\" is taken twice: by rank " +
                                                 std::to_string(same_name->second->rank) +
                                                 " and rank " + std::to_string(record.rank));
    }
  }
  std::map<std::string, const WorkerDevices*> devices;
  for (const auto& record : records) devices.emplace(record.name, &record.devices);
  check_device_maps(devices, options_.world_size.is_elastic());
}

// Why the records form no world. They have ids afterwards, where they do.
std::optional<Error> Rendezvous::find_objection() {
  return base::failure_of([this] {
    for (const auto& record : records_) check_member(record);
    assign_ids();
    check(records_);
  });
}

// Whether an error that follows from the records is one for all workers. A record may be what a
// dead worker has left, of another size or with other devices, too; it counts while all founders
// answer.
bool Rendezvous::stands(const Error& objection) {
  // No life of a worker writes what makes no sense. And who has told the others may be gone.
  if (objection.code() == ErrorCode::protocol || has_failed()) return true;
  std::set<std::int64_t> slots;
  for (std::int64_t i = 0; i < founders_; ++i) slots.insert(i);
  return all_live(slots);
}

// At the deadline, with records missing: the error that says so. Where founders did not answer, and
// their records would still not fit beside those of the founders that are here, that is said first.
Error Rendezvous::incomplete() {
  std::string arrived = "unknown, as the store does not answer";
  std::optional<Error> objection;
  try {
    arrived = arrived_names();
    supersede();  // the others, if they wait for longer, would wait for this worker
    const auto is_here = [&](const MemberRecord& former) {
      return std::any_of(records_.begin(), records_.end(),
                         [&](const auto& record) { return in_one_place(record, former); });
    };
    std::erase_if(objected_to_, is_here);
    records_.insert(records_.end(), objected_to_.begin(), objected_to_.end());
    if (!objected_to_.empty()) objection = find_objection();
  } catch (const Error&) {
    // What is known is said all the same.
  }
  const std::string text = "worker \"" + options_.name + "\" waited " + init_timeout_text() +
                           " for a world of " + options_.world_size.str() + " at " +
                           store_.describe() + ": only these arrived: " + arrived +
                           (silent_.empty() ? "" : "; " + silent_ + " had arrived before");
  if (!objection) return Error(ErrorCode::timeout, text);
  return Error(objection->code(),
               objection->what() + ("; not all of the founders answered, and " + text));
}

std::string Rendezvous::init_timeout_text() const {
  return std::to_string(options_.init_timeout / std::chrono::milliseconds(1)) + " ms";
}

// Of the present founding, whose records are those of this object afterwards.
std::string Rendezvous::arrived_names() {
  records_ = arrived_records();
  std::vector<std::string> names;
  for (const auto& record : records_)
    names.push_back(record.name.empty() ? "a worker without a name" : record.name);
  return base::join_names(names);
}

// Of the present founding.
std::vector<MemberRecord> Rendezvous::arrived_records() {
  std::vector<MemberRecord> records;
  const std::int64_t arrived = std::min(founders_, store_.add(key("arrived"), 0));
  for (std::int64_t i = 0; i < arrived; ++i) {
    if (const auto text = store_.try_get(slot_key("member", i))) records.push_back(decode(*text));
  }
  return records;
}

}  // namespace stitch::rpc
