// Which requests of a PeerFlow wait for others of it, and for how long: see there.
#include <algorithm>
#include <limits>
#include <utility>

#include "stitch/rpc/agent/peer_flow.h"

namespace stitch::rpc {

bool PeerFlow::waits_behind(const Precedence& precedence) const {
  if (precedence.follows.empty()) return false;
  base::MutexLock lock(mutex_);
  return !order_.first(std::numeric_limits<std::uint64_t>::max(), precedence);
}

// Nothing has changed if this throws.
void PeerFlow::keep(Waiting& request) {
  const std::uint64_t id = request.id;
  const Size size = request.size;
  order_.add(id, request.precedence);
  const bool first = order_.first(id, request.precedence);
  const Rank rank = size.inside ? Rank::inside : Rank::program;
  Queue& queue = first ? queues_[static_cast<std::size_t>(rank)][size.small()] : followers_;
  Queue::iterator at;
  try {
    at = queue.try_emplace(id, std::move(request), rank).first;
  } catch (...) {  // before anything was moved
    order_.remove(id, request.precedence);
    throw;
  }
  if (first) {
    count_queued(size);
  } else if (size.inside) {
    lift(at->second);
  }
}

// What is inside must not wait for requests of the program that wait for room which others take
// that wait for it. What a lifted one follows was lifted with it, and what one inside follows,
// too.
void PeerFlow::lift(Entry& follower) noexcept {
  for (Entry* each = &follower; each != nullptr;) {
    Entry* rest = std::exchange(each->next, nullptr);
    for (const std::uint64_t key : each->request.precedence.follows) {
      std::uint64_t id = each->request.id;
      while ((id = order_.leader_before(key, id)) != 0) {
        Entry* const lifted = lift_one(id);
        if (lifted == nullptr) break;
        lifted->next = rest;
        rest = lifted;
      }
    }
    each = rest;
  }
}

// Null if it is none of the program, or is just being sent.
PeerFlow::Entry* PeerFlow::lift_one(std::uint64_t id) noexcept {
  for (Queue& queue : queues_[static_cast<std::size_t>(Rank::program)]) {
    if (auto found = queue.extract(id)) {
      Entry& lifted = found.mapped();  // it stays where it is in memory
      lifted.rank = Rank::lifted;
      queue_of(lifted).insert(std::move(found));
      return &lifted;
    }
  }
  const auto held = followers_.find(id);
  if (held == followers_.end() || held->second.rank != Rank::program) return nullptr;
  held->second.rank = Rank::lifted;
  return &held->second;
}

// A request that waited has begun, or never will.
void PeerFlow::let_follow(std::uint64_t id, const Precedence& precedence) noexcept {
  order_.remove(id, precedence);
  for (const std::uint64_t key : precedence.leads) {
    std::uint64_t next = 0;
    while ((next = order_.free_follower_after(key, next)) != 0) {
      const auto at = followers_.find(next);
      if (at == followers_.end() || !order_.first(next, at->second.request.precedence)) continue;
      auto free = followers_.extract(at);
      Queue& queue = queue_of(free.mapped());
      count_queued(free.mapped().request.size);
      queue.insert(std::move(free));
    }
  }
}

// ---- requests that refuse, while calls inside are held up

// All that is held up before it will have begun then.
bool PeerFlow::only_held(const Waiting& request) const {
  const Size& size = request.size;
  if (!held_back_ || !size.inside || !window_open(size)) return false;
  const Queue(&inside)[2] = queues_[static_cast<std::size_t>(Rank::inside)];
  const std::uint64_t used = used_.load();
  if (!has_room(size, (used >> kByteBits) + inside[0].size() + inside[1].size(),
                (used & kByteMask) + queued_inside_bytes_))
    return false;
  for (const std::uint64_t key : request.precedence.follows) {
    if (!leaders_only_held(key, request.id)) return false;
  }
  return true;
}

// Whether those of `key` that were made before `id` will have begun then, too. One that is in none
// of the queues is just being sent.
bool PeerFlow::leaders_only_held(std::uint64_t key, std::uint64_t id) const {
  while ((id = order_.leader_before(key, id)) != 0) {
    for (const Rank rank : {Rank::program, Rank::lifted}) {
      for (const Queue& queue : queues_[static_cast<std::size_t>(rank)]) {
        if (queue.contains(id)) return false;
      }
    }
    if (const auto at = followers_.find(id); at != followers_.end()) {
      const Waiting& leader = at->second.request;
      if (!leader.refuses) return false;
      // Those before it have been looked at when it was kept.
      const auto& follows = leader.precedence.follows;
      if (std::find(follows.begin(), follows.end(), key) != follows.end()) return true;
    }
  }
  return true;
}

bool PeerFlow::begins_now(const Waiting& request) noexcept {
  const Size& size = request.size;
  if (waits_before(size) || !order_.first(request.id, request.precedence) || !take(size))
    return false;
  if (size.inside) used_inside_.fetch_add(packed(size));
  return true;
}

void PeerFlow::refuse_one(Queue& from, Queue::iterator at, Queue& refused) noexcept {
  const std::size_t cost = at->second.request.size.cost();
  waiting_bytes_[1] -= cost;
  if (&from != &followers_) {
    queued_inside_bytes_ -= cost;
    waiting_.fetch_sub(kInside);
  }
  refused.insert(from.extract(at));
}

void PeerFlow::refuse_all(Queue& from, Queue& refused) noexcept {
  for (auto at = from.begin(); at != from.end();) {
    const auto each = at++;
    Waiting& request = each->second.request;
    if (request.refused) {
      refuse_one(from, each, refused);
    } else {
      request.refuses = false;  // it waits for room from now on
    }
  }
}

bool PeerFlow::refuse_held(Queue& refused) noexcept {
  Queue(&inside)[2] = queues_[static_cast<std::size_t>(Rank::inside)];
  const std::uint64_t used = used_.load();
  Queue* full = nullptr;
  for (Queue& queue : inside) {
    if (queue.empty() || has_room(queue.begin()->second.size(), used)) continue;
    if (full == nullptr || queue.begin()->first < full->begin()->first) full = &queue;
  }
  // Until some are written.
  if (full == nullptr && (!inside[0].empty() || !inside[1].empty())) return false;
  Queue out;
  const bool first = full != nullptr && full->begin()->second.request.refused;
  if (first) {
    refuse_one(*full, full->begin(), out);
  } else {
    // What is older than it has room, and begins once more is written.
    for (const Queue& queue : inside) {
      if (full != nullptr && !queue.empty() && queue.begin()->first < full->begin()->first)
        return false;
    }
    // Those behind it wait for room, too, or for one of the program.
    held_back_ = false;
    for (Queue* queue : {&inside[0], &inside[1], &followers_}) refuse_all(*queue, out);
  }
  for (const auto& [id, entry] : out) let_follow(id, entry.request.precedence);
  refused.merge(out);
  return first;
}

void PeerFlow::tell(Queue& refused) noexcept {
  for (auto& [id, entry] : refused) {
    try {
      entry.request.refused();
    } catch (...) {
      // It has told who waits for it.
    }
  }
  refused.clear();
}

// ---- threads of the program that wait for room

bool PeerFlow::may_wait(const Size& size, std::uint64_t used) const noexcept {
  const std::size_t bytes = waiting_bytes_[size.inside] + (size.inside ? 0 : used & kByteMask);
  return given_up_ || bytes == 0 || bytes + size.cost() <= limits_.bytes;
}

PeerFlow::Kept PeerFlow::await_turn(const Waiting& request, Clock::time_point deadline,
                                    const std::function<bool()>& wanted) {
  std::list<const Waiting*> own{&request};
  const auto place = own.begin();
  blocked_.splice(blocked_.end(), own);
  Clock::time_point looked = Clock::now();
  Kept turn = Kept::waits;
  while (!given_up_ && (blocked_.front() != &request || !may_wait(request.size, used_.load()))) {
    room_.wait_until(mutex_, std::min(deadline, Clock::now() + kLook));
    const bool first = blocked_.front() == &request;
    mutex_.unlock();
    const Clock::time_point now = Clock::now();
    if (first && now - looked >= kLook) {
      looked = now;
      static_cast<void>(look(now));
    }
    if (now >= deadline) {
      turn = Kept::late;
    } else if (!wanted()) {
      turn = Kept::unwanted;
    }
    mutex_.lock();
    if (turn != Kept::waits) break;
  }
  own.splice(own.end(), blocked_, place);
  if (!blocked_.empty()) room_.notify_all();  // the next one is first now
  return turn;
}

// ---- calls inside that keep one of the program waiting

namespace {
// How long calls inside still have to wait for one that they have overtaken for that time.
PeerFlow::Clock::duration hold_left(PeerFlow::Clock::duration overtaken) {
  PeerFlow::Clock::duration window = PeerFlow::kOvertaken;
  PeerFlow::Clock::duration in_window = overtaken - window;
  while (in_window.count() >= 0) {
    if (in_window < window) return window - in_window;
    in_window -= 2 * window;
    window = std::min<PeerFlow::Clock::duration>(2 * window, PeerFlow::kLongestHold);
  }
  return {};
}
}  // namespace

const PeerFlow::Entry* PeerFlow::first_outside() const {
  const Entry* first = nullptr;
  for (const Rank rank : {Rank::lifted, Rank::program}) {
    for (const Queue& queue : queues_[static_cast<std::size_t>(rank)]) {
      if (queue.empty()) continue;
      const Entry& its = queue.begin()->second;
      if (first == nullptr || its.request.id < first->request.id) first = &its;
    }
  }
  return first;
}

// What the peer has handled does not say which one-way ones it was. So those up to the last one
// inside count as inside until as many are handled.
std::uint64_t PeerFlow::used_outside() const {
  std::uint64_t inside = used_inside_.load();
  const auto without = [](std::uint64_t all, std::uint64_t part) {
    return all - std::min(all, part);  // they are not of one instant
  };
  if (const std::uint64_t calls = without(one_way_inside_.calls, returned_.calls); calls != 0) {
    // The bytes may be those of later ones that were handled first.
    const std::uint64_t bytes = without(one_way_inside_.bytes, returned_.bytes);
    inside += packed(bytes + calls * kCallBytes, calls);
  }
  const std::uint64_t used = used_.load();
  return packed(without(used & kByteMask, inside & kByteMask),
                without(used >> kByteBits, inside >> kByteBits));
}

void PeerFlow::hold_inside(bool hold) noexcept {
  if (hold == std::exchange(holds_inside_, hold)) return;
  if (hold) {
    held_back_ = true;
    waiting_.fetch_add(kInside);
    holds_[holds_made_++ % kHolds] = {Clock::now(), Clock::time_point::max(), overtaken_bytes_,
                                      overtaken_since_};
  } else {
    waiting_.fetch_sub(kInside);
    holds_[(holds_made_ - 1) % kHolds].until = Clock::now();
  }
}

PeerFlow::HeldUp PeerFlow::held_up(Clock::time_point from, Clock::time_point until) const {
  HeldUp held;
  base::MutexLock lock(mutex_);
  for (std::size_t i = holds_made_ - std::min(holds_made_, kHolds); i != holds_made_; ++i) {
    const Hold& hold = holds_[i % kHolds];
    const Clock::time_point end = std::min(until, hold.until);
    const Clock::duration time = end - std::max(from, hold.since);
    if (time.count() <= 0) continue;
    held = {held.time + time, hold.bytes, end - hold.overtaken_since};
  }
  return held;
}

bool PeerFlow::look(Clock::time_point now) noexcept {
  if (waiting_.load() == 0) return false;
  bool waits = false;
  {
    base::MutexLock lock(mutex_);
    const std::uint64_t used = used_.load();
    const std::uint64_t outside = used_outside();
    std::uint64_t id = 0;
    std::size_t bytes = 0;
    bool overtaken = false;
    if (const Entry* first = first_outside()) {
      id = first->request.id;
      bytes = first->request.size.bytes;
      const Size size = first->size();
      const Queue(&inside)[2] = queues_[static_cast<std::size_t>(Rank::inside)];
      const bool behind = !inside[0].empty() || !inside[1].empty();
      overtaken = has_room(size, outside) && (behind || !has_room(size, used));
    } else if (!blocked_.empty()) {
      id = blocked_.front()->id;
      const Size& size = blocked_.front()->size;
      bytes = size.bytes;
      overtaken = may_wait(size, outside) && !may_wait(size, used);
    }
    waits = id != 0;
    if (id != overtaken_) end_wait(overtaken_);
    if (overtaken && overtaken_ == 0) {
      overtaken_ = id;
      overtaken_bytes_ = bytes;
      overtaken_since_ = now;
    }
    const auto left = overtaken ? hold_left(now - overtaken_since_) : Clock::duration(0);
    held_until_ = now + left;
    hold_inside(left.count() > 0);
  }
  pump();
  return waits;
}

}  // namespace stitch::rpc
