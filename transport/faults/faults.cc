#include "stitch/transport/faults/faults.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "stitch/base/thread_id.h"

namespace stitch::transport {

namespace {

// The finalizer of splitmix64: every bit of the result depends on every bit of `x`.
std::uint64_t mix(std::uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

// FNV-1a: the same on every machine, unlike std::hash.
std::uint64_t hash_name(std::string_view name) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

struct Judges {
  std::atomic<bool> expected{false};
  std::atomic<std::uint64_t> messages{0};
  base::Mutex mutex;
  std::shared_ptr<const Faults::Judge> judge STITCH_GUARDED_BY(mutex);
};
Judges& judges() noexcept {
  static auto* const judges = new Judges;  // connections may outlive static objects
  return *judges;
}

void end_process(bool kill) noexcept { ::kill(::getpid(), kill ? SIGKILL : SIGSTOP); }

}  // namespace

std::shared_ptr<Faults> Faults::make(FaultPlan plan, std::string self, std::uint64_t epoch,
                                     std::uint32_t id) {
  return std::shared_ptr<Faults>(new Faults(std::move(plan), std::move(self), epoch, id),
                                 [](Faults* faults) {
                                   // The last reference may be one of its own thread, which cannot
                                   // wait for itself.
                                   if (faults->thread_id_.load() == base::this_thread_id()) {
                                     std::thread([faults] { delete faults; }).detach();
                                   } else {
                                     delete faults;
                                   }
                                 });
}

void Faults::expect_judges() noexcept { judges().expected.store(true); }
bool Faults::judges_expected() noexcept { return judges().expected.load(); }

void Faults::set_judge(Judge judge) {
  // After the swap: the former judge, destroyed after the lock is released.
  auto shared = judge ? std::make_shared<const Judge>(std::move(judge)) : nullptr;
  base::MutexLock lock(judges().mutex);
  judges().judge.swap(shared);
}

Fate Faults::judge(std::uint32_t from, std::uint32_t to, const Message& message) {
  std::shared_ptr<const Judge> judge;
  {
    base::MutexLock lock(judges().mutex);
    judge = judges().judge;
  }
  const std::uint64_t sequence = judges().messages.fetch_add(1);
  return judge ? (*judge)(from, to, sequence, message) : Fate{};
}

Faults::Faults(FaultPlan plan, std::string self, std::uint64_t epoch, std::uint32_t id)
    : plan_(std::move(plan)), self_(std::move(self)), epoch_(epoch), id_(id) {
  thread_.post([this] { thread_id_.store(base::this_thread_id()); });
  for (const auto& each : plan_.strikes) {
    if (!is_for_this_life(each) || each.at != FaultPlan::Strike::At::time) continue;
    thread_.post_at(begin_ + each.time, [kill = each.kill] { end_process(kill); });
  }
}

bool Faults::spares_this_life() const noexcept {
  bool named = false;
  for (const auto& each : plan_.strikes) {
    if (is_for_this_life(each)) return false;
    named = named || each.worker == self_;
  }
  return named;
}

double Faults::Dice::roll(std::uint64_t n, std::uint32_t which) const noexcept {
  const std::uint64_t bits = mix(state ^ mix(n * 8 + which));
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

Faults::Dice Faults::next_connection(std::string_view peer) {
  std::uint64_t number = 0;
  {
    base::MutexLock lock(mutex_);
    const auto found = connections_.try_emplace(std::string(peer), 0).first;
    number = found->second++;
  }
  return {mix(plan_.seed) ^ mix(hash_name(self_)) ^ mix(mix(hash_name(peer)) + number)};
}

Faults::Clock::time_point Faults::deliverable(std::string_view peer, Clock::time_point now) const {
  Clock::time_point when = now;
  for (const auto& partition : plan_.partitions) {
    if (!partition.between(self_, peer) || now - begin_ < partition.from) continue;
    if (partition.until == FaultPlan::Duration::max()) return Clock::time_point::max();
    when = std::max(when, begin_ + partition.until);
  }
  return when;
}

void Faults::strike(FaultPlan::Strike::At at, std::uint64_t count) noexcept {
  for (const auto& each : plan_.strikes) {
    if (each.at == at && each.count == count && is_for_this_life(each)) end_process(each.kill);
  }
}

}  // namespace stitch::transport
