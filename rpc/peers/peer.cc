// One file, though long: the steps of a connection, from an attempt to its end, are one protocol.
#include "stitch/rpc/peers/peer.h"

#include <algorithm>
#include <utility>

#include "stitch/base/name_list.h"
#include "stitch/rpc/message/life_text.h"

namespace stitch::rpc {

namespace {

// Generations that an honest peer can be ahead: one for each CONFIRM that did not arrive.
constexpr std::uint64_t kMaxGenerationsAhead = std::uint64_t{1} << 32;

Error not_needed() { return Error(ErrorCode::disconnected, "the connection is not needed"); }

}  // namespace

Peer::Peer(PeerLife& life, WorkerId self, std::vector<bool> reachable, Clock::duration grace,
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

// ---- attempts to connect, their time limits, and the end of a connection

namespace {

// So long at least a first connection is tried after the first failure, where less is allowed for
// one that broke.
constexpr std::chrono::seconds kMinConnectTime{1};
constexpr std::chrono::milliseconds kMinRetryDelay{10};
constexpr std::chrono::milliseconds kMaxRetryDelay{200};
// Timers may fire that much early.
constexpr std::chrono::milliseconds kTimerSlack{1};
// Of an offer beside a bound connection, which a peer that needs none does not answer.
constexpr std::chrono::milliseconds kOfferTimeout{1000};
// Before the first connection: of an offer, and of this worker's attempt once it is open. The
// worker with the lower id answers only when its own attempt has failed, within the handshake's
// time limit.
constexpr std::chrono::seconds kStepTimeout{5};
constexpr std::chrono::seconds kFirstStepTimeout{15};
// So long at least is tried what replaces a broken connection, and so long at most.
constexpr std::chrono::milliseconds kMinAttemptTime{300};
constexpr std::chrono::seconds kMaxAttemptTime{10};
// After so many breaks within a second others are not replaced at once.
constexpr int kFreeBreaks = 8;
constexpr std::chrono::seconds kBreaksWithin{1};
// So many connections in a row that end so soon, and bring nothing: something ends each of them.
constexpr int kMaxFruitless = 32;
constexpr std::chrono::milliseconds kFruitlessWithin{100};

std::string milliseconds(Peer::Clock::duration duration) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(duration).count()) +
         " ms";
}

}  // namespace

// ---- the end of connections

void Peer::on_closed(const PeerConnectionPtr& closed, const Error& reason, bool no_process_listens,
                     Effects& effects) {
  if (closed == bound_) {
    on_broken(reason, effects);
  } else if (closed == own_) {
    on_attempt_failed(*closed, reason, no_process_listens, effects);
  } else if (closed == spare_) {
    spare_.reset();
  } else if (closed == successor_) {
    successor_.reset();
    offer_spare(effects);
  } else if (closed == offered_) {
    offered_.reset();
    // The peer was alive to offer it: earlier failures say nothing about it any more.
    failure_.reset();
    retry_delay_ = {};
    offer_spare(effects);
    if (broken_ || life_.session->awaits(Unacknowledged::any)) connect(effects);
  }
}

void Peer::on_broken(const Error& reason, Effects& effects) {
  effects.detach = life_.session;
  effects.detach_from = bound_->connection;
  bound_.reset();
  if (given_up_) return lose(*given_up_, effects);
  const auto now = now_();
  const bool brought = life_.session->progress() != progress_;
  fruitless_ = brought || now - bound_since_ >= kFruitlessWithin ? 0 : fruitless_ + 1;
  // A peer that breaks the rules would do so again.
  if (closing_ || grace_ <= Clock::duration::zero() || is_self() ||
      reason.code() == ErrorCode::protocol || fruitless_ > kMaxFruitless)
    return lose(reason, effects);
  broken_ = Broken{reason, now};
  failure_.reset();
  for (Address& address : addresses_) address.abandoned = false;
  if (successor_) return use(std::exchange(successor_, nullptr), successor_received_, effects);
  if (grace_ < Clock::time_point::max() - now) effects.timers.push_back(now + grace_);
  offer_spare(effects);
  if (offered_) effects.timers.push_back(offered_until());
  if (now - first_break_ > kBreaksWithin) {
    first_break_ = now;
    breaks_ = 0;
  }
  if (++breaks_ > kFreeBreaks) {
    retry_later(std::min<Clock::duration>(kMinRetryDelay * (breaks_ - kFreeBreaks), kMaxRetryDelay),
                effects);
  } else {
    connect(effects);
  }
}

void Peer::lose_broken(const std::string& why, Effects& effects) {
  std::string text = stitch::to_string(info()) + " epoch " + std::to_string(info().epoch) + ": " +
                     broken_->reason.what() + "; " + why;
  if (failure_) {
    text += std::string(": ") + failure_->what();
  } else if (own_) {
    text += ": " + addresses_[own_->address].text + " has not answered yet";
  } else if (offered_ && offered_->connection) {
    text += ": over " + offered_->connection->describe() + ", which it has opened, nothing comes";
  } else {
    std::vector<std::string> texts;
    for (const Address& address : addresses_) texts.push_back(address.text);
    text += ": its addresses are " + base::join_names(texts);
  }
  lose(Error(ErrorCode::disconnected, std::move(text)), effects);
}

Peer::Clock::duration Peer::attempt_time() const noexcept {
  return std::clamp<Clock::duration>(grace_ / 3, kMinAttemptTime, kMaxAttemptTime);
}

Peer::Clock::time_point Peer::own_until() const noexcept {
  const bool open = own_->peer != nullptr;
  // Until then the worker with the lower id, which decides, may be trying by itself.
  const bool patient = open && !own_->accepted && info().id < self_;
  if (broken_) return own_since_ + attempt_time() * (patient ? 2 : 1);
  if (!open) return Clock::time_point::max();  // the handshake has its own limit
  return own_since_ + (own_->accepted ? kStepTimeout : kFirstStepTimeout);
}

Peer::Clock::time_point Peer::offered_until() const noexcept {
  if (broken_ && !bound_) return offered_since_ + attempt_time();
  return offered_since_ + (bound_ || spare_ ? Clock::duration(kOfferTimeout) : kStepTimeout);
}

void Peer::on_timer(Effects& effects) {
  if (lost_) return;
  const auto now = now_() + kTimerSlack;
  if (broken_ && !bound_ && now - broken_->since >= grace_)
    return lose_broken("no other was made within " + milliseconds(grace_), effects);
  // What does not answer must not take the time of the others.
  if (own_ && own_->connection && now >= own_until()) {
    const Error late(ErrorCode::disconnected, addresses_[own_->address].text + " does not answer");
    effects.close.emplace_back(own_->connection, late);
  }
  if (offered_ && now >= offered_until()) {
    drop(offered_, "the peer did not answer", effects);
    if (!own_ || info().id < self_) offer_spare(effects);
    if (!bound_ && (broken_ || life_.session->awaits(Unacknowledged::any))) connect(effects);
  }
  if (retry_scheduled_ && now >= retry_at_) {
    retry_scheduled_ = false;
    connect(effects);
  }
}

// ---- attempts

void Peer::connect(Effects& effects) {
  if (std::exchange(tentative_, false)) begin_anew();  // the time limit, too
  if (lost_ || bound_ || own_ || offered_ || successor_ || retry_scheduled_) return;
  try_next(0, effects);
}

void Peer::try_to_connect(Effects& effects) {
  if (lost_ || has_session_ || is_trying()) return;
  tentative_ = true;
  begin_anew();
  try_next(0, effects);
}

void Peer::begin_anew() {
  failure_.reset();
  for (Address& address : addresses_) address.abandoned = false;
}

void Peer::try_next(std::size_t first, Effects& effects) {
  for (std::size_t i = first; i < addresses_.size(); ++i) {
    if (!addresses_[i].reachable) continue;
    own_ = std::make_shared<PeerConnection>();
    own_->target = &life_;
    own_->address = i;
    effects.connect = own_;
    own_since_ = now_();
    if (broken_) effects.timers.push_back(own_until());
    return;
  }
  retry_or_lose(effects);
}

void Peer::retry_or_lose(Effects& effects) {
  std::vector<std::string> tried;
  for (const Address& address : addresses_) tried.push_back(address.text);
  if (!failure_) {
    // No address was tried: that does not mean that the worker is gone.
    if (tentative_) return;
    effects.fail_waiting =
        Error(ErrorCode::disconnected, to_string(info()) +
                                           " cannot be reached: no transport here for its "
                                           "addresses " +
                                           base::join_names(tried))
            .with_worker(info().name);
    return;
  }
  const auto now = now_();
  // What is short here says nothing about the peer: it is tried as long as that lasts.
  if (!failure_->remote() && failure_->code() == ErrorCode::overloaded) first_failure_ = now;
  const bool in_time =
      broken_ ? now - broken_->since < grace_
              : now - first_failure_ < std::max<Clock::duration>(grace_, kMinConnectTime);
  const auto dead = [](const Address& each) { return each.abandoned || !each.reachable; };
  const bool ended = std::ranges::all_of(addresses_, dead);
  if (broken_ && ended) return lose_broken("no process listens at its addresses any more", effects);
  if (tentative_ && !ended) return;
  if (!closing_ && in_time && !ended) {
    for (Address& address : addresses_) address.abandoned = false;
    retry_delay_ = std::clamp(retry_delay_ * 2, kMinRetryDelay, kMaxRetryDelay);
    return retry_later(retry_delay_, effects);
  }
  if (broken_) return lose_broken("no other could be made", effects);
  const Error last = *failure_;
  if (addresses_.size() == 1) return lose(last, effects);
  std::string text = "none of its addresses " + base::join_names(tried) + " can be reached";
  const char* mark = ": ";
  for (const Address& address : addresses_) {
    if (address.failure) text += std::exchange(mark, "; ") + std::string(address.failure->what());
  }
  lose(Error(last.code(), std::move(text)), effects);
}

void Peer::retry_later(Clock::duration delay, Effects& effects) {
  retry_scheduled_ = true;
  retry_at_ = now_() + delay;
  effects.timers.push_back(retry_at_);
}

void Peer::on_attempt_failed(const PeerConnection& attempt, const Error& reason,
                             bool no_process_listens, Effects& effects) {
  ++failed_attempts_;
  own_.reset();
  if (given_up_) return lose(*given_up_, effects);
  if (!failure_) first_failure_ = now_();
  failure_ = reason;
  addresses_[attempt.address].failure = reason;
  ++addresses_[attempt.address].failures;
  addresses_[attempt.address].abandoned = no_process_listens;
  if (spare_ && !offered_) {
    offer_spare(effects);
  } else if (!offered_ && !bound_ && !successor_) {
    try_next(attempt.address + 1, effects);
  }
}

}  // namespace stitch::rpc
