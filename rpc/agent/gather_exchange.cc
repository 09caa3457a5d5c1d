#include "stitch/rpc/agent/gather_exchange.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <string_view>
#include <utility>

namespace stitch::rpc {

namespace {

// A key: the lives in the gathering, and its number among theirs.
struct Key {
  std::string_view names;  // with the blank behind each
  std::uint64_t number = 0;
};

std::string name_in_key(const WorkerInfo& life) {
  return life.name + '/' + std::to_string(life.epoch) + ' ';
}

std::optional<Key> read_key(std::string_view text) {
  const auto end = text.rfind('#');
  if (end == std::string_view::npos) return std::nullopt;
  Key key{text.substr(0, end)};
  const char* const last = text.data() + text.size();
  const auto read = std::from_chars(text.data() + end + 1, last, key.number);
  if (read.ec != std::errc() || read.ptr != last) return std::nullopt;
  return key;
}

bool names(const Key& key, const WorkerInfo& life) {
  const std::string name = name_in_key(life);
  return key.names.starts_with(name) || key.names.find(' ' + name) != std::string_view::npos;
}

// Names have one id each: equal without a look at them.
bool same_life(const WorkerInfo& a, const WorkerInfo& b) noexcept {
  return a.id == b.id && a.epoch == b.epoch;
}

void erase_life(std::vector<WorkerInfo>& lives, const WorkerInfo& life) noexcept {
  std::erase_if(lives, [&](const WorkerInfo& each) { return same_life(each, life); });
}

}  // namespace

void GatherExchange::start(const std::weak_ptr<base::EventLoop>& loop, std::weak_ptr<void> owner) {
  watch_ = std::make_shared<DeadlineWatch>(loop, [this, weak = std::move(owner)] {
    if (const auto alive = weak.lock()) expire(Clock::now());
  });
}

GatherExchange::Contributions::iterator GatherExchange::drop_if_done(
    Contributions::iterator at, Contributions& dropped) noexcept {
  const auto next = std::next(at);
  if (!at->second.done()) return next;
  dropped.insert(contributions_.extract(at));
  if (contributions_.empty()) fetched_.notify_all();
  return next;
}

GatherExchange::Set& GatherExchange::set_of(const std::string& names,
                                            const std::vector<WorkerInfo>& lives) {
  const auto found = sets_.find(names);
  if (found != sets_.end()) return found->second;
  std::erase_if(sets_, [&](const auto& each) {
    return std::ranges::any_of(each.second.lives, [&](const WorkerInfo& old) {
      const auto at = std::ranges::lower_bound(lives, old.name, {}, &WorkerInfo::name);
      return at != lives.end() && at->name == old.name && at->epoch > old.epoch;
    });
  });
  for (auto& each : sets_) each.second.passed += each.second.over ? 1 : 0;
  std::erase_if(sets_, [](const auto& each) { return each.second.passed > kSetsKept; });
  return sets_.try_emplace(names, Set{lives}).first->second;
}

void GatherExchange::fail(Fetches& fetches, const Error& why) noexcept {
  for (const Fetch& fetch : fetches) fetch.promise.set_error(why);
}

std::string GatherExchange::post(const std::vector<WorkerInfo>& lives, OwnedObject value,
                                 std::vector<WorkerInfo> others, Clock::time_point over) {
  std::string names;
  for (const auto& life : lives) names += name_in_key(life);
  std::string key;
  Contributions dropped;
  Fetches waiting;
  bool kept = false;
  {
    base::MutexLock lock(mutex_);
    Set& set = set_of(names, lives);
    key = names + '#' + std::to_string(set.next);
    if (closed_ || others.empty()) {
      ++set.next;
      return key;
    }
    const auto at = contributions_.try_emplace(key).first;
    ++set.next;
    Contribution& contribution = at->second;
    waiting.swap(contribution.waiting);
    contribution.value = value;
    contribution.posted = true;
    contribution.left = std::move(others);
    contribution.over = over;
    for (const Fetch& fetch : waiting) erase_life(contribution.left, fetch.from);
    kept = !contribution.done();
    drop_if_done(at, dropped);
  }
  for (const Fetch& fetch : waiting) fetch.promise.fulfil([&] { return value; });
  if (kept && watch_) watch_->watch(over);
  return key;
}

void GatherExchange::expire(Clock::time_point now) {
  Contributions over;
  Clock::time_point next = Clock::time_point::max();
  {
    base::MutexLock lock(mutex_);
    for (auto each = contributions_.begin(); each != contributions_.end();) {
      const auto at = each++;
      if (at->second.over <= now) {
        over.insert(contributions_.extract(at));
      } else {
        next = std::min(next, at->second.over);
      }
    }
    if (contributions_.empty()) fetched_.notify_all();
  }
  if (watch_) watch_->watch(next);
}

GatherExchange::Fetched GatherExchange::fetch(const std::string& key, const WorkerInfo& from) {
  const auto parts = read_key(key);
  if (!parts || !names(*parts, from)) {
    return {make_failed<OwnedObject>(
        Error(ErrorCode::invalid_argument, to_string(from) + " has no part in that gathering"))};
  }
  Contributions dropped;
  Fetches own;  // destroyed without the lock, too
  base::MutexLock lock(mutex_);
  if (closed_) return {make_failed<OwnedObject>(*closed_)};
  auto at = contributions_.find(key);
  if (at == contributions_.end()) {
    if (leaving_) return {make_failed<OwnedObject>(*leaving_)};
    const auto set = sets_.find(std::string(parts->names));
    if (set != sets_.end() && parts->number < set->second.next) {
      return {make_failed<OwnedObject>(Error(
          ErrorCode::timeout, "that worker has left gathering " + std::to_string(parts->number) +
                                  " of these workers long ago: its next one is gathering " +
                                  std::to_string(set->second.next)))};
    }
  }
  if (at == contributions_.end() || !at->second.posted) {
    Fetch& fetch = own.emplace_back(Fetch{from});
    Fetched fetched{fetch.promise.future(), ++fetches_};
    fetch.number = fetched.wait;
    if (at == contributions_.end()) at = contributions_.try_emplace(key).first;
    at->second.waiting.splice(at->second.waiting.end(), own);
    return fetched;
  }
  OwnedObject value = at->second.value;
  erase_life(at->second.left, from);
  drop_if_done(at, dropped);
  return {make_ready(std::move(value))};
}

void GatherExchange::stop_waiting(const std::string& key, std::uint64_t wait) noexcept {
  Fetches stopped;
  Contributions dropped;
  {
    base::MutexLock lock(mutex_);
    const auto at = contributions_.find(key);
    if (at == contributions_.end()) return;
    Fetches& waiting = at->second.waiting;
    const auto fetch = std::ranges::find(waiting, wait, &Fetch::number);
    if (fetch == waiting.end()) return;
    stopped.splice(stopped.end(), waiting, fetch);
    drop_if_done(at, dropped);
  }
  fail(stopped, stopped_);
}

void GatherExchange::on_lost(const WorkerInfo& life) noexcept {
  Fetches stopped;
  Contributions dropped;
  {
    base::MutexLock lock(mutex_);
    for (auto each = contributions_.begin(); each != contributions_.end();) {
      Fetches& waiting = each->second.waiting;
      for (auto at = waiting.begin(); at != waiting.end();) {
        const auto fetch = at++;
        if (same_life(fetch->from, life)) stopped.splice(stopped.end(), waiting, fetch);
      }
      erase_life(each->second.left, life);
      each = drop_if_done(each, dropped);
    }
    for (auto& [names, set] : sets_) {
      set.over = set.over || std::ranges::any_of(set.lives, [&](const WorkerInfo& each) {
                   return same_life(each, life);
                 });
    }
  }
  fail(stopped, stopped_);
}

std::vector<GatherExchange::Listed> GatherExchange::list() const {
  base::MutexLock lock(mutex_);
  std::vector<Listed> listed;
  for (const auto& [key, each] : contributions_)
    listed.push_back({key, each.posted, each.left.size(), each.waiting.size(), each.since});
  return listed;
}

std::size_t GatherExchange::size() const {
  base::MutexLock lock(mutex_);
  return contributions_.size();
}

void GatherExchange::leave(const Error& why, Clock::time_point deadline) {
  Fetches waiting;
  Contributions dropped;
  {
    base::MutexLock lock(mutex_);
    leaving_ = why;
    for (auto each = contributions_.begin(); each != contributions_.end();) {
      waiting.splice(waiting.end(), each->second.waiting);
      each = drop_if_done(each, dropped);
    }
  }
  fail(waiting, why);
  base::MutexLock lock(mutex_);
  while (!closed_ && !contributions_.empty() && Clock::now() < deadline)
    fetched_.wait_until(mutex_, deadline);
}

void GatherExchange::close(const Error& why) {
  Contributions contributions;
  {
    base::MutexLock lock(mutex_);
    closed_ = why;
    contributions.swap(contributions_);
    fetched_.notify_all();
  }
  for (auto& [key, contribution] : contributions) fail(contribution.waiting, why);
}

}  // namespace stitch::rpc
