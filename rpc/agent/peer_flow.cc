#include "stitch/rpc/agent/peer_flow.h"

#include <algorithm>
#include <limits>
#include <new>

#include "stitch/base/freed_memory.h"

namespace stitch::rpc {

namespace {
constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
// Bytes: sums of some messages do not leave their bits.
constexpr std::size_t kMaxBytes = std::size_t{1} << 40;
}  // namespace

PeerFlow::PeerFlow(const Limits& limits)
    : limits_{std::min(limits.bytes, kMaxBytes),
              std::clamp<std::size_t>(limits.calls, 1, kMaxCalls)},
      tell_at_(kNever) {}

bool PeerFlow::has_room(const Size& size, std::uint64_t calls, std::uint64_t bytes) const noexcept {
  if (calls >= (size.inside ? 2 * limits_.calls : limits_.calls)) return false;
  return bytes == 0 || bytes + size.cost() <= (size.inside ? limits_.bytes : limits_.bytes / 2);
}

std::size_t PeerFlow::counted(std::size_t bytes, std::size_t beside) const noexcept {
  const std::size_t half = limits_.bytes / 2;
  const std::size_t most = half > kCallBytes ? half - kCallBytes : 0;
  return std::max(bytes, std::min(bytes + std::min(beside, kMaxBytes), most));
}

// The window of the transport is looked at first: it changes by itself, and pump() is called then.
bool PeerFlow::take(const Size& size) noexcept {
  if (!window_open(size)) return false;
  const std::uint64_t before = used_.fetch_add(packed(size));
  if (!has_room(size, before)) {
    used_.fetch_sub(packed(size));
    return false;
  }
  (size.small() ? unwritten_small_ : unwritten_large_).fetch_add(size.bytes);
  return true;
}

bool PeerFlow::window_open(const Size& size) const noexcept {
  const auto& unwritten = size.small() ? unwritten_small_ : unwritten_large_;
  return unwritten.load(std::memory_order_relaxed) <= (size.small() ? kSmallWindow : kLargeWindow);
}

PeerFlow::Kept PeerFlow::wait(Waiting& request, Clock::time_point deadline,
                              const std::function<bool()>& wanted) {
  const Size size = request.size;
  const std::size_t cost = size.cost();
  const bool always = request.always_kept;
  base::MutexLock lock(mutex_);
  if (size.inside && !always && holds_inside_ && waiting_bytes_[1] != 0 &&
      waiting_bytes_[1] + cost > limits_.bytes / 2 && (!request.refuses || only_held(request))) {
    hold_inside(false);
    lock.unlock();
    pump();
    lock.lock();
  }
  if (request.refuses && !only_held(request)) {
    const bool begins = begins_now(request);  // what it was held up for may be over
    lock.unlock();
    if (begins) send(request);
    pump();
    return begins ? Kept::waits : Kept::full;
  }
  if (size.inside && !always && !may_wait(size, used_.load())) return Kept::full;
  const std::size_t counted = waiting_bytes_[0] + waiting_bytes_[1] + (used_.load() & kByteMask);
  if (!size.inside && counted + cost > limits_.bytes / 4 * 3) {
    // The program has freed what was under way, not always in a form that it can use again: before
    // there is no room, since several that end at once make some for as many new ones.
    lock.unlock();
    base::return_freed_memory();
    lock.lock();
  }
  // Until it is kept, or has gone, none that is made after it begins.
  struct Counted {
    std::atomic<std::uint64_t>* waiting = nullptr;
    ~Counted() {
      if (waiting != nullptr) waiting->fetch_sub(1);
    }
  } counted_as_waiting;
  Kept turn = Kept::waits;
  if (!size.inside && !always && (!blocked_.empty() || !may_wait(size, used_.load()))) {
    waiting_.fetch_add(1);  // first: who makes room looks at it afterwards
    counted_as_waiting.waiting = &waiting_;
    turn = await_turn(request, deadline, wanted);
  }
  if (turn == Kept::waits) {
    try {
      keep(request);
    } catch (...) {
      end_wait(request.id);
      lock.unlock();
      pump();  // calls inside may have been held for it
      throw;
    }
    waiting_bytes_[size.inside] += cost;
  } else {
    end_wait(request.id);
  }
  lock.unlock();
  pump();
  return turn;
}

PeerFlow::Waiting PeerFlow::extract(Queue& queue, Queue::iterator at) {
  Waiting request = std::move(at->second.request);
  queue.erase(at);
  waiting_bytes_[request.size.inside] -= request.size.cost();
  if (request.size.inside && &queue != &followers_) queued_inside_bytes_ -= request.size.cost();
  end_wait(request.id);
  return request;
}

// The request that was made first goes first, but one whose window is full does not keep those of
// the other window.
std::optional<PeerFlow::Waiting> PeerFlow::next_of(Rank rank) {
  Queue(&queues)[2] = queues_[static_cast<std::size_t>(rank)];
  const bool small_first =
      !queues[1].empty() &&
      (queues[0].empty() || queues[1].begin()->first < queues[0].begin()->first);
  for (const bool small : {small_first, !small_first}) {
    Queue& queue = queues[small];
    if (queue.empty()) continue;
    const Entry& first = queue.begin()->second;
    const Size size = first.size();
    if (given_up_ || take(size)) {
      if (first.request.size.inside) used_inside_.fetch_add(packed(size));
      if (given_up_) {
        used_.fetch_add(packed(size));
        (small ? unwritten_small_ : unwritten_large_).fetch_add(size.bytes);
      }
      return extract(queue, queue.begin());
    }
    if (!has_room(size, used_.load())) return std::nullopt;  // others must not take it
  }
  return std::nullopt;
}

std::optional<PeerFlow::Waiting> PeerFlow::next(Queue& refused) {
  for (const Rank rank : {Rank::inside, Rank::lifted}) {
    if (rank == Rank::inside && holds_inside_ && !given_up_) {
      // Barriers and the like are small and few.
      for (Queue& queue : queues_[static_cast<std::size_t>(rank)]) {
        const auto kept = std::find_if(queue.begin(), queue.end(), [](const auto& each) {
          return each.second.request.always_kept;
        });
        if (kept == queue.end() || !take(kept->second.size())) continue;
        used_inside_.fetch_add(packed(kept->second.size()));
        return extract(queue, kept);
      }
      continue;
    }
    auto request = next_of(rank);
    while (!request && rank == Rank::inside && held_back_ && refuse_held(refused))
      request = next_of(rank);
    if (request) return request;
    // One that has no room would starve while others take the place of those that end.
    for (const Queue& queue : queues_[static_cast<std::size_t>(rank)]) {
      if (!queue.empty() && !has_room(queue.begin()->second.size(), used_.load()))
        return std::nullopt;
    }
  }
  return next_of(Rank::program);
}

// One thread at a time, so that requests keep their order.
void PeerFlow::pump() noexcept {
  base::MutexLock lock(mutex_);
  if (!blocked_.empty()) room_.notify_all();
  // Should look() not have been called.
  if (holds_inside_ && Clock::now() >= held_until_) hold_inside(false);
  if (pumping_) {
    pump_again_ = true;
    return;
  }
  pumping_ = true;
  for (;;) {
    pump_again_ = false;
    Queue refused;
    std::optional<Waiting> request = next(refused);
    if (!request && refused.empty()) {
      if (pump_again_) continue;
      break;
    }
    lock.unlock();
    tell(refused);
    if (!request) {
      lock.lock();
      continue;
    }
    const Size size = request->size;
    const std::uint64_t id = request->id;
    const Precedence precedence = std::move(request->precedence);
    send(*request);
    request.reset();
    lock.lock();
    // After it was sent: until then later ones wait.
    let_follow(id, precedence);
    waiting_.fetch_sub(units(size));
    if (!blocked_.empty()) room_.notify_all();
  }
  pumping_ = false;
}

void PeerFlow::send(Waiting& request) noexcept {
  const Size size = request.size;
  bool sent = false;
  try {
    sent = request.go();
  } catch (...) {
    // It has told who waits for it.
  }
  request.go = nullptr;  // its message is freed before its room
  if (sent) return;
  uncount(size);
  (size.small() ? unwritten_small_ : unwritten_large_).fetch_sub(size.bytes);
}

void PeerFlow::drop(std::uint64_t id) {
  std::optional<Waiting> dropped;  // destroyed without the lock
  {
    base::MutexLock lock(mutex_);
    for (auto& queues : queues_) {
      for (Queue& queue : queues) {
        const auto at = queue.find(id);
        if (at == queue.end()) continue;
        dropped = extract(queue, at);
        let_follow(id, dropped->precedence);
        waiting_.fetch_sub(units(dropped->size));
      }
    }
    if (const auto at = followers_.find(id); at != followers_.end()) {
      dropped = extract(followers_, at);
      let_follow(id, dropped->precedence);
    }
    if (!blocked_.empty()) room_.notify_all();
  }
  if (!dropped) return;
  dropped.reset();
  pump();  // it may have been the first
}

void PeerFlow::give_up() noexcept {
  {
    base::MutexLock lock(mutex_);
    given_up_ = true;
  }
  pump();
  pump_replies();
  pump_frames();
  unpark();
}

// ---- one-way requests

std::uint64_t PeerFlow::one_way_begun(const Size& size) {
  base::MutexLock lock(mutex_);
  ++one_way_calls_;
  one_way_bytes_ += size.bytes;
  if (size.inside) {  // what is given back does not say which ones it was
    used_inside_.fetch_sub(packed(size));
    one_way_inside_ = {one_way_calls_, one_way_bytes_};
  }
  const std::size_t bytes = one_way_bytes_ - returned_.bytes + outstanding_calls() * kCallBytes;
  const bool many = outstanding_calls() > limits_.calls / 8 || bytes > limits_.bytes / 8;
  return many && asked_for_ == 0 ? asked_for_ = one_way_calls_ : 0;
}

std::uint64_t PeerFlow::to_ask() {
  base::MutexLock lock(mutex_);
  return outstanding_calls() > 0 && asked_for_ == 0 ? asked_for_ = one_way_calls_ : 0;
}

void PeerFlow::one_way_failed(const Size& size) noexcept {
  {
    base::MutexLock lock(mutex_);
    // A peer that has given back more than it got has given this back, too.
    if (outstanding_calls() == 0 || one_way_bytes_ - returned_.bytes < size.bytes) return;
    --one_way_calls_;
    one_way_bytes_ -= size.bytes;
    one_way_inside_.calls = std::min(one_way_inside_.calls, one_way_calls_);
    one_way_inside_.bytes = std::min(one_way_inside_.bytes, one_way_bytes_);
    if (size.inside) used_inside_.fetch_add(packed(size));  // for end()
  }
  end(size);
}

std::uint64_t PeerFlow::given_back(const Handled& handled) {
  std::uint64_t ask = 0;
  {
    base::MutexLock lock(mutex_);
    // The peer says what it likes: no more is given back than was taken.
    Handled now{std::clamp(handled.calls, returned_.calls, one_way_calls_),
                std::clamp(handled.bytes, returned_.bytes, one_way_bytes_)};
    if (now.calls == one_way_calls_) now.bytes = one_way_bytes_;
    const std::uint64_t calls = now.calls - returned_.calls;
    used_.fetch_sub(packed(now.bytes - returned_.bytes + calls * kCallBytes, calls));
    returned_ = now;
    if (now.calls >= asked_for_) {
      asked_for_ = 0;
      // More has been sent meanwhile: while something waits, for that too.
      if (waiting_.load() != 0 && outstanding_calls() > 0) ask = asked_for_ = one_way_calls_;
    }
  }
  pump();
  return ask;
}

std::optional<PeerFlow::Handled> PeerFlow::handled(std::size_t bytes) noexcept {
  handled_bytes_.fetch_add(bytes);
  const std::uint64_t calls = handled_calls_.fetch_add(1) + 1;
  if (calls < tell_at_.load()) return std::nullopt;
  base::MutexLock lock(mutex_);
  if (calls < tell_at_.load()) return std::nullopt;
  const Handled now{handled_calls_.load(), handled_bytes_.load()};
  tell_at_ = now.calls >= told_until_
                 ? kNever
                 : now.calls + std::max<std::uint64_t>(1, (told_until_ - now.calls) / 8);
  return now;
}

PeerFlow::Handled PeerFlow::asked(std::uint64_t calls) {
  base::MutexLock lock(mutex_);
  told_until_ = calls;
  // Set before the count is read: who counts reads it afterwards.
  tell_at_ = 0;
  const Handled now{handled_calls_.load(), handled_bytes_.load()};
  tell_at_ = now.calls >= told_until_
                 ? kNever
                 : now.calls + std::max<std::uint64_t>(1, (told_until_ - now.calls) / 8);
  return now;
}

// ---- requests of the peer

const char* PeerFlow::hold(std::size_t bytes) noexcept {
  const std::uint64_t before = held_.fetch_add(packed(bytes + kCallBytes));
  const std::uint64_t held = before & kByteMask;
  if (bytes > limits_.bytes || (held != 0 && held + bytes + kCallBytes > limits_.bytes))
    return kBytesName;
  return before >> kByteBits >= 2 * limits_.calls ? "max_inflight_calls" : nullptr;
}

PeerFlow::Numbers PeerFlow::numbers() const {
  Numbers numbers;
  const std::uint64_t used = used_.load();
  const std::uint64_t held = held_.load();
  numbers.calls = used >> kByteBits;
  numbers.bytes = used & kByteMask;
  numbers.unwritten_bytes = unwritten_small_.load() + unwritten_large_.load();
  numbers.held_calls = held >> kByteBits;
  numbers.held_bytes = (held & kByteMask) - numbers.held_calls * kCallBytes;
  numbers.data_bytes = data_bytes_.load();
  numbers.frame_bytes = frames_unwritten_.load();
  base::MutexLock lock(mutex_);
  for (const auto& queues : queues_) {
    for (const Queue& queue : queues) numbers.waiting += queue.size();
  }
  numbers.waiting += followers_.size();
  numbers.waiting_bytes = waiting_bytes_[0] + waiting_bytes_[1];
  numbers.waiting_frames = frames_.size();
  numbers.waiting_frame_bytes = waiting_frame_bytes_.load();
  return numbers;
}

}  // namespace stitch::rpc
