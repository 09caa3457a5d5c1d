#include "stitch/rpc/world/rendezvous.h"

#include <algorithm>
#include <charconv>
#include <thread>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/name_list.h"
#include "stitch/base/printable.h"
#include "stitch/base/random.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/rpc/world/running_world.h"

namespace stitch::rpc {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using transport::Store;

// From the end of a founding until its world is recorded, at most.
constexpr std::chrono::seconds kRecordingTime{1};

}  // namespace

Rendezvous::Rendezvous(const Options& options, Store& store, bool hosts,
                       steady_clock::time_point deadline)
    : options_(options),
      store_(store),
      hosts_(hosts),
      deadline_(deadline),
      founders_(options.world_size.min()) {}

std::string Rendezvous::key(const std::string& name) const {
  return "founding/" + std::to_string(generation_) + '/' + name;
}

std::string Rendezvous::slot_key(const char* name, std::int64_t slot) const {
  return key(std::string(name) + '/' + std::to_string(slot));
}

std::optional<std::vector<Rendezvous::Founder>> Rendezvous::meet(
    MemberRecord self, const std::function<bool()>& recorded) {
  generation_ = store_.add(world_key::kGeneration, 0);
  slot_ = store_.add(key("arrived"), 1) - 1;
  std::optional<steady_clock::time_point> superseded;
  const auto too_late = [&] {
    if (!recorded()) {
      if (!is_superseded()) return false;
      // Its world may be about to be recorded.
      if (!superseded) superseded = steady_clock::now();
      if (steady_clock::now() - *superseded < kRecordingTime) return false;
    }
    // This worker's slot would be missing in the founding that follows.
    supersede();
    return true;
  };
  if (slot_ >= founders_) {
    if (in_time(too_late)) return std::nullopt;
    tell_the_others({});
    throw Error(ErrorCode::invalid_argument,
                "worker \"" + self.name + "\" is one too many: the world of " +
                    options_.world_size.str() + " at " + store_.describe() + " is full");
  }
  store_.set(slot_key("member", slot_), self.encode());
  try {
    const auto texts = read_members(too_late);
    if (!texts) return std::nullopt;
    records_.clear();
    for (const auto& text : *texts) records_.push_back(MemberRecord::decode(text));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::timeout) throw;
    throw Error(ErrorCode::timeout, "worker \"" + self.name + "\" waited " +
                                        std::to_string(options_.init_timeout / milliseconds(1)) +
                                        " ms for a world of " + options_.world_size.str() + " at " +
                                        store_.describe() +
                                        ": only these arrived: " + arrived_names());
  }
  try {
    for (const auto& record : records_) check_member(record);
    assign_ids();
    check(records_);
  } catch (const Error&) {
    tell_the_others(records_);
    throw;
  }
  std::vector<Founder> founders;
  for (std::size_t i = 0; i < records_.size(); ++i) founders.push_back({ids_[i], records_[i]});
  std::sort(founders.begin(), founders.end(),
            [](const Founder& a, const Founder& b) { return a.id < b.id; });
  return founders;
}

WorkerInfo Rendezvous::self(const std::optional<WorkerInfo>& unused) {
  const auto slot = static_cast<std::size_t>(slot_);
  const std::string& name = records_[slot].name;
  const bool reuse = unused && unused->name == name;
  return {name, ids_[slot], reuse ? unused->epoch : RunningWorld::next_epoch(store_, name, 0)};
}

std::uint64_t Rendezvous::world_number() {
  const std::string text =
      store_.compare_and_set(key("number"), std::nullopt, std::to_string(base::random_number()));
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Error(ErrorCode::protocol, "the number of the world is \"" +
                                         base::printable(text.substr(0, kMaxShown)) + "\" in " +
                                         store_.describe() + ", not a number from 0 on");
  }
  return number;
}

std::vector<MemberCard> Rendezvous::exchange(const MemberCard& own) {
  base::Bytes bytes;
  base::ByteWriter out(bytes);
  own.write(out);
  store_.set(slot_key("card", slot_),
             std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  std::vector<MemberCard> cards;
  // Key after key: a wait for all of them would have the store keep the keys of all workers for all
  // workers.
  for (std::int64_t i = 0; i < founders_; ++i) {
    const std::string text =
        await(slot_key("card", i), static_cast<std::size_t>(i), "publish its addresses");
    base::ByteReader in(std::as_bytes(std::span(text)), "card of a member");
    cards.push_back(MemberCard::read(in));
    const auto slot = static_cast<std::size_t>(i);
    if (cards.back().info.id != ids_[slot] || cards.back().info.name != records_[slot].name)
      throw Error(ErrorCode::protocol, "an entry in " + store_.describe() +
                                           " makes no sense: " + to_string(cards.back().info) +
                                           " in the place of worker \"" + records_[slot].name +
                                           "\"");
  }
  std::sort(cards.begin(), cards.end(),
            [](const MemberCard& a, const MemberCard& b) { return a.info.id < b.info.id; });
  return cards;
}

void Rendezvous::finish(const WorldRecord& record) {
  if (record.entries.front().card.info.id == ids_[static_cast<std::size_t>(slot_)]) {
    record_world(record);
    store_.set(key("recorded"), "1");
  } else {
    const auto first = std::find(ids_.begin(), ids_.end(), record.entries.front().card.info.id);
    static_cast<void>(
        await(key("recorded"), static_cast<std::size_t>(first - ids_.begin()), "record the world"));
  }
  if (store_.add(key("read"), 1) >= founders_) erase_keys();
}

// By the founder with the lowest id.
void Rendezvous::record_world(const WorldRecord& record) {
  const std::string text = record.encode();
  // First: who dies in between leaves no old founding to the next one.
  store_.add(world_key::kGeneration, 1);
  const auto there = store_.try_get(world_key::kWorld);
  const bool free = !there || there->empty();
  if (!free || store_.compare_and_set(world_key::kWorld, there, text) != text) {
    throw Error(ErrorCode::disconnected, "worker \"" + options_.name +
                                             "\" cannot found a world at " + store_.describe() +
                                             ": another one has come to run there");
  }
}

// The value of a key that the founder of `slot` sets. The error says what it was to do.
std::string Rendezvous::await(const std::string& key, std::size_t slot, const char* what) {
  try {
    return store_.get(key, left());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::timeout) throw;
    supersede();
    throw Error(ErrorCode::timeout, "worker \"" + options_.name +
                                        "\" waited in vain for worker \"" + records_[slot].name +
                                        "\" (rank " + std::to_string(records_[slot].rank) +
                                        ") to " + what + ": it had arrived at " +
                                        store_.describe() + ", and has ended or hangs")
        .with_worker(records_[slot].name);
  }
}

// The next attempt, of this worker or others, is not to find what is left of this one.
void Rendezvous::supersede() {
  store_.compare_and_set(world_key::kGeneration, std::to_string(generation_),
                         std::to_string(generation_ + 1));
}

bool Rendezvous::is_superseded() { return store_.add(world_key::kGeneration, 0) != generation_; }

void Rendezvous::erase_keys() {
  for (std::int64_t i = 0; i < founders_; ++i) {
    store_.erase(slot_key("member", i));
    store_.erase(slot_key("card", i));
  }
  for (const char* name : {"number", "read", "arrived", "recorded"}) store_.erase(key(name));
}

// Nothing when it is too late to found a world with these keys.
std::optional<std::vector<std::string>> Rendezvous::read_members(
    const std::function<bool()>& too_late) {
  constexpr Timeout kLookInterval{100};
  std::vector<std::string> values;
  for (std::int64_t i = 0; i < founders_;) {
    const Timeout time = left();
    try {
      values.push_back(store_.get(slot_key("member", i), std::min(time, kLookInterval)));
      ++i;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::timeout || time <= kLookInterval) throw;
      if (too_late()) return std::nullopt;
    }
  }
  return values;
}

// Whether a world is recorded soon: this worker has come too late to found it.
bool Rendezvous::in_time(const std::function<bool()>& too_late) {
  constexpr milliseconds kPollInterval{10};
  constexpr std::chrono::seconds kFoundingTime{2};
  // An elastic world may still wait for its first workers, and then there is room for more.
  const auto give_up = options_.world_size.is_elastic()
                           ? deadline_
                           : std::min(deadline_, steady_clock::now() + kFoundingTime);
  while (!too_late()) {
    if (steady_clock::now() >= give_up) return false;
    std::this_thread::sleep_for(kPollInterval);
  }
  return true;
}

// The records do not form a world. Workers that expect a larger one wait for more records than will
// come: they get one of these in each missing place. The worker that hosts the store keeps it until
// all that arrived have read them, for at most kGracePeriod.
void Rendezvous::tell_the_others(const std::vector<MemberRecord>& records) {
  constexpr std::chrono::seconds kGracePeriod{2};
  constexpr milliseconds kPollInterval{5};
  constexpr std::int64_t kMaxFilled = 4096;
  const auto give_up = std::min(deadline_, steady_clock::now() + kGracePeriod);
  try {
    store_.add(key("seen"), 1);  // how many have read the records: this worker throws after this
    std::int64_t largest = 0;
    for (const auto& record : records) largest = std::max(largest, record.world_size);
    for (std::int64_t i = founders_; i < std::min(largest, kMaxFilled); ++i)
      store_.compare_and_set(slot_key("member", i), std::nullopt, records.front().encode());
    while (hosts_ && store_.add(key("seen"), 0) < store_.add(key("arrived"), 0) &&
           steady_clock::now() < give_up)
      std::this_thread::sleep_for(kPollInterval);
  } catch (const Error&) {
    // There is an error to be thrown already.
  }
}

Store::Timeout Rendezvous::left() const {
  const auto now = steady_clock::now();
  return now >= deadline_ ? Timeout(0) : std::chrono::ceil<Timeout>(deadline_ - now);
}

std::string Rendezvous::arrived_names() {
  std::vector<std::string> names;
  const std::int64_t arrived = std::min(founders_, store_.add(key("arrived"), 0));
  for (std::int64_t i = 0; i < arrived; ++i) {
    const auto text = store_.try_get(slot_key("member", i));
    if (!text) continue;
    const std::string name = MemberRecord::decode(*text).name;
    names.push_back(name.empty() ? "a worker without a name" : name);
  }
  return base::join_names(names);
}

}  // namespace stitch::rpc
