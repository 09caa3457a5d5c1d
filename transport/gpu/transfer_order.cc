#include "stitch/transport/gpu/transfer_order.h"

#include <algorithm>
#include <string>

#include "stitch/base/error.h"

namespace stitch::transport::gpu {
namespace {

std::string named(std::uint64_t number) { return "transfer " + std::to_string(number); }

}  // namespace

TransferOrder::PairState* TransferOrder::find(Pair pair) {
  const auto at = pairs_.find(pair);
  return at == pairs_.end() ? nullptr : &at->second;
}

void TransferOrder::check_clock(std::uint64_t clock, const char* frame) const {
  if (clock == 0 || clock > kMaxClock || (clock > clock_ && clock - clock_ > kMaxClockStep)) {
    throw Error(ErrorCode::protocol, std::string(frame) + " has clock value " +
                                         std::to_string(clock) + ", the clock here is at " +
                                         std::to_string(clock_));
  }
}

void TransferOrder::add_pair(Pair pair, End end, std::uint64_t source) {
  pairs_.try_emplace(pair, PairState{end, source, {}});
}

std::vector<std::uint64_t> TransferOrder::drop_pair(Pair pair) {
  std::vector<std::uint64_t> left;
  const auto at = pairs_.find(pair);
  if (at == pairs_.end()) return left;
  for (const auto& [number, key] : at->second.keys) {
    pending_.erase({key, pair});
    left.push_back(number);
  }
  pairs_.erase(at);
  return left;
}

std::optional<std::uint64_t> TransferOrder::announce(Pair pair, std::uint64_t number, Time now) {
  PairState* const state = find(pair);
  if (state == nullptr || clock_ >= kMaxClock - 1) return std::nullopt;
  ++clock_;
  const Key key{clock_, state->source, number};
  state->keys.emplace(number, key);
  pending_.emplace(Place{key, pair}, Entry{false, now});
  return key.clock;
}

std::optional<std::uint64_t> TransferOrder::accept(Pair pair, std::uint64_t number,
                                                   std::uint64_t clock) {
  PairState* const state = find(pair);
  if (state == nullptr) return std::nullopt;
  if (state->end != End::destination) {
    throw Error(ErrorCode::protocol, named(number) + " is announced against its pair's direction");
  }
  check_clock(clock, "RTS");
  if (state->keys.contains(number)) {
    throw Error(ErrorCode::protocol, named(number) + " is announced twice");
  }
  if (std::max(clock_, clock) >= kMaxClock) return std::nullopt;
  clock_ = std::max(clock_, clock) + 1;
  const Key key{clock_, state->source, number};
  state->keys.emplace(number, key);
  pending_.emplace(Place{key, pair}, Entry{true, Time()});
  return key.clock;
}

bool TransferOrder::agree(Pair pair, std::uint64_t number, std::uint64_t clock) {
  PairState* const state = find(pair);
  if (state == nullptr) return false;
  const auto key = state->keys.find(number);
  if (state->end != End::source || key == state->keys.end()) {
    throw Error(ErrorCode::protocol, "CTS for " + named(number) + ", which waits for none");
  }
  const auto place = pending_.find({key->second, pair});
  if (place->second.final) throw Error(ErrorCode::protocol, "second CTS for " + named(number));
  check_clock(clock, "CTS");
  if (clock <= key->second.clock) {
    throw Error(ErrorCode::protocol, "CTS for " + named(number) + " has clock value " +
                                         std::to_string(clock) + ", its RTS had " +
                                         std::to_string(key->second.clock));
  }
  pending_.erase(place);
  clock_ = std::max(clock_, clock);
  key->second.clock = clock;
  pending_.emplace(Place{key->second, pair}, Entry{true, Time()});
  return true;
}

bool TransferOrder::withdraw(Pair pair, std::uint64_t number) {
  PairState* const state = find(pair);
  if (state == nullptr || state->end != End::source) return false;
  const auto key = state->keys.find(number);
  if (key == state->keys.end()) return false;
  const auto place = pending_.find({key->second, pair});
  if (place->second.final) return false;
  pending_.erase(place);
  state->keys.erase(key);
  return true;
}

std::optional<TransferOrder::Launch> TransferOrder::launch() {
  if (pending_.empty()) return std::nullopt;
  const auto first = pending_.begin();
  if (!first->second.final) return std::nullopt;
  if (launched_ >= limits_.launched) return std::nullopt;
  const Launch launch{first->first.pair, first->first.key};
  auto& of_pair = launched_by_pair_[launch.pair];
  if (of_pair >= limits_.launched_by_pair) return std::nullopt;
  ++of_pair;
  ++launched_;
  pairs_.at(launch.pair).keys.erase(launch.key.number);
  pending_.erase(first);
  return launch;
}

void TransferOrder::finish(Pair pair) {
  const auto of_pair = launched_by_pair_.find(pair);
  if (--of_pair->second == 0) launched_by_pair_.erase(of_pair);
  --launched_;
}

std::vector<TransferOrder::Pair> TransferOrder::overdue(Time time) const {
  std::vector<Pair> pairs;
  for (const auto& [place, entry] : pending_) {
    if (!entry.final && entry.announced <= time) pairs.push_back(place.pair);
  }
  std::sort(pairs.begin(), pairs.end());
  pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
  return pairs;
}

}  // namespace stitch::transport::gpu
