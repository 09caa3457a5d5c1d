#include "stitch/rpc/world/rendezvous.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <thread>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/printable.h"
#include "stitch/base/random.h"
#include "stitch/rpc/membership/notice.h"
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
                       steady_clock::time_point deadline, milliseconds silent_time)
    : options_(options),
      store_(store),
      hosts_(hosts),
      deadline_(deadline),
      silent_time_(silent_time),
      founders_(options.world_size.min()) {}

std::string Rendezvous::key(const std::string& name) const {
  return "founding/" + std::to_string(generation_) + '/' + name;
}

std::string Rendezvous::slot_key(const char* name, std::int64_t slot) const {
  return key(std::string(name) + '/' + std::to_string(slot));
}

// The decimal number there; 0 where there is none.
std::int64_t Rendezvous::count(const std::string& key) {
  std::int64_t number = 0;
  if (const auto text = store_.try_get(key))
    std::from_chars(text->data(), text->data() + text->size(), number);
  return number;
}

std::optional<std::vector<Rendezvous::Founder>> Rendezvous::meet(
    MemberRecord self, const std::function<bool()>& recorded) {
  records_.clear();
  ids_.clear();
  answered_ = 0;
  last_look_ = steady_clock::now();
  superseded_.reset();
  const std::string own = self.encode();  // before others wait for it
  generation_ = store_.add(world_key::kGeneration, 0);
  slot_ = store_.add(key("arrived"), 1) - 1;
  const auto too_late = [&] {
    if (!recorded() && !is_given_up()) return false;
    // This worker's slot would be missing in the founding that follows.
    supersede();
    return true;
  };
  if (slot_ >= founders_) {
    if (in_time(self, too_late)) return std::nullopt;
    tell_the_others(nullptr);
    throw Error(ErrorCode::invalid_argument,
                "worker \"" + self.name + "\" is one too many: the world of " +
                    options_.world_size.str() + " at " + store_.describe() + " is full");
  }
  store_.set(slot_key("member", slot_), own);
  try {
    if (!read_members(self, too_late)) return std::nullopt;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::timeout) throw incomplete();
    if (error.code() == ErrorCode::protocol) tell_the_others(&error);
    throw;
  }
  auto as_read = records_;
  if (const auto objection = find_objection()) {
    if (!stands(*objection)) {
      as_read.erase(as_read.begin() + static_cast<std::ptrdiff_t>(slot_));
      objected_to_ = std::move(as_read);
      supersede();
      return std::nullopt;
    }
    const bool superseded = is_superseded();  // first: it follows a failure
    if (!has_failed()) {
      // Others have taken one for dead that was only slow: all find the error in the next one.
      if (superseded) return std::nullopt;
      if (steady_clock::now() >= deadline_) {
        supersede();  // this worker does not know whether all live
        throw Error(*objection);
      }
    }
    tell_the_others(&*objection);
    throw Error(*objection);
  }
  objected_to_.clear();
  std::vector<Founder> founders;
  for (std::size_t i = 0; i < records_.size(); ++i) founders.push_back({ids_[i], records_[i]});
  std::sort(founders.begin(), founders.end(),
            [](const Founder& a, const Founder& b) { return a.id < b.id; });
  go_away();
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

std::optional<std::vector<MemberCard>> Rendezvous::exchange(const MemberCard& own) {
  base::Bytes bytes;
  base::ByteWriter out(bytes);
  own.write(out);
  store_.set(slot_key("card", slot_),
             std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  come_back();
  std::vector<MemberCard> cards;
  // Key after key: a wait for all of them would have the store keep the keys of all workers for all
  // workers.
  for (std::int64_t i = 0; i < founders_; ++i) {
    const auto text =
        await(slot_key("card", i), static_cast<std::size_t>(i), "publish its addresses");
    if (!text) return std::nullopt;
    base::ByteReader in(std::as_bytes(std::span(*text)), "card of a member");
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
  go_away();
  return cards;
}

bool Rendezvous::finish(const WorldRecord& record) {
  if (record.entries.front().card.info.id == ids_[static_cast<std::size_t>(slot_)]) {
    if (!record_world(record)) return false;
    store_.set(key("recorded"), "1");
  } else {
    come_back();
    const auto first = std::find(ids_.begin(), ids_.end(), record.entries.front().card.info.id);
    const auto recorded =
        await(key("recorded"), static_cast<std::size_t>(first - ids_.begin()), "record the world");
    if (!recorded) {
      // That worker may have died right after it.
      const auto there = store_.try_get(world_key::kWorld);
      if (!there || there->empty() || WorldRecord::decode(*there).number != record.number)
        return false;
    }
  }
  if (store_.add(key("read"), 1) >= founders_) erase_keys();
  return true;
}

// By the founder with the lowest id. False: the others have given this founding up, or another
// world has come to run here. A founder that gives it up at this moment finds the record.
bool Rendezvous::record_world(const WorldRecord& record) {
  if (is_superseded()) return false;
  const std::string text = record.encode();
  // First: who dies in between leaves no old founding to the next one.
  store_.add(world_key::kGeneration, 1);
  const auto there = store_.try_get(world_key::kWorld);
  const bool free = !there || there->empty();
  return free && store_.compare_and_set(world_key::kWorld, there, text) == text;
}

// The value of a key that the founder of `slot` sets; nothing when the founding has been given up.
// The error says what it was to do.
std::optional<std::string> Rendezvous::await(const std::string& key, std::size_t slot,
                                             const char* what) {
  constexpr Timeout kInterval = 4 * kLookInterval;  // of all workers of a large world
  const std::string name = "worker \"" + records_[slot].name + "\"";
  std::int64_t question = 0;  // none yet
  auto next_look = steady_clock::now() + kAnswerTime;
  for (;;) {
    answer_if_due();
    const Timeout time = left();
    try {
      return store_.get(key, std::min(time, kInterval));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::timeout) throw;
    }
    if (time <= kInterval) {
      try {
        supersede();
      } catch (const Error&) {
        // The store does not answer.
      }
      throw Error(ErrorCode::timeout, "worker \"" + options_.name + "\" waited in vain for " +
                                          name + " (rank " + std::to_string(records_[slot].rank) +
                                          ") to " + what + ": it had arrived at " +
                                          store_.describe() + ", and has ended or hangs")
          .with_worker(records_[slot].name);
    }
    if (is_given_up()) return std::nullopt;
    if (steady_clock::now() < next_look) continue;
    if (question != 0 && !has_answered(static_cast<std::int64_t>(slot), question)) {
      silent_ = name;
      supersede();
      return std::nullopt;
    }
    question = ask();
    next_look = steady_clock::now() + silent_time_;
  }
}

// The next attempt, of this worker or others, is not to find what is left of this one.
void Rendezvous::supersede() {
  store_.compare_and_set(world_key::kGeneration, std::to_string(generation_),
                         std::to_string(generation_ + 1));
}

bool Rendezvous::is_superseded() { return count(world_key::kGeneration) != generation_; }

// Whether this founding is over, and its world is not about to be recorded. Throws why it has
// failed, where that is an error for all.
bool Rendezvous::is_given_up() {
  if (!is_superseded()) return false;
  if (const auto failure = store_.try_get(key("failure"))) {
    store_.add(key("seen"), 1);
    throw from_refusal_text(base::printable(*failure));
  }
  const auto now = steady_clock::now();
  if (!superseded_) superseded_ = now;
  return now - *superseded_ >= kRecordingTime;
}

void Rendezvous::erase_keys() {
  for (std::int64_t i = 0; i < founders_; ++i) {
    for (const char* name : {"member", "card", "answer"}) store_.erase(slot_key(name, i));
  }
  for (const char* name : {"number", "read", "arrived", "recorded", "question"})
    store_.erase(key(name));
}

// The records of all founders. False when it is too late to found a world with these keys, or one
// of them is of a dead founder.
bool Rendezvous::read_members(const MemberRecord& self, const std::function<bool()>& too_late) {
  std::set<std::int64_t> rivals;  // in the place of this worker
  auto missing_since = steady_clock::time_point::max();
  for (std::int64_t i = 0; i < founders_;) {
    answer_if_due();
    const Timeout time = left();
    try {
      const std::string text = store_.get(slot_key("member", i), std::min(time, kLookInterval));
      records_.push_back(decode(text));
      if (i != slot_ && in_one_place(records_.back(), self)) rivals.insert(i);
      missing_since = steady_clock::time_point::max();
      ++i;
      continue;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::timeout || time <= kLookInterval) throw;
    }
    if (too_late()) return false;
    const auto now = steady_clock::now();
    // The slot has been taken, but there is no record.
    if (count(key("arrived")) > i) missing_since = std::min(missing_since, now);
    const bool too_long = missing_since < now && now - missing_since >= kRecordTime;
    if (too_long || !all_live(std::exchange(rivals, {}))) {
      supersede();
      return false;
    }
  }
  return true;
}

// False: there is no room for this worker, and will be none. True: it has to look again. Throws
// Error(timeout) where neither is known at the deadline.
bool Rendezvous::in_time(const MemberRecord& self, const std::function<bool()>& too_late) {
  constexpr milliseconds kPollInterval{10};
  constexpr std::chrono::seconds kFoundingTime{2};
  // An elastic world may still wait for its first workers, and then there is room for more.
  const bool elastic = options_.world_size.is_elastic();
  auto asked = steady_clock::now();
  auto question = ask();
  bool looked = false;  // for a former life of this worker
  while (!too_late()) {
    const auto now = steady_clock::now();
    const auto waited = now - asked;
    if (!looked && waited >= kAnswerTime) {
      looked = true;
      if (former_life_is_silent(self, question)) {
        supersede();
        return true;
      }
    }
    const bool over = now >= deadline_;
    if (over || waited >= std::min<steady_clock::duration>(silent_time_, kFoundingTime)) {
      const bool all = all_have_answered(question);
      if (all && !elastic) return false;
      const bool silent =
          !all && (waited >= silent_time_ || (waited >= kAnswerTime && any_is_silent(question)));
      if (silent && (over || waited >= silent_time_)) supersede();
      if (over) {
        throw Error(ErrorCode::timeout, "worker \"" + self.name + "\" waited " +
                                            init_timeout_text() + " for a place in the world of " +
                                            options_.world_size.str() + " at " + store_.describe() +
                                            ", which is founded by: " + arrived_names() +
                                            (silent ? "; not all of them answer" : ""));
      }
      if (silent && waited >= silent_time_) return true;
      if (waited >= silent_time_) {
        asked = now;
        question = ask();
        looked = false;
      }
    }
    // The store tells of no change; what takes longer is looked for less often.
    std::this_thread::sleep_for(waited < kAnswerTime ? kPollInterval : kLookInterval);
  }
  return true;
}

// The worker that hosts the store keeps it until all that arrived have heard of it, for at most
// kGracePeriod. `error`: why this founding fails on all workers; those that start afterwards begin
// another. Null: only this one has no place in it.
void Rendezvous::tell_the_others(const Error* error) {
  constexpr std::chrono::seconds kGracePeriod{2};
  constexpr milliseconds kPollInterval{5};
  const auto give_up = std::min(deadline_, steady_clock::now() + kGracePeriod);
  try {
    store_.add(key("seen"), 1);  // how many have heard of it: this worker throws after this
    if (error != nullptr) {
      store_.set(key("failure"), to_refusal_text(*error));
      supersede();
    }
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

}  // namespace stitch::rpc
