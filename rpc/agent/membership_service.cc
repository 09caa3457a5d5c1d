// One file, though long: what the protocol asks for and what it is told stand side by side.
#include "stitch/rpc/agent/membership_service.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "stitch/base/callback_scope.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/graceful_shutdown.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

namespace {

OutMessage out_message(const Notice& notice) {
  OutMessage message(wire::kMembership);
  notice.write(message.frame.body());
  return message;
}

}  // namespace

transport::Message MembershipService::bare_message(const Notice& notice) {
  transport::FrameBuilder frame(wire::kMembership);
  notice.write(frame.body());
  frame.end_body();
  return std::move(frame).finish();
}

Notice MembershipService::notice_in(const transport::Message& message) {
  const auto head = transport::peek_frame(message.frame);
  if (!head || head->kind != wire::kMembership)
    throw Error(ErrorCode::protocol, "a notice of membership was expected");
  return Notice::read(head->body);
}

void MembershipService::start(const std::vector<Member>& members) {
  const Options& options = agent_.options();
  std::vector<KnownLife> lives;
  if (hooks_.members.empty()) {
    for (const Member& member : members) lives.push_back({{member.info, member.addresses, {}}});
    hooks_.self.info = agent_.self();
    for (const KnownLife& life : lives) {
      if (life.card.info == agent_.self()) hooks_.self = life.card;
    }
  } else {
    for (const MemberCard& card : hooks_.members) lives.push_back({card});
  }
  base::MutexLock lock(mutex_);
  protocol_.emplace(hooks_.self,
                    MembershipProtocol::Settings{options.heartbeat_timeout, hooks_.admit});
  protocol_->start(lives);
}

std::chrono::nanoseconds MembershipService::heartbeat_interval() const {
  return MembershipProtocol::heartbeat_interval(agent_.options().heartbeat_timeout);
}

void MembershipService::begin_ticks() {
  const auto interval = heartbeat_interval() / MembershipProtocol::kTicks;
  agent_.loop().call_at(Clock::now() + interval, [this, weak = agent_.weak_from_this()] {
    const auto alive = weak.lock();
    if (!alive || stopped_.load() || alive->forked()) return;
    tick();
    begin_ticks();
  });
}

void MembershipService::tick() {
  const base::CallbackScope callback;
  agent_.peers().trim();
  const auto links = agent_.peers().links();
  std::vector<MembershipProtocol::Link> seen;
  for (const auto& link : links)
    seen.push_back({link.life->info().id, link.life->info().epoch, link.heard});
  if (!joining_.load()) {
    for (const Life* life : agent_.peers().unconnected())
      seen.push_back({life->info().id, life->info().epoch, {}, false});
  }
  step([&](MembershipProtocol& protocol) { return protocol.on_tick(Clock::now(), seen); });
}

// ---- effects

template <class F>
void MembershipService::step(F&& change) {
  {
    base::MutexLock lock(mutex_);
    if (!protocol_ || stopped_.load()) return;
    Effects effects = change(*protocol_);
    agent_.peers().tell_digest(protocol_->digest());
    if (!effects.empty()) queue_.push_back(std::move(effects));
  }
  drain();
}

void MembershipService::drain() noexcept {
  for (bool first = true;; first = false) {
    Effects next;
    {
      base::MutexLock lock(mutex_);
      if (first && draining_) return;
      draining_ = !queue_.empty();
      if (queue_.empty()) return;
      next = std::move(queue_.front());
      queue_.pop_front();
    }
    if (perform(next)) continue;
    base::MutexLock lock(mutex_);
    queue_.push_front(std::move(next));
    const auto& about = queue_.front().events.front().card.info;
    const Life* life = agent_.peers().life(about);
    if (life != nullptr && life->loss_reported.load()) continue;  // meanwhile
    draining_ = false;
    return;  // on_link_lost() goes on
  }
}

bool MembershipService::perform(Effects& effects) noexcept {
  for (const auto& [peer, why] : std::exchange(effects.lose, {}))
    agent_.peers().end(peer, why, false, effects.has_left(peer));
  while (!effects.events.empty()) {
    if (!tell(effects.events.front())) return false;
    effects.events.erase(effects.events.begin());
  }
  for (const auto& [to, notice] : effects.send) send(to, notice);
  for (const WorkerInfo& to : effects.reach) agent_.peers().try_to_reach(to);
  for (const auto& each : effects.probes) probe(each);
  for (const auto& each : effects.answers) answer(each);
  if (effects.leave_done) {
    base::MutexLock lock(mutex_);
    left_ = true;
    left_changed_.notify_all();
  }
  return true;
}

void MembershipService::record(const char* what, const WorkerInfo& about) const noexcept {
  agent_.events().record(what, about.id.value(), about.epoch);
}

bool MembershipService::tell(const MembershipProtocol::Event& event) {
  using Kind = MembershipProtocol::Event::Kind;
  const char* const over = event.kind == Kind::dead ? "member declared dead" : "member left";
  PeerTable& peers = agent_.peers();
  switch (event.kind) {
    case Kind::joined:
      record("member joined", event.card.info);
      // Its name or id may be another's.
      if (const auto error = base::failure_of([&] { add_member(event.card); })) {
        std::fprintf(stderr, "stitch: %s cannot take in %s: %s\n", to_string(agent_.self()).c_str(),
                     to_string(event.card.info).c_str(), error->what());
      }
      return true;
    case Kind::dead:
    case Kind::left: {
      Life* life = peers.life(event.card.info);
      if (life == nullptr) {
        record(over, event.card.info);
        remember(event);
        return true;
      }
      life->over.store(true, std::memory_order_release);
      if (!life->loss_reported.load() && !stopped_.load() && !peers.closing()) {
        peers.end(life->info(), event.reason, false);
        if (!life->loss_reported.load()) return false;
      }
      record(over, life->info());
      agent_.for_each_extension([&](Extension& extension) {
        if (event.kind == Kind::dead) {
          extension.on_member_dead(life->info(), event.reason);
        } else {
          extension.on_member_left(life->info());
        }
      });
      return true;
    }
    case Kind::fenced:
      record("this worker fenced", agent_.self());
      agent_.fence(event.reason);
      return true;
  }
  return true;
}

void MembershipService::add_member(const MemberCard& card) {
  const Member member = see(card);
  agent_.device_tensors().add({member.info, member.devices});
  agent_.graceful_shutdown().on_peer_joining(member.info);
  Life& life = agent_.peers().add_life(member);
  agent_.graceful_shutdown().on_peer_joined();
  agent_.for_each_extension([&](Extension& extension) { extension.on_member_joined(life.info()); });
  agent_.peers().admit(life);
}

// A life that was over before this worker heard of it: calls to it are to say so, and the layers
// above may be waiting for news of it.
void MembershipService::remember(const MembershipProtocol::Event& over) {
  const WorkerInfo& info = over.card.info;
  const bool left = over.kind == MembershipProtocol::Event::Kind::left;
  const Error why = left ? Error(ErrorCode::disconnected, "it has left") : over.reason;
  // Messages to a worker that is known look for its devices.
  agent_.device_tensors().add({info, {}});
  const auto followed = base::failure_of([&] {
    agent_.peers().add_life({info, {}, {}}).announced.store(true);
  });
  if (followed) return;  // by another life
  agent_.peers().end(info, why, true);
  agent_.for_each_extension([&](Extension& extension) { extension.on_past_member(info, why); });
}

void MembershipService::send(const WorkerInfo& to, const Notice& notice) {
  agent_.send_while_possible(to, out_message(notice));
}

void MembershipService::end_probe(const WorkerInfo& about, std::optional<bool> answered) {
  const bool connected = agent_.peers().life(about) != nullptr && agent_.peers().connected(about);
  step([&](MembershipProtocol& protocol) {
    return protocol.on_probe(about, answered, Clock::now(), connected);
  });
}

void MembershipService::probe(const MembershipProtocol::Probe& probe) {
  const WorkerInfo& about = probe.about;
  const Life* life = agent_.peers().life(about);
  if (life == nullptr || life->member.addresses.empty()) return end_probe(about, std::nullopt);
  Inquiry inquiry;
  inquiry.addresses = life->member.addresses;
  inquiry.objection = [about](const transport::Hello& hello) -> std::optional<Error> {
    if (hello.id == about.id.value() && hello.epoch == about.epoch) return std::nullopt;
    return Error(ErrorCode::disconnected, Members::claimed_identity(hello) + " answers now");
  };
  inquiry.deadline = Clock::now() + probe.limit;
  if (const auto verdict = verdict_on(about)) {
    // It runs, and learns that it is over; where it closes the connection first, by its own probes.
    inquiry.question = [notice = *verdict] { return bare_message(notice); };
  }
  inquiry.done = [this, about](Inquiry::Outcome outcome) {
    if (outcome.answer) on_notice(nullptr, about, *outcome.answer);
    if (outcome.opened) return end_probe(about, true);
    if (!outcome.failure) return end_probe(about, false);  // it is silent
    const ErrorCode code = outcome.failure->code();
    if (outcome.failure->remote() && code == ErrorCode::overloaded) return end_probe(about, true);
    const bool here = code == ErrorCode::overloaded || code == ErrorCode::unimplemented ||
                      code == ErrorCode::shutting_down || code == ErrorCode::internal;
    end_probe(about, here ? std::nullopt : std::optional(false));
  };
  agent_.peers().inquire(std::move(inquiry));
}

void MembershipService::answer(const MembershipProtocol::Answer& answer) {
  std::shared_ptr<transport::Connection> connection;
  {
    base::MutexLock lock(mutex_);
    const auto found = tickets_.find(answer.ticket);
    if (found == tickets_.end()) return;
    connection = std::move(found->second);
    tickets_.erase(found);
  }
  connection->send(bare_message(answer.notice), [](const std::optional<Error>&) {});
  agent_.loop().call_at(Clock::now() + agent_.options().heartbeat_timeout,
                        [weak = agent_.weak_from_this(), over = std::weak_ptr(connection)] {
                          const auto alive = weak.lock();
                          if (const auto open = over.lock(); alive && open)
                            open->close(Error(ErrorCode::disconnected, "the answer was given"));
                        });
}

// ---- events

void MembershipService::on_link_lost(const WorkerInfo& peer, const Error& reason) {
  if (Life* life = agent_.peers().life(peer)) life->loss_reported.store(true);
  step([&](MembershipProtocol& protocol) {
    return protocol.on_link_lost(peer, reason, Clock::now());
  });
}

void MembershipService::on_frame(InMessage message) {
  const Notice notice = Notice::read(message.view.body());
  step([&](MembershipProtocol& protocol) {
    return protocol.on_notice(message.from, notice, Clock::now());
  });
}

void MembershipService::on_heartbeat(const WorkerInfo& from, std::uint64_t digest) {
  step([&](MembershipProtocol& protocol) {
    return protocol.on_heartbeat(from, digest, Clock::now());
  });
}

void MembershipService::on_notice(const std::shared_ptr<transport::Connection>& connection,
                                  const WorkerInfo& from, const transport::Message& message) {
  try {
    const Notice notice = notice_in(message);
    // A process whose name, id and epoch are those of a member: it may be that one, which asks
    // again because its sponsor has died, or another one.
    if (connection && notice.step == Notice::Step::join && notice.lives[0].card.info == from)
      return on_join(connection, notice.lives[0].card);
    // Else over such a connection a worker only learns that one of its two ends is over.
    if (notice.step != Notice::Step::dead) return;
    if (notice.about != agent_.self() && notice.about != from) return;
    step([&](MembershipProtocol& protocol) {
      return protocol.on_notice(from, notice, Clock::now());
    });
  } catch (const Error&) {
    // The connection ends anyway.
  }
}

void MembershipService::on_stranger(const std::shared_ptr<transport::Connection>& connection,
                                    const WorkerInfo& stranger, const transport::Message& message) {
  try {
    const Notice notice = notice_in(message);
    if (notice.step != Notice::Step::join || notice.lives[0].card.info != stranger)
      throw Error(ErrorCode::protocol, to_string(stranger) + " is no member and asked nothing");
    on_join(connection, notice.lives[0].card);
  } catch (const Error& error) {
    connection->close(error);  // a joiner asks the next member
  }
}

void MembershipService::on_join(const std::shared_ptr<transport::Connection>& connection,
                                const MemberCard& card) {
  step([&](MembershipProtocol& protocol) STITCH_NO_THREAD_SAFETY_ANALYSIS {
    const std::uint64_t ticket = next_ticket_++;
    tickets_.emplace(ticket, connection);
    return protocol.on_join(ticket, card, Clock::now());
  });
}

// ---- joining and leaving

void MembershipService::take_in(const Notice& welcome, Clock::time_point deadline) {
  step([&](MembershipProtocol& protocol) { return protocol.on_welcome(welcome, Clock::now()); });
  base::MutexLock lock(mutex_);
  // Another thread may be performing that.
  while ((draining_ || !queue_.empty()) && Clock::now() < deadline)
    left_changed_.wait_until(mutex_, Clock::now() + std::chrono::milliseconds(1));
  if (const auto& fenced = protocol_->fenced()) {
    throw Error(ErrorCode::invalid_argument,
                to_string(agent_.self()) + " cannot join: " + fenced->what())
        .with_worker(agent_.self().name);
  }
}

void MembershipService::leave(Clock::time_point deadline) {
  step([](MembershipProtocol& protocol) { return protocol.leave(Clock::now()); });
  base::MutexLock lock(mutex_);
  while (!left_ && Clock::now() < deadline) left_changed_.wait_until(mutex_, deadline);
}

std::vector<MemberCard> MembershipService::live_cards() const {
  base::MutexLock lock(mutex_);
  return protocol_ ? protocol_->live_cards() : std::vector<MemberCard>();
}

std::vector<KnownLife> MembershipService::lives() const {
  base::MutexLock lock(mutex_);
  return protocol_ ? protocol_->lives() : std::vector<KnownLife>();
}

std::optional<Notice> MembershipService::verdict_on(const WorkerInfo& info) const {
  base::MutexLock lock(mutex_);
  auto notice = protocol_ ? protocol_->obituary(info) : std::nullopt;
  if (notice && notice->step != Notice::Step::dead) notice.reset();
  return notice;
}

std::optional<transport::Message> MembershipService::obituary(const WorkerInfo& info) const {
  const auto notice = verdict_on(info);
  return notice ? std::optional(bare_message(*notice)) : std::nullopt;
}

Member MembershipService::see(const MemberCard& card) const {
  if (!hooks_.see) return {card.info, card.addresses, {}};
  try {
    return hooks_.see(card);
  } catch (const Error& error) {
    std::fprintf(stderr, "stitch: %s cannot reach %s: %s\n", to_string(agent_.self()).c_str(),
                 to_string(card.info).c_str(), error.what());
    return {card.info, {}, {}};
  }
}

// ---- asking the members of a running world

std::vector<MemberCard> MembershipService::other_members() const {
  std::vector<MemberCard> cards = hooks_.members;
  std::erase_if(cards, [this](const auto& card) { return card.info.id == agent_.self().id; });
  std::sort(cards.begin(), cards.end(),
            [](const MemberCard& a, const MemberCard& b) { return a.info.id < b.info.id; });
  return cards;
}

MembershipService::Asked MembershipService::ask(const MemberCard& card, const Notice* question,
                                                Clock::time_point deadline) {
  struct Waiting {
    base::Mutex mutex;
    base::CondVar changed;
    std::optional<Inquiry::Outcome> outcome STITCH_GUARDED_BY(mutex);
    bool answered STITCH_GUARDED_BY(mutex) = false;  // the handshake
    bool passed_over STITCH_GUARDED_BY(mutex) = false;
  };
  const auto waiting = std::make_shared<Waiting>();
  Inquiry inquiry;
  inquiry.addresses = see(card).addresses;
  inquiry.objection = [waiting,
                       info = card.info](const transport::Hello& hello) -> std::optional<Error> {
    if (hello.id != info.id.value() || hello.epoch != info.epoch)
      return Error(ErrorCode::disconnected, Members::claimed_identity(hello) + " answers now");
    base::MutexLock lock(waiting->mutex);
    if (waiting->passed_over)
      return Error(ErrorCode::disconnected, "another member was asked meanwhile");
    waiting->answered = true;
    waiting->changed.notify_all();
    return std::nullopt;
  };
  if (question != nullptr) inquiry.question = [notice = *question] { return bare_message(notice); };
  // All of its acknowledgements are bounded by twice the timeout, a probe by one. One that does
  // not answer the handshake within a timeout is lost to the others by then, too.
  const std::chrono::nanoseconds timeout = agent_.options().heartbeat_timeout;
  inquiry.deadline = std::min(deadline, Clock::now() + 4 * timeout);
  const auto open_deadline = std::min(deadline, Clock::now() + timeout);
  inquiry.done = [waiting](Inquiry::Outcome outcome) {
    base::MutexLock lock(waiting->mutex);
    waiting->outcome = std::move(outcome);
    waiting->changed.notify_all();
  };
  agent_.peers().inquire(std::move(inquiry));
  Asked asked;
  base::MutexLock lock(waiting->mutex);
  while (!waiting->outcome && (waiting->answered || Clock::now() < open_deadline)) {
    if (!waiting->answered) {
      waiting->changed.wait_until(waiting->mutex, open_deadline);
    } else if (question != nullptr) {
      waiting->changed.wait(waiting->mutex);
    } else {
      break;
    }
  }
  asked.is_there = waiting->answered;
  waiting->passed_over = !waiting->outcome.has_value();
  if (waiting->outcome) asked.outcome = std::move(*waiting->outcome);
  return asked;
}

namespace {
// That this worker cannot ask says nothing about the member.
void throw_if_short_here(const Inquiry::Outcome& outcome) {
  const auto& failure = outcome.failure;
  if (failure && !failure->remote() && failure->code() == ErrorCode::overloaded) throw *failure;
}
}  // namespace

bool MembershipService::reaches_a_member(Clock::time_point deadline) {
  joining_.store(true);
  for (const MemberCard& card : other_members()) {
    const Asked asked = ask(card, nullptr, deadline);
    if (asked.is_there) return true;
    throw_if_short_here(asked.outcome);
    if (Clock::now() >= deadline) {
      throw Error(ErrorCode::timeout, to_string(agent_.self()) +
                                          " could not ask all members of its world within the "
                                          "time limit; asked last was " +
                                          to_string(card.info));
    }
  }
  return false;
}

std::optional<Notice> MembershipService::join(Clock::time_point deadline) {
  joining_.store(true);
  const WorkerInfo& self = agent_.self();
  const Notice question{Notice::Step::join, self, self, {}, {{hooks_.self}}};
  std::string tried;
  for (const MemberCard& card : other_members()) {
    const Inquiry::Outcome outcome = ask(card, &question, deadline).outcome;
    if (outcome.answer) {
      Notice notice = notice_in(*outcome.answer);
      const bool refused =
          notice.step == Notice::Step::refusal || notice.step == Notice::Step::dead;
      if (refused && notice.about == self && !notice.lives.empty()) {
        const WorkerInfo& known = notice.lives[0].card.info;
        if (known.id == self.id && known.name == self.name && known.epoch >= self.epoch)
          return notice;
      }
      const bool no_member = (notice.step == Notice::Step::refusal && !notice.lives.empty()) ||
                             (notice.step == Notice::Step::dead && notice.about == card.info);
      if (no_member) {
        tried += (tried.empty() ? "" : ", ") + to_string(card.info) + ": " + notice.text;
        continue;
      }
      if (refused) throw from_refusal_text(notice.text).with_worker(self.name);
      if (notice.step != Notice::Step::welcome)
        throw Error(ErrorCode::protocol, to_string(card.info) + " answers a join with nonsense");
      take_in(notice, deadline);
      joining_.store(false);
      return std::nullopt;
    }
    if (Clock::now() >= deadline) {
      throw Error(ErrorCode::timeout, to_string(self) +
                                          " was not admitted within the time limit; asked was " +
                                          to_string(card.info));
    }
    throw_if_short_here(outcome);
    tried += (tried.empty() ? "" : ", ") + to_string(card.info) +
             (outcome.failure ? std::string(": ") + outcome.failure->what() : ": no answer");
  }
  throw Error(ErrorCode::disconnected,
              to_string(self) + " reached no member of its world: " + tried);
}

}  // namespace stitch::rpc
