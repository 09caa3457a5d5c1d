// One file, though long: what the protocol asks for and what it is told stand side by side.
#include "stitch/rpc/agent/membership_service.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
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
  if (hooks_.lives.empty()) {
    for (const Member& member : members) lives.push_back({{member.info, member.addresses, {}}});
    hooks_.self.info = agent_.self();
    for (const KnownLife& life : lives) {
      if (life.card.info == agent_.self()) hooks_.self = life.card;
    }
  } else {
    std::ranges::copy_if(hooks_.lives, std::back_inserter(lives),
                         [](const KnownLife& life) { return life.state == LifeState::alive; });
  }
  base::MutexLock lock(mutex_);
  protocol_.emplace(hooks_.self,
                    MembershipProtocol::Settings{options.heartbeat_timeout, hooks_.admit});
  protocol_->start(lives);
}

std::chrono::nanoseconds MembershipService::heartbeat_interval() const {
  return MembershipProtocol::heartbeat_interval(agent_.options().heartbeat_timeout);
}

void MembershipService::begin() {
  step([&](MembershipProtocol& protocol) {
    return protocol.on_lives(std::exchange(hooks_.lives, {}), agent_.self(), Clock::now());
  });
  begin_ticks();
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
  for (const PeerLife* life : agent_.peers().unconnected())
    seen.push_back({life->info().id, life->info().epoch, {}, false});
  step([&](MembershipProtocol& protocol) { return protocol.on_tick(Clock::now(), seen); });
}

// ---- effects

template <class F>
void MembershipService::step(F&& change) {
  {
    base::MutexLock lock(mutex_);
    if (!protocol_ || stopped_.load()) return;
    Effects effects = change(*protocol_);
    agent_.peers().tell_digests(protocol_->digests());
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
    if (carry_out(next)) continue;
    base::MutexLock lock(mutex_);
    queue_.push_front(std::move(next));
    const auto& about = queue_.front().events.front().card.info;
    const PeerLife* life = agent_.peers().life(about);
    if (life != nullptr && life->loss_reported.load()) continue;  // meanwhile
    draining_ = false;
    return;  // on_link_lost() goes on
  }
}

bool MembershipService::carry_out(Effects& effects) noexcept {
  for (const auto& [peer, why] : std::exchange(effects.lose, {}))
    agent_.peers().end(peer, why, false, effects.has_left(peer));
  while (!effects.events.empty()) {
    if (!deliver(effects.events.front())) return false;
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

bool MembershipService::deliver(const MembershipProtocol::Event& event) {
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
      PeerLife* life = peers.life(event.card.info);
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
  PeerLife& life = agent_.peers().add_life(member);
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
  const PeerLife* life = agent_.peers().life(about);
  if (life == nullptr || life->member.addresses.empty()) return end_probe(about, std::nullopt);
  Inquiry inquiry;
  inquiry.addresses = life->member.addresses;
  inquiry.whom = {about.id.value(), about.epoch};
  inquiry.deadline = Clock::now() + probe.limit;
  if (const auto verdict = verdict_on(about)) {
    // It runs, and learns that it is over; where it closes the connection first, by its own probes.
    inquiry.question = [notice = *verdict] { return bare_message(notice); };
  }
  inquiry.done = [this, about](Inquiry::Outcome outcome) {
    if (outcome.answer) on_notice(about, *outcome.answer, true);
    if (outcome.opened) return end_probe(about, true);
    if (!outcome.failure) return end_probe(about, false);  // it is silent
    const ErrorCode code = outcome.failure->code();
    // A stranger can refuse in a worker's place.
    const bool here = !outcome.failure->remote() &&
                      (code == ErrorCode::overloaded || code == ErrorCode::unimplemented ||
                       code == ErrorCode::shutting_down || code == ErrorCode::internal);
    end_probe(about, here ? std::nullopt : std::optional(false));
  };
  agent_.peers().inquire(std::move(inquiry));
}

void MembershipService::answer(const MembershipProtocol::Answer& answer) {
  Admitted done;
  {
    base::MutexLock lock(mutex_);
    const auto found = tickets_.find(answer.ticket);
    if (found == tickets_.end()) return;
    done = std::move(found->second);
    tickets_.erase(found);
  }
  done(answer.refusal, !answer.elsewhere);
}

// ---- events

void MembershipService::on_link_lost(const WorkerInfo& peer, const Error& reason) {
  if (PeerLife* life = agent_.peers().life(peer)) life->loss_reported.store(true);
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

void MembershipService::on_heartbeat(const WorkerInfo& from, const Digests& digests) {
  step([&](MembershipProtocol& protocol) {
    return protocol.on_heartbeat(from, digests, Clock::now());
  });
}

void MembershipService::on_notice(const WorkerInfo& from, const transport::Message& message,
                                  bool opened_here) {
  try {
    const Notice notice = notice_in(message);
    // Over such a connection a worker only learns that one of its two ends is over.
    if (notice.step != Notice::Step::dead) return;
    if (notice.about != agent_.self() && notice.about != from) return;
    step([&](MembershipProtocol& protocol) {
      return opened_here ? protocol.on_notice(from, notice, Clock::now())
                         : protocol.on_unproven_verdict(from);
    });
  } catch (const Error&) {
    // The connection ends anyway.
  }
}

// ---- joining and leaving

void MembershipService::admit(const MemberCard& card, Admitted done) {
  step([&](MembershipProtocol& protocol) STITCH_NO_THREAD_SAFETY_ANALYSIS {
    const std::uint64_t ticket = next_ticket_++;
    tickets_.emplace(ticket, std::move(done));
    return protocol.admit(ticket, card, Clock::now());
  });
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

}  // namespace stitch::rpc
