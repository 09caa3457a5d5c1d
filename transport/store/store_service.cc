#include "stitch/transport/store/store_service.h"

#include <algorithm>
#include <iterator>
#include <memory>

namespace stitch::transport {

namespace {

// Of one client: more than any worker has, and what keeps one from using up all.
constexpr std::size_t kMaxWaits = 64;
constexpr std::size_t kMaxClaims = 64;

// Of memory, roughly, with what the containers add.
std::size_t cost_of(const std::string& key, std::size_t value_bytes) {
  constexpr std::size_t kOther = 128;
  return kOther + key.size() + value_bytes;
}

void check_less(std::size_t count, std::size_t limit, const char* what) {
  if (count < limit) return;
  throw Error(ErrorCode::overloaded,
              "a client cannot have more than " + std::to_string(limit) + ' ' + what);
}

}  // namespace

std::vector<StoreService::Reply> StoreService::serve(Client client, const StoreRequest& request) {
  std::vector<Reply> replies;
  const auto& key = request.key;
  switch (request.operation) {
    case StoreOperation::stop_waiting:
      stop_waiting(client, static_cast<std::uint64_t>(request.count), replies);
      return replies;
    case StoreOperation::release: {
      std::vector<std::string>& mine = claimed_[client];
      if (std::erase(mine, key) > 0) take(0, cost_of(key, map_.release(key)));
      return replies;
    }
    default:
      break;
  }
  StoreReply reply;
  try {
    if (request.operation == StoreOperation::get || request.operation == StoreOperation::claims) {
      Wait wait{request.operation, key,
                static_cast<std::size_t>(std::max<std::int64_t>(request.count, 0))};
      if (!take_reply(wait, false, reply)) {
        const std::pair id(client, request.number);
        const auto mine =
            std::distance(waits_.lower_bound({client, 0}), waits_.lower_bound({client + 1, 0}));
        check_less(static_cast<std::size_t>(mine), kMaxWaits, "requests that wait");
        if (waits_.contains(id)) throw Error(ErrorCode::protocol, "its number is in use");
        take(cost_of(key, 0), 0);
        waits_.emplace(id, std::move(wait));
        return replies;
      }
    } else {
      reply = reply_now(client, request);
    }
  } catch (const Error& error) {
    reply = {};
    reply.error = error.code();
    reply.value = std::make_shared<const std::string>(error.what());
  }
  reply.number = request.number;
  replies.push_back({client, std::move(reply)});
  wake(key,
       request.operation == StoreOperation::claim ? StoreOperation::claims : StoreOperation::get,
       replies);
  return replies;
}

StoreReply StoreService::reply_now(Client client, const StoreRequest& request) {
  StoreReply reply;
  const std::string& key = request.key;
  const StoreMap::Value before = map_.find(key);
  const std::size_t freed = before ? cost_of(key, before->size()) : 0;
  switch (request.operation) {
    case StoreOperation::set:
      take(cost_of(key, request.value.size()), freed);
      map_.set(key, request.value);
      break;
    case StoreOperation::try_get:
      reply.value = before;
      break;
    case StoreOperation::erase:
      reply.count = map_.erase(key) ? 1 : 0;
      take(0, freed);
      break;
    case StoreOperation::claim: {
      StoreMap::Holder holder = map_.claim(key, request.value);
      if (holder.claimed) {
        try {
          std::vector<std::string>& mine = claimed_[client];
          check_less(mine.size(), kMaxClaims, "claims");
          take(cost_of(key, request.value.size()), 0);
          mine.push_back(key);
        } catch (...) {
          map_.release(key);
          throw;
        }
      }
      reply.count = holder.claimed ? 1 : 0;
      reply.value = std::move(holder.value);
      break;
    }
    default:
      throw Error(ErrorCode::protocol, "it asks for something unknown");
  }
  return reply;
}

bool StoreService::take_reply(const Wait& wait, bool now, StoreReply& reply) const {
  if (wait.operation == StoreOperation::claims) {
    if (!now && map_.count_claims(wait.key) < wait.count) return false;
    reply.entries = map_.claims(wait.key);
    return true;
  }
  reply.value = map_.find(wait.key);
  return now || reply.value;
}

void StoreService::stop_waiting(Client client, std::uint64_t number, std::vector<Reply>& replies) {
  const auto found = waits_.find({client, number});
  if (found == waits_.end()) return;  // its reply is on its way
  StoreReply reply;
  static_cast<void>(take_reply(found->second, true, reply));
  reply.number = number;
  take(0, cost_of(found->second.key, 0));
  waits_.erase(found);
  replies.push_back({client, std::move(reply)});
}

void StoreService::wake(const std::string& key, StoreOperation operation,
                        std::vector<Reply>& replies) {
  for (auto at = waits_.begin(); at != waits_.end();) {
    const auto& [id, wait] = *at;
    StoreReply reply;
    reply.number = id.second;
    const bool claims = operation == StoreOperation::claims && key.starts_with(wait.key);
    if (wait.operation != operation || (wait.key != key && !claims) ||
        !take_reply(wait, false, reply)) {
      ++at;
      continue;
    }
    take(0, cost_of(wait.key, 0));
    replies.push_back({id.first, std::move(reply)});
    at = waits_.erase(at);
  }
}

void StoreService::forget(Client client) {
  if (const auto claimed = claimed_.extract(client)) {
    for (const std::string& key : claimed.mapped()) take(0, cost_of(key, map_.release(key)));
  }
  for (auto at = waits_.lower_bound({client, 0});
       at != waits_.end() && at->first.first == client;) {
    take(0, cost_of(at->second.key, 0));
    at = waits_.erase(at);
  }
}

void StoreService::take(std::size_t added, std::size_t freed) {
  if (added > freed && added - freed > max_bytes_ - used_) {
    throw Error(ErrorCode::overloaded, std::to_string(added - freed) + " bytes more than the " +
                                           std::to_string(used_) +
                                           " held for clients already are too many; the limit is " +
                                           std::to_string(max_bytes_));
  }
  used_ = used_ + added - freed;
}

}  // namespace stitch::transport
