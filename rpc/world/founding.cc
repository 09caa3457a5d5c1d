#include "stitch/rpc/world/founding.h"

#include <algorithm>
#include <set>
#include <thread>

#include "stitch/base/name_list.h"
#include "stitch/base/printable.h"
#include "stitch/base/random.h"
#include "stitch/rpc/world/reach.h"

namespace stitch::rpc {

using std::chrono::milliseconds;

namespace {

// Between two looks at what the store tells no change of.
constexpr milliseconds kLook{50};
// At what it does tell of, for one that waits for another thing, too.
constexpr milliseconds kSlice{1000};
constexpr milliseconds kLongSlice{5000};

constexpr const char* kOtherJob = "; another job that meets at the same place needs one of its own";

std::string rank_text(const MemberRecord& record) {
  return record.rank == MemberRecord::kNoRank ? "" : " (rank " + std::to_string(record.rank) + ")";
}

std::string name_text(const MemberRecord& record) {
  return record.name.empty() ? "a worker without a name" : "worker \"" + record.name + "\"";
}

void check_ranks(const std::vector<MemberClaim>& founders, const WorldSize& size) {
  const MemberRecord& first = founders.front().record;
  for (const auto& [record, addresses] : founders) {
    if (record.size != size) {
      const MemberRecord& other = first.size == size ? first : founders.back().record;
      throw Error(ErrorCode::invalid_argument,
                  name_text(record) + rank_text(record) + " expects a world of " +
                      record.size.str() +
                      (other.size == size ? ", " + name_text(other) : ", the one that leads") +
                      " one of " + size.str());
    }
    const bool ranked = record.rank != MemberRecord::kNoRank;
    if (!size.is_elastic() && (!ranked || record.rank >= size.max() || record.name.empty()))
      throw Error(ErrorCode::protocol,
                  name_text(record) + rank_text(record) + " cannot be in a world of " + size.str());
  }
}

// A rank is the id; a worker without one gets the lowest that is free, and whose name is, in the
// order of the tokens.
void assign_ids(std::vector<MemberClaim>& founders) {
  std::set<std::int64_t> taken;
  std::set<std::string> names;
  for (const auto& [record, addresses] : founders) {
    taken.insert(record.rank);
    names.insert(record.name);
  }
  std::int64_t next = 0;
  for (auto& [record, addresses] : founders) {
    if (record.rank == MemberRecord::kNoRank) {
      while (taken.contains(next) ||
             (record.name.empty() && names.contains("worker" + std::to_string(next))))
        ++next;
      taken.insert(record.rank = next);
    }
    if (record.name.empty()) record.name = "worker" + std::to_string(record.rank);
  }
}

void check_duplicates(const std::vector<MemberClaim>& founders) {
  std::map<std::int64_t, const MemberRecord*> by_rank;
  std::map<std::string, const MemberRecord*> by_name;
  for (const auto& [record, addresses] : founders) {
    const auto [same_rank, new_rank] = by_rank.emplace(record.rank, &record);
    if (!new_rank) {
      throw Error(ErrorCode::already_exists,
                  "rank " + std::to_string(record.rank) + " is taken twice: by worker \"" +
                      same_rank->second->name + "\" and worker \"" + record.name + "\"" +
                      (same_rank->second->name == record.name ? kOtherJob : ""));
    }
    const auto [same_name, new_name] = by_name.emplace(record.name, &record);
    if (!new_name) {
      throw Error(ErrorCode::already_exists, "worker name \"" + record.name +
                                                 "\" is taken twice: by rank " +
                                                 std::to_string(same_name->second->rank) +
                                                 " and rank " + std::to_string(record.rank));
    }
  }
}

}  // namespace

WorldRecord Founding::form(const Claims& claims, const WorldSize& size, std::uint64_t number) {
  std::vector<MemberClaim> founders;
  for (const auto& [key, value] : claims) {
    founders.push_back(MemberClaim::decode(value));
    if (key != world_key::kMember + founders.back().record.token)
      throw Error(ErrorCode::protocol, "a claim in the store is not under its token");
  }
  check_ranks(founders, size);
  assign_ids(founders);
  std::ranges::stable_sort(founders, {}, [](const auto& claim) { return claim.record.rank; });
  check_duplicates(founders);
  std::map<std::string, const WorkerDevices*> devices;
  std::vector<MemberRecord> records;
  for (const auto& [record, addresses] : founders) {
    devices.emplace(record.name, &record.devices);
    records.push_back(record);
  }
  check_device_maps(devices, size.is_elastic());
  WorldRecord world;
  world.number = number;
  for (const auto& [record, addresses] : founders) {
    world.lives.push_back(
        {MemberCard{{record.name, WorkerId(static_cast<std::uint32_t>(record.rank)), 1},
                    needed_addresses(addresses, records, size),
                    record.encode()}});
  }
  return world;
}

Founding::Place Founding::find_place(const MemberClaim& self) {
  const std::string& token = self.record.token;
  const std::string answer_key = world_key::kAnswer + token;
  std::optional<WorldRecord> told;
  // Whether the store has a place for this worker, or says why not.
  const auto placed = [&] {
    if (!told) return false;
    if (const auto failure = told->failure_of(token)) throw Error(*failure);
    return told->find(token) != nullptr;
  };
  bool runs = false;  // there is a record, of a world of others
  Holder own;
  Holder leader;
  try {
    own = store_.claim(world_key::kMember + token, self.encode()).claim;
    if (leading_.returns)
      static_cast<void>(store_.claims(world_key::kKeeper, 1, at_most(kReturnTime)));
    for (bool first = true; first || Clock::now() < deadline_; first = false) {
      try {
        if (leading_.stands && !leader) leader = store_.claim(world_key::kLeader, token).claim;
        const bool leads = leading_.leads || leader != nullptr;
        told = read(world_key::kWorld, leads ? Timeout(0) : leading_.stands ? kSlice : kLongSlice);
        if (placed()) return {std::move(*told)};
        runs = told && told->failure.empty();
        const bool failed = told && !runs;
        if (runs || !first) {
          told = read(answer_key, runs ? kSlice : Timeout(0));
          if (placed()) return {std::move(*told)};
        }
        if (leads) {
          auto place = found(runs, token);
          if (place && place->world.find(token) != nullptr) return std::move(*place);
        }
        if (failed) std::this_thread::sleep_for(kLook);  // it will be erased
      } catch (const Error& error) {
        if (error.code() != ErrorCode::timeout) throw;  // a store that is slow is asked again
      }
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::timeout || Clock::now() < deadline_) throw;
  }
  throw late(runs);
}

std::optional<WorldRecord> Founding::read(const std::string& key, Timeout timeout) {
  std::optional<std::string> text;
  try {
    timeout = at_most(timeout);
    text = timeout == Timeout(0) ? store_.try_get(key) : store_.get(key, timeout);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::timeout || timeout == Timeout(0)) throw;
  }
  if (!text) return std::nullopt;
  try {
    return WorldRecord::decode(*text);
  } catch (const Error& error) {
    // It may be that of a dead world, of another version.
    if (key == world_key::kWorld && !is_kept()) return WorldRecord{};
    throw error.with_prefix("at " + store_.describe());
  }
}

bool Founding::is_kept() { return !store_.claims(world_key::kKeeper, 1, Timeout(0)).empty(); }

// `runs`: the store has the record of a world, which may be dead.
Founding::Holder Founding::claim_world(bool runs, std::uint64_t number) {
  if (runs) {
    const bool kept = is_kept();
    if (kept || !dead_since_) dead_since_ = Clock::now();
    // The next keeper comes when the death of the former one is known to it.
    const auto patience = options_.world_size.is_elastic()
                              ? kKeeperTime + options_.heartbeat_timeout
                              : std::chrono::nanoseconds(kKeeperTime);
    if (kept || Clock::now() - *dead_since_ < patience) return nullptr;
  }
  auto keeper = store_.claim(world_key::kKeeper, keeper_value(number, options_.name)).claim;
  if (!keeper) return nullptr;
  const auto there = read(world_key::kWorld, Timeout(0));
  // Another may have founded one, and given it to its keeper, since this worker looked.
  if (there && there->failure.empty() && !runs) return nullptr;
  if (there) store_.erase(world_key::kWorld);
  return keeper;
}

// Nothing where workers are missing, or another world is there.
std::optional<Founding::Place> Founding::found(bool runs, const std::string& token) {
  const auto founders = static_cast<std::size_t>(options_.world_size.min());
  // Meanwhile the keeper of a world that runs may come back to its store.
  const Timeout wait = runs ? Timeout(0) : at_most(kSlice / 4);
  if (store_.claims(world_key::kMember, founders, wait).size() < founders) return std::nullopt;
  const std::uint64_t number = base::random_number();
  auto keeper = claim_world(runs, number);
  if (!keeper) {
    std::this_thread::sleep_for(kLook);
    return std::nullopt;
  }
  std::optional<Clock::time_point> objected;
  for (;;) {
    Claims claims = store_.claims(world_key::kMember, founders, Timeout(0));
    if (claims.size() < founders) return std::nullopt;
    // This worker is one of them, whichever others find a place.
    for (auto each = claims.end();
         options_.world_size.is_elastic() &&
         claims.size() > static_cast<std::size_t>(options_.world_size.max());) {
      if ((--each)->first != world_key::kMember + token) each = claims.erase(each);
    }
    std::optional<WorldRecord> world;
    std::string text;
    auto objection = base::failure_of([&] {
      world = form(claims, options_.world_size, number);
      text = world->encode();
    });
    if (!objection) {
      store_.set(world_key::kWorld, text);
      return Place{std::move(*world), std::move(keeper)};
    }
    const auto now = Clock::now();
    if (!objected) objected = now;
    if (now - *objected >= kFormerTime || now >= deadline_) {
      fail(claims, *objection);
      throw std::move(*objection);
    }
    std::this_thread::sleep_for(kLook);
  }
}

// Tells all of them, and waits until they have heard of it: this worker may serve the store.
void Founding::fail(const Claims& claims, const Error& why) {
  constexpr std::chrono::seconds kGracePeriod{2};
  static_cast<void>(base::failure_of([&] {
    WorldRecord failed;
    failed.failure = to_refusal_text(why);
    for (const auto& [key, value] : claims)
      failed.failed_for.push_back(key.substr(std::string(world_key::kMember).size()));
    store_.set(world_key::kWorld, failed.encode());
    const auto until = Clock::now() + kGracePeriod;
    const auto waits = [&] {
      const Claims left = store_.claims(world_key::kMember, 1, Timeout(0));
      const auto stays = [&](const auto& each) { return left.contains(each.first); };
      return std::ranges::count_if(claims, stays) > 1;  // this one
    };
    while (waits() && Clock::now() < until) std::this_thread::sleep_for(kLook);
    store_.erase(world_key::kWorld);
  }));
}

Founding::Timeout Founding::at_most(Timeout timeout) const {
  const auto now = Clock::now();
  if (now >= deadline_) return Timeout(0);
  return std::min(timeout, std::chrono::ceil<Timeout>(deadline_ - now));
}

Error Founding::late(bool runs) {
  const std::string self =
      options_.name.empty() ? "a worker without a name" : "worker \"" + options_.name + "\"";
  const std::string waited =
      self + " waited " + std::to_string(options_.init_timeout / milliseconds(1)) + " ms for ";
  if (runs) {
    return Error(ErrorCode::timeout,
                 waited + "an answer of the world that is recorded in " + store_.describe());
  }
  std::string arrived = "unknown, as the store does not answer";
  static_cast<void>(base::failure_of([&] {
    std::vector<std::string> names;
    for (const auto& claim : store_.claims(world_key::kMember, 1, Timeout(0))) {
      static_cast<void>(base::failure_of([&] {
        const std::string name = MemberClaim::decode(claim.second).record.name;
        names.push_back(name.empty() ? "a worker without a name" : name);
      }));
    }
    arrived = base::join_names(names);
  }));
  return Error(ErrorCode::timeout, waited + "a world of " + options_.world_size.str() + " at " +
                                       store_.describe() + ": only these arrived: " + arrived);
}

}  // namespace stitch::rpc
