#include "stitch/rpc/agent/peer.h"

#include <algorithm>
#include <iterator>

#include "stitch/base/name_list.h"

namespace stitch::rpc {

namespace {

// How long attempts go on after the first failure: a peer that has died is to be known as dead
// within two seconds; a shortage of descriptors or memory here has that long to pass. Longer if the
// peer has answered: it is alive, and will bind another connection or refuse this worker.
constexpr std::chrono::milliseconds kConnectTimeout{1000};
constexpr std::chrono::milliseconds kConnectTimeoutWhenAnswered{5000};
constexpr std::chrono::milliseconds kMinRetryDelay{10};
constexpr std::chrono::milliseconds kMaxRetryDelay{200};

// Whether the peer, or this worker's own endpoint, has refused: a retry would change nothing.
bool is_refusal(const Error& error) {
  switch (error.code()) {
    case ErrorCode::unauthenticated:
    case ErrorCode::protocol:
    case ErrorCode::invalid_argument:
    case ErrorCode::unimplemented:
    case ErrorCode::shutting_down:
      return true;
    default:
      return false;
  }
}

Error not_needed() { return Error(ErrorCode::disconnected, "the connection is not needed"); }

}  // namespace

Peer::Peer(Life& life, WorkerId self, std::vector<bool> reachable) : life_(life), self_(self) {
  const auto& addresses = life.member.addresses;
  for (std::size_t i = 0; i < addresses.size(); ++i)
    addresses_.push_back({addresses[i], reachable[i]});
}

void Peer::on_open(const PeerConnectionPtr& opened, Effects& effects) {
  const ConnectionPtr& connection = opened->connection;
  if (lost_) {
    effects.close.emplace_back(connection, *lost_);
  } else if (opened->target) {
    // The accepting side sends BIND first.
    if (own_ != opened) effects.close.emplace_back(connection, not_needed());
  } else if (info().id == self_) {
    effects.send_bind = connection;
  } else if (bound_) {
    effects.close.emplace_back(
        connection, Error(ErrorCode::disconnected,
                          "a connection to " + to_string(info()) + " is in use already"));
  } else if (own_ && self_ < info().id) {
    drop(spare_, "the peer opened another connection", effects);
    spare_ = opened;
  } else {
    offer(opened, effects);
  }
}

void Peer::offer(const PeerConnectionPtr& connection, Effects& effects) {
  if (offered_ != connection) drop(offered_, "the peer opened another connection", effects);
  offered_ = connection;
  failure_.reset();  // the peer is alive and wants to connect
  effects.send_bind = connection->connection;
}

void Peer::drop(PeerConnectionPtr& connection, const std::string& why, Effects& effects) {
  if (connection && connection->connection)
    effects.close.emplace_back(connection->connection, Error(ErrorCode::disconnected, why));
  connection.reset();
}

bool Peer::on_bind(const PeerConnectionPtr& connection, Effects& effects) {
  if (info().id == self_ && !connection->target) {
    // The accepting half of calls to oneself; this worker sends over the other half.
    connection->bound.store(true, std::memory_order_release);
    return false;
  }
  if (lost_ || bound_ || connection != (connection->target ? own_ : offered_)) {
    effects.close.emplace_back(connection->connection, not_needed());
    return false;
  }
  bound_ = connection;
  connection->bound.store(true, std::memory_order_release);
  (connection->target ? own_ : offered_).reset();
  drop(own_, "another connection is used", effects);
  drop(offered_, "another connection is used", effects);
  drop(spare_, "another connection is used", effects);
  failure_.reset();
  return true;
}

void Peer::on_closed(const PeerConnectionPtr& closed, const Error& reason, Effects& effects) {
  if (closed == bound_) {
    lose(reason, effects);
  } else if (closed == own_) {
    on_attempt_failed(*closed, reason, effects);
  } else if (closed == spare_) {
    spare_.reset();
  } else if (closed == offered_) {
    offered_.reset();
    // The peer was alive to offer it: earlier failures say nothing about it any more.
    failure_.reset();
    retry_delay_ = {};
    if (!waiting_.empty()) connect(effects);
  }
}

void Peer::on_retry_timer(Effects& effects) {
  retry_scheduled_ = false;
  connect(effects);
}

void Peer::connect(Effects& effects) {
  if (lost_ || bound_ || own_ || offered_ || retry_scheduled_) return;
  try_next(0, effects);
}

void Peer::try_next(std::size_t first, Effects& effects) {
  for (std::size_t i = first; i < addresses_.size(); ++i) {
    if (!addresses_[i].worth_trying()) continue;
    own_ = std::make_shared<PeerConnection>();
    own_->target = &life_;
    own_->address = i;
    effects.connect = own_;
    return;
  }
  retry_or_lose(effects);
}

void Peer::retry_or_lose(Effects& effects) {
  bool worth_trying = false;
  std::vector<std::string> tried;
  std::string refused;
  for (const Address& address : addresses_) {
    tried.push_back(address.text);
    worth_trying = worth_trying || address.worth_trying();
    if (!address.refusal.empty()) refused += "; " + address.refusal;
  }
  if (!failure_ && refused.empty()) {
    // No address was tried: that does not mean that the worker is gone.
    effects.failed.swap(waiting_);
    effects.failure =
        Error(ErrorCode::disconnected, to_string(info()) +
                                           " cannot be reached: no transport here for its "
                                           "addresses " +
                                           base::join_names(tried))
            .with_worker(info().name);
    return;
  }
  const auto now = Clock::now();
  const auto time_limit = answered_ ? kConnectTimeoutWhenAnswered : kConnectTimeout;
  if (worth_trying && !closing_ && now < first_failure_ + time_limit) {
    retry_scheduled_ = true;
    retry_delay_ = std::clamp(retry_delay_ * 2, kMinRetryDelay, kMaxRetryDelay);
    effects.retry.emplace(&life_, now + retry_delay_);
    return;
  }
  const Error last = failure_.value_or(Error(ErrorCode::disconnected, "it was refused"));
  if (addresses_.size() == 1) return lose(last, effects);
  lose(Error(last.code(), "none of its addresses " + base::join_names(tried) +
                              " can be reached: " + last.what() + refused),
       effects);
}

void Peer::on_attempt_failed(const PeerConnection& attempt, const Error& reason, Effects& effects) {
  ++failed_attempts_;
  own_.reset();
  if (!failure_) first_failure_ = Clock::now();
  failure_ = reason;
  // A refusal is an answer, too: a worker without room for strangers refuses with `overloaded`.
  answered_ = attempt.peer || reason.remote();
  // How an open connection ended does not predict the next one: one cut within a sealed record ends
  // with `protocol`.
  if (!attempt.peer && is_refusal(reason)) addresses_[attempt.address].refusal = reason.what();
  if (spare_) {
    const PeerConnectionPtr spare = std::exchange(spare_, nullptr);
    offer(spare, effects);
  } else if (!offered_) {
    try_next(attempt.address + 1, effects);
  }
}

void Peer::wait(WaitingMessage&& message, Effects& effects) {
  waiting_.push_back(std::move(message));
  if (lost_) {
    effects.failed.swap(waiting_);
    effects.failure = lost_;
  } else {
    connect(effects);
  }
}

std::vector<Peer::WaitingMessage> Peer::take_waiting(const PeerConnectionPtr& connection) {
  if (bound_ != connection || lost_) return {};
  if (waiting_.empty()) usable_ = connection->connection;
  return std::exchange(waiting_, {});
}

void Peer::lose(const Error& reason, Effects& effects) {
  usable_.reset();
  drop(bound_, reason.what(), effects);
  drop(own_, reason.what(), effects);
  drop(offered_, reason.what(), effects);
  drop(spare_, reason.what(), effects);
  effects.failed.swap(waiting_);
  effects.failure = reason;
  if (lost_) return;
  lost_ = Error(ErrorCode::disconnected, to_string(info()) + " is gone: " + reason.what())
              .with_worker(info().name);
  if (!closing_) effects.lost.emplace(&life_, reason);
}

void Peer::close(const Error& reason, Effects& effects) {
  std::move(waiting_.begin(), waiting_.end(), std::back_inserter(effects.failed));
  waiting_.clear();
  usable_.reset();
  bound_.reset();
  own_.reset();
  offered_.reset();
  spare_.reset();
  failure_.reset();
  retry_scheduled_ = false;
  retry_delay_ = {};
  lost_ = reason;
}

}  // namespace stitch::rpc
