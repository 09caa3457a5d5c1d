#include "stitch/rref/ledger_sender.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rref/frame_kinds.h"

namespace stitch::rref {
namespace {

using namespace std::chrono_literals;

// How long a ledger frame waits for a message that can carry it.
rpc::Clock::duration flush_delay(Urgency urgency) {
  switch (urgency) {
    case Urgency::soon:
      return 1ms;
    case Urgency::later:
      return 20ms;
    default:
      return 200ms;
  }
}
// A borrow of two ticks is registered; an operation unacknowledged for two ticks is resent.
constexpr auto kTickInterval = 500ms;
// The minimum time between the end of a message and the registration of a reference that outlives
// it: longer than a settlement waits for a message to carry it, so that a reference on its way back
// to its sender is settled first.
constexpr auto kKeptInterval = 50ms;

}  // namespace

LedgerSender::LedgerSender(rpc::Agent& agent, std::shared_ptr<Lifetime> lifetime)
    : lifetime_(std::move(lifetime)), agent_(&agent) {}

std::shared_ptr<rpc::Agent> LedgerSender::agent() const {
  base::MutexLock lock(mutex_);
  return agent_ == nullptr ? nullptr : agent_->weak_from_this().lock();
}

void LedgerSender::schedule(const Effects& effects) {
  for (const auto& [peer, urgency] : effects.flush) schedule_flush(peer, urgency);
  if (effects.kept) watch_kept();
}

void LedgerSender::stop() {
  base::MutexLock lock(mutex_);
  agent_ = nullptr;
  due_.clear();
}

// Where there is no memory for a timer, now.
void LedgerSender::schedule_flush(const WorkerLife& peer, Urgency urgency) noexcept {
  if (urgency == Urgency::none) return;
  try {
    set_timer(peer, urgency);
    start_ticking();
  } catch (const std::bad_alloc&) {
    {
      base::MutexLock lock(mutex_);
      due_.erase(peer);
    }
    try {
      if (const auto alive = agent()) flush(*alive, peer);
    } catch (const std::bad_alloc&) {
      // A tick sends it.
    }
  }
}

void LedgerSender::set_timer(const WorkerLife& peer, Urgency urgency) {
  const auto when = rpc::Clock::now() + flush_delay(urgency);
  std::shared_ptr<rpc::Agent> alive;
  {
    base::MutexLock lock(mutex_);
    if (agent_ == nullptr) return;
    const auto [found, fresh] = due_.try_emplace(peer, when);
    if (!fresh && found->second <= when) return;
    found->second = when;
    alive = agent_->weak_from_this().lock();
  }
  if (!alive) return;
  alive->loop().call_at(when, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->flush_due();
  });
}

// One by one, since the timer runs again when there was no memory for one.
void LedgerSender::flush_due() {
  const auto now = rpc::Clock::now();
  const auto alive = agent();
  if (!alive) return;
  for (;;) {
    decltype(due_)::node_type due;
    {
      base::MutexLock lock(mutex_);
      const auto at = std::find_if(due_.begin(), due_.end(),
                                   [&](const auto& each) { return each.second <= now; });
      if (at == due_.end()) return;
      due = due_.extract(at);
    }
    try {
      flush(*alive, due.key());
    } catch (const std::bad_alloc&) {
      base::MutexLock lock(mutex_);
      due_.insert(std::move(due));
      throw;
    }
  }
}

void LedgerSender::flush(rpc::Agent& agent, const WorkerLife& peer) {
  const rpc::Life* to = agent.peers().life(WorkerInfo{"", WorkerId(peer.id), peer.epoch});
  if (to == nullptr) return;
  for (;;) {  // until nothing is due: another message may have carried it
    rpc::OutMessage message(wire::kLedgerFrame);
    if (!lifetime_->encode_ledger(peer, message.frame.body())) return;
    frames_sent_.fetch_add(1);
    try {
      agent.send_control(to->info(), std::move(message));
    } catch (const std::exception&) {
      return;  // a later tick resends it
    }
  }
}

void LedgerSender::start_ticking() {
  const auto alive = agent();
  if (!alive) return;
  tick_timer_.start(alive->loop(), rpc::Clock::now() + kTickInterval, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->tick();
  });
}

// Out of memory, the timer runs again: so does this.
void LedgerSender::tick() {
  schedule(lifetime_->tick());  // it calls no waiter and releases no object
  tick_timer_.fired();
  if (lifetime_->needs_tick()) start_ticking();
}

void LedgerSender::watch_kept() {
  const auto alive = agent();
  if (!alive) return;
  kept_timer_.start(alive->loop(), rpc::Clock::now() + kKeptInterval, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->register_kept();
  });
}

void LedgerSender::register_kept() {
  kept_timer_.fired();
  schedule(lifetime_->register_kept());  // as in tick()
}

}  // namespace stitch::rref
