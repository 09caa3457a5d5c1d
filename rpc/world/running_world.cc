#include "stitch/rpc/world/running_world.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <thread>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/name_list.h"
#include "stitch/base/published_table.h"
#include "stitch/base/random.h"

namespace stitch::rpc {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

std::int64_t number_in(const std::optional<std::string>& text) {
  std::int64_t number = 0;
  if (text) std::from_chars(text->data(), text->data() + text->size(), number);
  return number;
}

}  // namespace

RunningWorld::RunningWorld(const Options& options, transport::Store& store,
                           steady_clock::time_point deadline, milliseconds answer_timeout)
    : options_(options), store_(store), deadline_(deadline), answer_timeout_(answer_timeout) {}

void RunningWorld::await_former_world(bool hosts) {
  constexpr milliseconds kPollInterval{20};
  const auto found = [&] { return is_recorded() || store_.try_get(world_key::kOpen).has_value(); };
  const auto now = steady_clock::now();
  // The rest is for founding a world.
  const auto until =
      hosts ? now + std::min<steady_clock::duration>(kReturnTime, (deadline_ - now) / 2)
            : deadline_;
  while (!found() && steady_clock::now() < until) std::this_thread::sleep_for(kPollInterval);
  if (hosts) store_.set(world_key::kOpen, "1");
}

bool RunningWorld::is_recorded() {
  const auto text = store_.try_get(world_key::kWorld);
  return text && !text->empty();
}

std::optional<WorldRecord> RunningWorld::find(const Reach& reach) {
  bool waited = false;  // for the keeper of a world that lives
  for (;;) {
    const auto text = store_.try_get(world_key::kWorld);
    if (!text || text->empty()) return std::nullopt;
    const WorldRecord before = WorldRecord::decode(*text);
    if (!answers()) {
      if (has_place(before)) {
        if (reach.join && reach.join(before)) return before;
      } else if (reach.lives && reach.lives(before)) {
        if (std::exchange(waited, true)) check_place(before);
        continue;
      }
      check_time();  // members that were not asked in time may live
      bury(before);
      continue;
    }
    const auto fresh = store_.try_get(world_key::kWorld);
    if (!fresh || fresh->empty()) continue;  // it has ended in the meantime
    WorldRecord record = WorldRecord::decode(*fresh);
    check_place(record);
    return record;
  }
}

// Whether the keeper of the recorded world answers, before its record is gone.
bool RunningWorld::answers() {
  constexpr milliseconds kPollInterval{10};
  const auto ring = store_.add(world_key::kRing, 1);
  const auto give_up = steady_clock::now() + answer_timeout_;
  for (;;) {
    if (number_in(store_.try_get(world_key::kRung)) >= ring) return true;
    const auto now = steady_clock::now();
    if (now >= give_up) return false;
    check_time();
    if (!is_recorded()) return true;  // looked at again by the caller
    std::this_thread::sleep_for(kPollInterval);
  }
}

void RunningWorld::check_time() const {
  if (steady_clock::now() < deadline_) return;
  throw Error(ErrorCode::timeout, "worker \"" + options_.name + "\" waited " +
                                      std::to_string(options_.init_timeout / milliseconds(1)) +
                                      " ms for an answer of the world that is recorded in " +
                                      store_.describe());
}

void RunningWorld::bury(const WorldRecord& record) {
  const auto text = store_.try_get(world_key::kWorld);
  if (!text || text->empty() || WorldRecord::decode(*text).number != record.number) return;
  store_.compare_and_set(world_key::kWorld, text, "");
}

void RunningWorld::check_place(const WorldRecord& record) const {
  const std::string here = " at " + store_.describe();
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::invalid_argument, text);
  };
  const std::string self = "worker \"" + options_.name + "\"";
  const bool sizes_agree = record.size.is_elastic() ? options_.world_size.is_elastic()
                                                    : options_.world_size == record.size;
  if (!sizes_agree) {
    refuse(self + " expects a world of " + options_.world_size.str() + "; the one that runs" +
           here + " is of " + record.size.str());
  }
  const WorldRecord::Entry* own = record.find(options_.name);
  const auto live = record.live_names();
  if (!record.size.is_elastic() && own == nullptr) {
    refuse(self + " is one too many: the world of " + record.size.str() + here +
           " is full; its workers are " + base::join_names(live));
  }
  const auto others = static_cast<std::int64_t>(live.size()) - (own != nullptr && own->live);
  if (record.size.is_elastic() && others >= record.size.max()) {
    refuse(self + " is one too many: the world of " + record.size.str() + here + " has " +
           std::to_string(others) + " workers: " + base::join_names(live));
  }
  if (own != nullptr && options_.rank != Options::kFromLauncher &&
      static_cast<std::uint32_t>(options_.rank) != own->card.info.id.value()) {
    refuse(self + " has rank " + std::to_string(options_.rank) + "; in the world" + here +
           " it was rank " + std::to_string(own->card.info.id.value()));
  }
}

bool RunningWorld::has_place(const WorldRecord& record) const {
  return !base::failure_of([&] { check_place(record); });
}

WorkerInfo RunningWorld::claim(const WorldRecord& record) {
  WorkerInfo self{options_.name, {}, 0};
  const WorldRecord::Entry* own = record.find(options_.name);
  self.id = own != nullptr ? own->card.info.id : claim_id(record, self.name);
  self.epoch = next_epoch(store_, self.name, own == nullptr ? 0 : own->card.info.epoch);
  return self;
}

WorkerId RunningWorld::claim_id(const WorldRecord& record, std::string& name) {
  if (options_.rank != Options::kFromLauncher) {
    const WorkerId id(static_cast<std::uint32_t>(options_.rank));
    std::string owner;
    if (claim_this(record, id, name, &owner)) return id;
    throw Error(ErrorCode::already_exists, "rank " + std::to_string(options_.rank) +
                                               " is taken twice: by worker \"" + owner +
                                               "\" and worker \"" + name + "\"");
  }
  std::set<WorkerId> taken;
  std::set<std::string> names;
  for (const auto& entry : record.entries) {
    taken.insert(entry.card.info.id);
    names.insert(entry.card.info.name);
  }
  constexpr std::uint32_t kMaxIds = base::PublishedTable<WorldRecord>::kMaxSize;
  for (std::uint32_t next = 0; next < kMaxIds; ++next) {
    const WorkerId id(next);
    if (taken.contains(id)) continue;
    if (!name.empty()) {
      if (claim_this(record, id, name, nullptr)) return id;
      continue;
    }
    const std::string own_name = "worker" + std::to_string(next);
    if (names.contains(own_name)) continue;
    // Two workers without a name would claim the same one.
    const std::string claimant = own_name + ' ' + std::to_string(base::random_number());
    if (!claim_this(record, id, claimant, nullptr)) continue;
    name = own_name;
    return id;
  }
  throw Error(ErrorCode::invalid_argument,
              (name.empty() ? "a worker without a name" : "worker \"" + name + "\"") +
                  " cannot join the world at " + store_.describe() + ": it has had " +
                  std::to_string(kMaxIds) +
                  " names, and each keeps its id; take the name of a worker that is gone");
}

// Whether `id` is this worker's. Else `owner` (may be null) gets the name of the one that has it.
bool RunningWorld::claim_this(const WorldRecord& record, WorkerId id, const std::string& name,
                              std::string* owner) {
  std::string found;
  if (const WorldRecord::Entry* entry = record.find(id)) {
    found = entry->card.info.name;
  } else {
    const std::string key =
        "claim/" + std::to_string(record.number) + '/' + std::to_string(id.value());
    found = store_.compare_and_set(key, std::nullopt, name);
    if (found == name) return true;
  }
  if (owner != nullptr) *owner = found.substr(0, found.find(' '));
  return false;
}

std::uint64_t RunningWorld::next_epoch(transport::Store& store, const std::string& name,
                                       std::uint64_t former) {
  const std::string key = "epoch/" + name;
  auto epoch = store.add(key, 1);
  // The counter may have been lost with its store.
  while (epoch <= static_cast<std::int64_t>(former))
    epoch = store.add(key, static_cast<std::int64_t>(former) - epoch + 1);
  return static_cast<std::uint64_t>(epoch);
}

}  // namespace stitch::rpc
