#include "stitch/rref/agent/ledger_sender.h"

#include <chrono>
#include <utility>

#include "stitch/rref/agent/frame_kinds.h"

namespace stitch::rref {
namespace {

using namespace std::chrono_literals;

// What is decided meanwhile is sent together.
constexpr auto kFlushDelay = 1ms;
// The minimum time between the end of a message and the registration of a reference that outlives
// it: longer than a settlement takes, so that a reference on its way back to its sender is settled
// first.
constexpr auto kKeptInterval = 50ms;

}  // namespace

LedgerSender::LedgerSender(rpc::Agent& agent, std::shared_ptr<Lifetime> lifetime)
    : lifetime_(std::move(lifetime)), agent_(&agent) {}

std::shared_ptr<rpc::Agent> LedgerSender::agent() const {
  base::MutexLock lock(mutex_);
  return agent_ == nullptr ? nullptr : agent_->weak_from_this().lock();
}

void LedgerSender::schedule(const Effects& effects) noexcept {
  if (effects.flush) start(flush_timer_, kFlushDelay, &LedgerSender::flush);
  if (effects.kept) start(kept_timer_, kKeptInterval, &LedgerSender::register_kept);
}

void LedgerSender::stop() {
  base::MutexLock lock(mutex_);
  agent_ = nullptr;
}

void LedgerSender::start(SingleTimer& timer, rpc::Clock::duration after,
                         void (LedgerSender::*then)()) {
  if (timer.runs()) return;
  const auto alive = agent();
  if (!alive) return;
  timer.start(alive->loop(), rpc::Clock::now() + after, [weak = weak_from_this(), then] {
    if (const auto self = weak.lock()) (self.get()->*then)();
  });
}

void LedgerSender::flush() {
  flush_timer_.fired();  // first: what comes later has another one
  const auto alive = agent();
  if (!alive) return;
  for (const WorkerLife& peer : lifetime_->due()) {
    const rpc::PeerLife* to = alive->peers().life(WorkerInfo{"", WorkerId(peer.id), peer.epoch});
    if (to == nullptr) continue;
    for (;;) {
      rpc::OutMessage message(wire::kLedgerFrame);
      if (!lifetime_->encode_ledger(peer, message.frame.body())) break;
      frames_sent_.fetch_add(1);
      alive->send_while_possible(to->info(), std::move(message));
    }
  }
}

void LedgerSender::register_kept() {
  kept_timer_.fired();
  schedule(lifetime_->register_kept());  // it calls no waiter and releases no object
}

}  // namespace stitch::rref
