#include "stitch/dist_autograd/context_release.h"

#include <utility>

#include "stitch/dist_autograd/control_frames.h"
#include "stitch/dist_autograd/ended_context.h"
#include "stitch/dist_autograd/pass.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::dist_autograd {

std::shared_ptr<ContextState> ContextRelease::join(const ContextId& id, const WorkerInfo& from) {
  // A context of a life that is over has ended with it.
  if (!require_life(agent_, id.home, id.epoch, "the home of the context of a call")) return nullptr;
  if (id.home == agent_.self().id) return contexts_.find_or_join(id);
  auto context = contexts_.find_or_join(id, from);
  // The caller may have been lost before this call was handled: end_contexts_told_by() missed it.
  if (context && agent_.peers().lost(from) && context->remove_teller(from.id, from.epoch)) {
    static_cast<void>(contexts_.remove(id));
    return nullptr;
  }
  return context;
}

void ContextRelease::end_context(const std::shared_ptr<ContextState>& context) noexcept {
  const auto ended = context->end();
  static_cast<void>(contexts_.remove(context->id()));
  if (!ended.first) return;
  for (const auto& pass : ended.passes) pass->abort(ended_error(context->id()));
  for (const auto& pass : ended.passes) pass->wait_until_quiet();
  context->gradients()->clear();
  release(ended.peers, release_of_own(context->id()));
}

// The home ends the context. Any other worker says that it calls no more under it: the context ends
// with the last that has told the id, and later calls of that worker alone are not recorded, which
// its RELEASE may have overtaken.
void ContextRelease::on_release(const WorkerInfo& from, const wire::Release& release_of) noexcept {
  const ContextId& id = release_of.context;
  const bool from_home = from.id == id.home && from.epoch == id.epoch;
  std::vector<std::shared_ptr<ContextState>> over;
  if (auto context = from_home ? contexts_.remove(id) : contexts_.remove_told_by(id, from))
    over.push_back(std::move(context));
  if (from_home) {
    // Without this, what is remembered would grow while a context of that home goes on: of the
    // others, this worker takes part in some only.
    contexts_.add_ended(id.home, id.epoch, release_of.ended_from, id.counter);
    for (auto& each : contexts_.raise_low_water(id.home, id.epoch, release_of.low_water))
      over.push_back(std::move(each));
  }
  for (const auto& context : over) end_here(*context, ended_error(context->id()), from);
}

void ContextRelease::end_contexts_of(const WorkerInfo& lost, const Error& error) noexcept {
  for (const auto& context : contexts_.remove_home(lost.id, lost.epoch)) {
    for (const auto& pass : context->end().passes) pass->abort(error);
  }
}

void ContextRelease::end_contexts_told_by(const WorkerInfo& lost, const Error& error) noexcept {
  for (const auto& context : contexts_.all()) {
    if (!context->remove_teller(lost.id, lost.epoch)) continue;
    static_cast<void>(contexts_.remove(context->id()));
    end_here(*context, error, lost);
  }
}

void ContextRelease::end_all(const Error& error) noexcept {
  for (const auto& context : contexts_.remove_all()) {
    for (const auto& pass : context->end().passes) pass->abort(error);
  }
}

// Those that this worker told of the context have to hear it: all but `told` and the home.
void ContextRelease::end_here(ContextState& context, const Error& error, const WorkerInfo& told) {
  auto ended = context.end();
  for (const auto& pass : ended.passes) pass->abort(error);
  std::erase_if(ended.peers, [&](const WorkerInfo& peer) {
    return peer.id == told.id || peer.id == context.id().home;
  });
  release(ended.peers, {context.id(), 0, context.id().counter});
}

wire::Release ContextRelease::release_of_own(const ContextId& id) const {
  return {id, contexts_.low_water(), contexts_.ended_from(id.counter)};
}

void ContextRelease::release(const std::vector<WorkerInfo>& peers,
                             const wire::Release& release_of) {
  if (agent_.stopped()) return;
  for (const WorkerInfo& peer : peers) {
    if (peer.id == agent_.self().id) continue;
    rpc::OutMessage out(wire::kRelease);
    rpc::OutArchive archive(out);
    archive(release_of);
    agent_.send_while_possible(peer, std::move(out));
  }
}

}  // namespace stitch::dist_autograd
