#include "stitch/rpc/agent/gather_exchange.h"

#include <algorithm>
#include <iterator>

#include "stitch/base/hash.h"

namespace stitch::rpc {

namespace {

// The same on all workers.
std::uint64_t hash_of_lives(const std::vector<WorkerInfo>& lives) {
  std::uint64_t hash = lives.size();
  const auto mix = [&hash](std::uint64_t value) {
    hash = base::mix_bits(hash * 0x9e3779b97f4a7c15U + value + 1);
  };
  for (const auto& life : lives) {
    for (const char each : life.name) mix(static_cast<unsigned char>(each));
    mix(256);
    mix(life.epoch);
  }
  return hash;
}

// Names have one id each: equal without a look at them.
bool same_life(const WorkerInfo& a, const WorkerInfo& b) noexcept {
  return a.id == b.id && a.epoch == b.epoch;
}

}  // namespace

std::size_t GatherExchange::Gathering::count(std::size_t round) const noexcept {
  const std::size_t distance = std::size_t{1} << round;
  return std::min(distance, participants - distance);
}

void GatherExchange::Gathering::forget(const WorkerInfo& reader,
                                       std::optional<std::size_t> round) noexcept {
  std::erase_if(readers, [&](const auto& each) {
    return same_life(each.first, reader) && (!round || *round == each.second);
  });
}

void GatherExchange::Effects::carry_out() {
  for (auto& [promise, given] : answers) promise.set_value(std::move(given));
  for (auto& [key, gathering] : over) gathering.done.set_value(std::move(gathering.values));
  for (auto& [key, gathering] : failed) gathering.done.set_error(why);
}

GatherExchange::Begun GatherExchange::begin(const std::vector<WorkerInfo>& lives,
                                            const std::string& what, OwnedObject value) {
  const std::uint64_t hash = hash_of_lives(lives);
  const auto self = static_cast<std::size_t>(
      std::ranges::find_if(lives, [&](const auto& each) { return same_life(each, self_); }) -
      lives.begin());
  Effects effects;
  Begun begun;
  {
    base::MutexLock lock(mutex_);
    if (closed_) return {{}, {}, make_failed<Values>(*closed_)};
    Set& set = sets_[hash];
    set.used = ++uses_;
    begun.key = {hash, set.next++};
    const auto at = gatherings_.try_emplace(begun.key).first;
    Gathering& gathering = at->second;
    gathering.what = what;
    gathering.values.push_back(std::move(value));
    gathering.participants = lives.size();
    for (std::size_t distance = 1; distance < lives.size(); distance *= 2) {
      gathering.readers.emplace_back(lives[(self + distance) % lives.size()],
                                     gathering.sources.size());
      gathering.sources.push_back(lives[(self + lives.size() - distance) % lives.size()]);
    }
    begun.sources = gathering.sources;
    begun.done = gathering.done.future();
    proceed(at, effects);
    if (sets_.size() > kSetsKept) {
      sets_.erase(
          std::ranges::min_element(sets_, {}, [](const auto& each) { return each.second.used; }));
    }
  }
  effects.carry_out();
  return begun;
}

void GatherExchange::add(const Key& key, std::size_t round, Values values) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    const auto at = gatherings_.find(key);
    if (at == gatherings_.end() || !at->second.arrived()) return;
    Gathering& gathering = at->second;
    if (values.size() != gathering.count(round)) {
      const Error why(ErrorCode::protocol, to_string(gathering.sources[round]) + " has given " +
                                               std::to_string(values.size()) + " values where " +
                                               std::to_string(gathering.count(round)) +
                                               " were expected");
      fail(at, why, why, effects);
    } else {
      gathering.later.emplace(round, std::move(values));
      for (auto next = gathering.later.begin();
           next != gathering.later.end() && next->first == gathering.round;
           next = gathering.later.erase(next)) {
        std::ranges::move(next->second, std::back_inserter(gathering.values));
        ++gathering.round;
      }
      proceed(at, effects);
    }
  }
  effects.carry_out();
}

void GatherExchange::proceed(Gatherings::iterator at, Effects& effects) {
  Gathering& gathering = at->second;
  auto& waiting = gathering.waiting;
  for (auto next = waiting.begin(); gathering.arrived() && next != waiting.end();) {
    const auto fetch = next++;
    const bool fails = fetch->what != gathering.what ||
                       std::ranges::find(gathering.readers, std::pair(fetch->from, fetch->round)) ==
                           gathering.readers.end();
    if (!fails && fetch->round > gathering.round) continue;
    effects.answers.emplace_back(fetch->promise, answer(gathering, *fetch));
    gathering.forget(fetch->from, fetch->round);
    waiting.erase(fetch);
  }
  if (gathering.arrived() ? gathering.complete() && gathering.readers.empty() : waiting.empty())
    effects.over.insert(gatherings_.extract(at));
}

GatherExchange::Given GatherExchange::answer(const Gathering& gathering, const Fetch& fetch) const {
  if (fetch.what != gathering.what) {
    return {Error(ErrorCode::invalid_argument, to_string(self_) + " is in " + gathering.what +
                                                   ", " + to_string(fetch.from) + " in " +
                                                   fetch.what)
                .with_worker(self_.name)};
  }
  if (std::ranges::find(gathering.readers, std::pair(fetch.from, fetch.round)) ==
      gathering.readers.end()) {
    return {Error(ErrorCode::invalid_argument,
                  to_string(fetch.from) + " has no part in that round of the gathering")};
  }
  const auto count = static_cast<std::ptrdiff_t>(gathering.count(fetch.round));
  return {{}, Values(gathering.values.begin(), gathering.values.begin() + count)};
}

void GatherExchange::fail(Gatherings::iterator at, const Error& why, const Error& told,
                          Effects& effects) {
  for (Fetch& fetch : at->second.waiting) effects.answers.emplace_back(fetch.promise, Given{told});
  if (const auto set = sets_.find(at->first.set); at->second.arrived() && set != sets_.end())
    set->second.failed.emplace(at->first.number, told);
  effects.why = why;
  effects.failed.insert(gatherings_.extract(at));
}

void GatherExchange::fail(const Key& key, const Error& why) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    const auto at = gatherings_.find(key);
    if (at != gatherings_.end() && at->second.arrived()) fail(at, why, why, effects);
  }
  effects.carry_out();
}

bool GatherExchange::end(const Key& key) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    const auto at = gatherings_.find(key);
    if (at == gatherings_.end() || !at->second.complete()) return false;
    effects.over.insert(gatherings_.extract(at));
  }
  effects.carry_out();
  return true;
}

GatherExchange::Standing GatherExchange::standing(const Key& key) const {
  base::MutexLock lock(mutex_);
  const auto set = sets_.find(key.set);
  if (set != sets_.end() && set->second.failed && set->second.failed->first == key.number)
    return {set->second.failed->second, std::nullopt};
  const auto at = gatherings_.find(key);
  if (at == gatherings_.end() || !at->second.arrived() || at->second.complete()) return {};
  return {std::nullopt, at->second.sources[at->second.round]};
}

GatherExchange::Fetched GatherExchange::fetch(const Key& key, std::size_t round,
                                              const std::string& what, const WorkerInfo& from) {
  Effects effects;
  Fetched fetched;
  {
    base::MutexLock lock(mutex_);
    if (closed_) return {make_ready(Given{answer_when_closed_})};
    const auto set = sets_.find(key.set);
    if (set != sets_.end() && key.number < set->second.next && !gatherings_.contains(key)) {
      const auto& failed = set->second.failed;
      if (failed && failed->first == key.number) return {make_ready(Given{failed->second})};
      return {make_ready(
          Given{Error(ErrorCode::timeout,
                      to_string(self_) + " has left gathering " + std::to_string(key.number) +
                          " of these workers long ago: its next one is gathering " +
                          std::to_string(set->second.next))
                    .with_worker(self_.name)})};
    }
    const auto at = gatherings_.try_emplace(key).first;
    Fetch& fetch = at->second.waiting.emplace_back(Fetch{from, round, what, ++fetches_});
    fetched = {fetch.promise.future(), fetch.number};
    proceed(at, effects);
  }
  effects.carry_out();
  return fetched;
}

void GatherExchange::stop_waiting(const Key& key, std::uint64_t wait) noexcept {
  Effects effects;
  std::list<Fetch> stopped;
  {
    base::MutexLock lock(mutex_);
    const auto at = gatherings_.find(key);
    if (at == gatherings_.end()) return;
    auto& waiting = at->second.waiting;
    const auto fetch = std::ranges::find(waiting, wait, &Fetch::number);
    if (fetch == waiting.end()) return;
    at->second.forget(fetch->from, fetch->round);
    stopped.splice(stopped.end(), waiting, fetch);
    proceed(at, effects);
  }
  for (const Fetch& fetch : stopped)
    fetch.promise.set_error(Error(ErrorCode::cancelled, "its caller waits no more"));
  effects.carry_out();
}

void GatherExchange::on_lost(const WorkerInfo& life) noexcept {
  Effects effects;
  std::list<Fetch> stopped;
  {
    base::MutexLock lock(mutex_);
    for (auto next = gatherings_.begin(); next != gatherings_.end();) {
      const auto at = next++;
      auto& waiting = at->second.waiting;
      for (auto each = waiting.begin(); each != waiting.end();) {
        const auto fetch = each++;
        if (same_life(fetch->from, life)) stopped.splice(stopped.end(), waiting, fetch);
      }
      at->second.forget(life, std::nullopt);
      proceed(at, effects);
    }
  }
  for (const Fetch& fetch : stopped)
    fetch.promise.set_error(Error(ErrorCode::cancelled, "its caller waits no more"));
  effects.carry_out();
}

std::vector<GatherExchange::Listed> GatherExchange::list() const {
  base::MutexLock lock(mutex_);
  std::vector<Listed> listed;
  for (const auto& [key, each] : gatherings_) {
    listed.push_back({key, each.participants,
                      each.arrived() && !each.complete() ? each.sources[each.round].name : "",
                      each.arrived() ? each.readers.size() : each.waiting.size(), each.since});
  }
  return listed;
}

std::size_t GatherExchange::size() const {
  base::MutexLock lock(mutex_);
  return gatherings_.size();
}

void GatherExchange::close(const Error& why) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    if (closed_) return;
    closed_ = why;
    answer_when_closed_ = Error(ErrorCode::disconnected, "no answer from " + to_string(self_) +
                                                             ": " + std::string(why.what()))
                              .with_worker(self_.name);
    while (!gatherings_.empty()) fail(gatherings_.begin(), why, *answer_when_closed_, effects);
  }
  effects.carry_out();
}

}  // namespace stitch::rpc
