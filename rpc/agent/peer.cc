#include "stitch/rpc/agent/peer.h"

#include <algorithm>
#include <utility>

#include "stitch/rpc/message/life_text.h"

namespace stitch::rpc {

namespace {

// Generations that an honest peer can be ahead: one for each CONFIRM that did not arrive.
constexpr std::uint64_t kMaxGenerationsAhead = std::uint64_t{1} << 32;

Error not_needed() { return Error(ErrorCode::disconnected, "the connection is not needed"); }

}  // namespace

Peer::Peer(Life& life, WorkerId self, std::vector<bool> reachable, Clock::duration grace,
           std::uint64_t token, const Now& now)
    : life_(life), self_(self), grace_(grace), token_(token), now_(now) {
  const auto& addresses = life.member.addresses;
  for (std::size_t i = 0; i < addresses.size(); ++i)
    addresses_.push_back({addresses[i], reachable[i]});
}

void Peer::send(const PeerConnectionPtr& to, Bind::Step step, Effects& effects) {
  effects.send_bind = to->connection;
  effects.bind_session = to->session ? to->session : life_.session;
  effects.bind.step = step;
  effects.bind.generation = to->generation;
  effects.bind.token = step == Bind::Step::accept || step == Bind::Step::confirm ? token_ : 0;
}

// ---- which connection

void Peer::on_open(const PeerConnectionPtr& opened, Effects& effects) {
  const ConnectionPtr& connection = opened->connection;
  // An attempt that no call needs does not keep the peer's connection waiting.
  if (tentative_ && !lost_ && !opened->target && own_ && !own_->peer)
    drop(own_, "the peer has connected", effects);
  if (lost_) {
    if (opened->target) {
      effects.close.emplace_back(connection, *lost_);
    } else {
      send(opened, Bind::Step::gone, effects);
      effects.bind.reason = lost_->what();
      effects.close_after_bind = true;
    }
  } else if (opened->target) {
    // The accepting side sends BIND first.
    if (own_ != opened) {
      effects.close.emplace_back(connection, not_needed());
    } else {
      own_since_ = now_();
      effects.timers.push_back(own_until());
    }
  } else if (is_self()) {
    send(opened, Bind::Step::offer, effects);
  } else if (offered_ || (own_ && self_ < info().id)) {
    // An offer is not withdrawn for a newer connection, which may be a mere question.
    drop(spare_, "the peer opened another connection", effects);
    spare_ = opened;
    if (offered_) effects.timers.push_back(offered_until());  // sooner than before
  } else {
    offer(opened, effects);
  }
}

void Peer::offer(const PeerConnectionPtr& connection, Effects& effects) {
  offered_ = connection;
  offered_since_ = now_();
  effects.timers.push_back(offered_until());
  failure_.reset();  // the peer is alive and wants to connect
  connection->generation = generation_;
  send(connection, Bind::Step::offer, effects);
}

void Peer::offer_spare(Effects& effects) {
  if (spare_ && !offered_) offer(std::exchange(spare_, nullptr), effects);
}

void Peer::drop(PeerConnectionPtr& connection, const std::string& why, Effects& effects) {
  if (connection) drop(connection, Error(ErrorCode::disconnected, why), effects);
}

void Peer::drop(PeerConnectionPtr& connection, const Error& why, Effects& effects) {
  if (connection && connection->connection) effects.close.emplace_back(connection->connection, why);
  connection.reset();
}

void Peer::on_bind(const PeerConnectionPtr& connection, const Bind& bind, Effects& effects) {
  if (bind.step == Bind::Step::gone) {
    const Error reason(ErrorCode::disconnected,
                       bind.reason.empty() ? "it shuts down" : bind.reason);
    if (connection == bound_ || connection == own_) return give_up(reason, effects);
  } else if (connection->bound.load(std::memory_order_relaxed)) {
    const Error wrong(ErrorCode::protocol, "message BIND over a connection that is in use");
    return give_up(wrong, effects);
  } else if (!lost_) {
    switch (bind.step) {
      case Bind::Step::offer:
        return on_offer(connection, bind, effects);
      case Bind::Step::accept:
        return on_accept(connection, bind, effects);
      default:
        return on_confirm(connection, bind, effects);
    }
  }
  effects.close.emplace_back(connection->connection, not_needed());
}

void Peer::on_offer(const PeerConnectionPtr& connection, const Bind& bind, Effects& effects) {
  if (connection != own_ || own_->accepted || bound_) {
    effects.close.emplace_back(connection->connection, not_needed());
    return;
  }
  if (bind.generation > generation_ + kMaxGenerationsAhead) {
    effects.close.emplace_back(
        connection->connection,
        Error(ErrorCode::protocol, "bind frame offers generation " +
                                       std::to_string(bind.generation) + " after generation " +
                                       std::to_string(generation_)));
    return;
  }
  own_->accepted = true;
  own_->generation = bind.generation;
  own_since_ = now_();
  effects.timers.push_back(own_until());
  send(own_, Bind::Step::accept, effects);
}

void Peer::on_accept(const PeerConnectionPtr& connection, const Bind& bind, Effects& effects) {
  if (is_self() && !connection->target) {
    // The accepting half of calls to oneself; this worker sends over the other half.
    connection->generation = 1;
    connection->session = life_.echo;
    connection->bound.store(true, std::memory_order_release);
    send(connection, Bind::Step::confirm, effects);
    attach(*connection, 1, bind.received, effects);
    return;
  }
  // An acceptance of an offer from before the present connection says nothing about it.
  const bool known = connection == offered_ && bind.generation == generation_ && bind.token != 0 &&
                     (!has_session_ || bind.token == token_);
  if (!known) {
    effects.close.emplace_back(connection->connection, not_needed());
    return;
  }
  offered_.reset();
  token_ = bind.token;
  if (bound_) {
    // The peer has lost it. Nothing is taken from two connections at a time.
    drop(successor_, "the peer opened another connection", effects);
    successor_ = connection;
    successor_received_ = bind.received;
    effects.close.emplace_back(
        bound_->connection, Error(ErrorCode::disconnected, "the peer has replaced the connection"));
    return;
  }
  use(connection, bind.received, effects);
}

void Peer::on_confirm(const PeerConnectionPtr& connection, const Bind& bind, Effects& effects) {
  const bool expected = connection == own_ && own_->accepted && !bound_ && bind.token == token_;
  if (!expected) {
    effects.close.emplace_back(connection->connection, not_needed());
    return;
  }
  if (bind.generation != own_->generation + 1) {
    effects.close.emplace_back(
        connection->connection,
        Error(ErrorCode::protocol,
              "bind frame confirms generation " + std::to_string(bind.generation) +
                  " after an offer of generation " + std::to_string(own_->generation)));
    return;
  }
  generation_ = std::max(generation_ + 1, bind.generation);
  use(connection, bind.received, effects);
}

void Peer::use(const PeerConnectionPtr& connection, const Session::Received& received,
               Effects& effects) {
  if (connection->target) {
    for (std::size_t i = 0; i < connection->address && !effects.passed_over; ++i) {
      const Address& better = addresses_[i];
      if (better.failure) effects.passed_over.emplace(better.text, *better.failure);
    }
  } else {
    ++generation_;
    connection->generation = generation_;
    send(connection, Bind::Step::confirm, effects);
  }
  has_session_ = true;
  bound_ = connection;
  bound_since_ = now_();
  progress_ = life_.session->progress();
  connection->session = life_.session;
  connection->bound.store(true, std::memory_order_release);
  if (own_ == connection) own_.reset();
  drop(own_, "another connection is used", effects);
  drop(offered_, "another connection is used", effects);
  drop(spare_, "another connection is used", effects);
  failure_.reset();
  broken_.reset();
  retry_delay_ = {};
  retry_scheduled_ = false;
  attach(*connection, ++uses_, received, effects);
}

void Peer::attach(const PeerConnection& connection, std::uint64_t generation,
                  const Session::Received& received, Effects& effects) {
  effects.attach = connection.session;
  effects.attach_to = connection.connection;
  effects.generation = generation;
  effects.received_by_peer = received;
}

// ---- ending

void Peer::give_up(const Error& reason, Effects& effects) {
  if (lost_) return;
  const PeerConnectionPtr& last = bound_ ? bound_ : own_;
  if (!last || !last->connection) return lose(reason, effects);
  given_up_ = reason;  // messages that it has brought are handled first
  effects.close.emplace_back(last->connection, reason);
}

void Peer::lose(const Error& reason, Effects& effects) {
  const Error over(ErrorCode::disconnected, reason.what());
  drop(bound_, over, effects);
  drop(own_, over, effects);
  drop(offered_, over, effects);
  drop(spare_, over, effects);
  drop(successor_, over, effects);
  broken_.reset();
  retry_scheduled_ = false;
  if (lost_) return;
  effects.end = reason;
  lost_ = life_gone(info(), std::string(": ") + reason.what(), LifeName::with_id);
  if (!closing_) effects.lost = reason;
}

void Peer::part(const Error& reason, Effects& effects) {
  if (bound_ && bound_->connection) {
    send(bound_, Bind::Step::gone, effects);
    effects.bind.reason = reason.what();
    effects.close_after_bind = true;
    bound_.reset();
  }
  lose(reason, effects);
}

void Peer::close(const Error& reason, Effects& effects) {
  effects.end = reason;
  bound_.reset();
  own_.reset();
  offered_.reset();
  spare_.reset();
  successor_.reset();
  lost_ = reason;
}

}  // namespace stitch::rpc
