#include "stitch/dist_autograd/context_release.h"

#include <algorithm>
#include <map>
#include <utility>

#include "stitch/base/patience.h"
#include "stitch/dist_autograd/control_frames.h"
#include "stitch/dist_autograd/do_or_repeat.h"
#include "stitch/dist_autograd/ended_context.h"
#include "stitch/dist_autograd/pass.h"
#include "stitch/rpc/agent/send_reliably.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::dist_autograd {

namespace {

constexpr std::size_t kMaxHeldPerFrame = 512;

// Of a HOLD, what is still to be done.
struct HeldContexts {
  WorkerInfo participant;
  std::vector<std::uint64_t> counters;
};

}  // namespace

std::shared_ptr<ContextState> ContextRelease::join(const ContextId& id, const WorkerInfo& from) {
  // A context of a life that is over has ended with it.
  if (!require_life(agent_, id.home, id.epoch, "the home of the context of a call")) return nullptr;
  if (id.home == agent_.self().id) return contexts_.find_or_join(id);
  bool first = false;
  auto context = contexts_.find_or_join(id, from, first);
  if (!first) return context;
  // The caller may have been lost before this call was handled: hold_contexts_told_by() missed it.
  if (from.id != id.home && agent_.peers().lost(from)) hold(id.home, id.epoch, {id.counter});
  return context;
}

void ContextRelease::end_context(const std::shared_ptr<ContextState>& context) {
  const auto ended = base::patiently([&] { return context->end(); });
  static_cast<void>(contexts_.remove(context->id()));
  if (!ended.first) return;
  for (const auto& pass : ended.passes)
    base::patiently([&] { pass->abort(ended_error(context->id())); });
  for (const auto& pass : ended.passes) pass->wait_until_quiet();
  context->gradients()->clear();
  release(ended.peers, release_of_own(context->id()));
}

// Valid from the home, and from a worker that told this one the id. From others it is valid only if
// the context is unknown here: then it has overtaken the call that tells the id.
void ContextRelease::on_release(const WorkerInfo& from, const wire::Release& release_of) {
  const ContextId& id = release_of.context;
  const bool from_home = from.id == id.home && from.epoch == id.epoch;
  const auto known = contexts_.find(id);
  if (known && !from_home && !known->told_by(from.id, from.epoch)) return;
  std::vector<std::shared_ptr<ContextState>> over;
  base::patiently([&] {  // it is not sent again
    over.reserve(1);
    if (auto context = contexts_.remove(id)) over.push_back(std::move(context));
  });
  if (from_home) {
    // Without this, what is remembered would grow while a context of that home goes on: of the
    // others, this worker takes part in some only.
    base::patiently(
        [&] { contexts_.add_ended(id.home, id.epoch, release_of.ended_from, id.counter); });
    auto below = base::patiently(
        [&] { return contexts_.raise_low_water(id.home, id.epoch, release_of.low_water); });
    if (over.empty()) {
      over = std::move(below);
    } else if (!below.empty()) {
      base::patiently([&] { over.reserve(over.size() + below.size()); });
      for (auto& each : below) over.push_back(std::move(each));
    }
  }
  for (const auto& context : over) {
    auto ended = base::patiently([&] { return context->end(); });
    for (const auto& pass : ended.passes)
      base::patiently([&] { pass->abort(ended_error(context->id())); });
    std::erase_if(ended.peers,
                  [&](const WorkerInfo& peer) { return peer.id == from.id || peer.id == id.home; });
    release(ended.peers, {context->id(), release_of.low_water, context->id().counter});
  }
}

// `from` takes part in contexts of this worker, but the worker that told it so has died: from now
// on this worker tells it of their end.
void ContextRelease::on_hold(const WorkerInfo& from, const wire::Hold& hold) {
  // It is not sent again, so each of them is done once there is memory for it.
  auto left = base::patiently([&] {
    return std::make_shared<HeldContexts>(HeldContexts{from, hold.contexts});
  });
  do_or_repeat(agent_, [this, agent = agent_.shared_from_this(), left = std::move(left)] {
    for (; !left->counters.empty(); left->counters.pop_back())
      hold_own(left->participant, left->counters.back());
  });
}

void ContextRelease::hold_own(const WorkerInfo& participant, std::uint64_t counter) {
  // It has not begun, so it has not ended: who told of it was wrong. To release it would end those
  // that come between, or that one itself, for the participant.
  if (!contexts_.made(counter)) return;
  const ContextId id{agent_.self().id, agent_.self().epoch, counter};
  const auto context = contexts_.find(id);
  if (!context || !context->add_peer(participant)) {
    release({participant}, release_of_own(id));
  } else if (const auto failure = context->failure()) {
    send_abort(agent_, participant, {id, {}, 0}, *failure);
  }
}

void ContextRelease::end_contexts_of(const WorkerInfo& lost, const Error& error) {
  end_here(base::patiently([&] { return contexts_.remove_home(lost.id, lost.epoch); }), error);
}

void ContextRelease::end_all(const Error& error) {
  end_here(base::patiently([&] { return contexts_.remove_all(); }), error);
}

// Nothing finds these contexts any more: what is not done here would never be done.
void ContextRelease::end_here(const std::vector<std::shared_ptr<ContextState>>& contexts,
                              const Error& error) {
  for (const auto& context : contexts) {
    do_or_repeat(agent_, [context, error] {
      for (const auto& pass : context->end().passes) pass->abort(error);  // that repeats itself
    });
  }
}

void ContextRelease::hold_contexts_told_by(const WorkerInfo& lost) {
  std::map<std::pair<WorkerId, std::uint64_t>, std::vector<std::uint64_t>> by_home;
  for (const auto& context : contexts_.all()) {
    const ContextId& id = context->id();
    if (id.home == agent_.self().id || context->told_by(id.home, id.epoch) ||
        !context->told_by(lost.id, lost.epoch))
      continue;
    by_home[{id.home, id.epoch}].push_back(id.counter);
  }
  for (auto& [home, counters] : by_home) {
    for (std::size_t i = 0; i < counters.size(); i += kMaxHeldPerFrame) {
      const auto first = counters.begin() + static_cast<std::ptrdiff_t>(i);
      const auto count = std::min(kMaxHeldPerFrame, counters.size() - i);
      hold(home.first, home.second, {first, first + static_cast<std::ptrdiff_t>(count)});
    }
  }
}

void ContextRelease::hold(WorkerId home, std::uint64_t epoch, std::vector<std::uint64_t> contexts) {
  const WorkerInfo& present = agent_.peers().find(home);
  if (present.epoch != epoch) return;  // they have ended with the life of their home
  rpc::send_reliably(agent_, present, [held = wire::Hold{epoch, std::move(contexts)}] {
    rpc::OutMessage out(wire::kHold);
    rpc::OutArchive archive(out);
    archive(held);
    return out;
  });
}

wire::Release ContextRelease::release_of_own(const ContextId& id) const {
  return {id, contexts_.low_water(), contexts_.ended_from(id.counter)};
}

void ContextRelease::release(const std::vector<WorkerInfo>& peers,
                             const wire::Release& release_of) {
  if (agent_.stopped()) return;
  for (const WorkerInfo& peer : peers) {
    if (peer.id == agent_.self().id) continue;
    base::patiently([&] {
      rpc::send_reliably(agent_, peer, [release_of] {
        rpc::OutMessage out(wire::kRelease);
        rpc::OutArchive archive(out);
        archive(release_of);
        return out;
      });
    });
  }
}

}  // namespace stitch::dist_autograd
