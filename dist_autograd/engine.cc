#include "stitch/dist_autograd/engine.h"

#include <algorithm>
#include <utility>

#include "stitch/dist_autograd/pass.h"
#include "stitch/dist_autograd/roots.h"
#include "stitch/rpc/incoming_call.h"
#include "stitch/rpc/tensor_codec.h"

namespace stitch::dist_autograd {

int detail::register_engine() {
  static const int index = register_extension(
      [](Agent& agent) -> std::unique_ptr<Extension> { return std::make_unique<Engine>(agent); });
  return index;
}

Engine::Engine(Agent& agent) : agent_(agent), contexts_(agent.self().id, agent.self().epoch) {
  for (std::uint16_t kind = wire::kMark; kind <= wire::kRelease; ++kind) {
    agent_.set_frame_handler(kind, [this](InMessage message) { on_frame(std::move(message)); });
  }
}

Engine& Engine::of(Agent& agent) {
  return static_cast<Engine&>(agent.extension(detail::register_engine()));
}

// ---- passes

Future<void> Engine::backward(const std::shared_ptr<ContextState>& context,
                              std::vector<at::Tensor> roots, const Options& options) {
  variable_list gradients = check_roots(roots, options);
  if (options.mode == Mode::fast && (options.create_graph || context->has_gradient_links())) {
    throw Error(ErrorCode::invalid_argument,
                "fast mode cannot be used with create_graph: gradients that were sent are links "
                "that a later pass need not use; use exact mode");
  }
  Pass::Settings settings;
  settings.run.retain_graph = options.retain_graph || options.create_graph;
  settings.run.create_graph = options.create_graph;
  settings.run.anomaly = torch::autograd::AnomalyMode::is_enabled() &&
                         torch::autograd::AnomalyMode::should_check_nan();
  settings.fast = options.mode == Mode::fast;
  auto deadline = Ambient::current().deadline;
  if (options.timeout.count() > 0 && options.timeout < Clock::time_point::max() - Clock::now())
    deadline = std::min(deadline, Clock::now() + options.timeout);

  const PassId id{agent_.self().id, next_pass_.fetch_add(1, std::memory_order_relaxed)};
  const auto pass = std::make_shared<Pass>(*this, agent_.shared_from_this(), context, id, settings);
  std::vector<Edge> edges;
  edges.reserve(roots.size());
  for (const at::Tensor& root : roots) edges.push_back(torch::autograd::impl::gradient_edge(root));
  pass->prepare(std::move(edges));
  if (!context->open_pass(id, [&] { return pass; })) {
    throw Error(ErrorCode::cancelled, "context " + to_string(context->id()) + " has ended");
  }
  Promise<void> promise;
  auto future = promise.future();
  pass->begin(std::move(gradients), std::move(promise), deadline);
  return future;
}

void Engine::on_frame(InMessage message) {
  const auto kind = message.view.kind();
  InArchive archive(message, message.view.body());
  if (kind == wire::kRelease) {
    wire::Release release;
    archive(release);
    archive.expect_end();
    agent_.post([agent = agent_.shared_from_this(), this, from = message.from, release] {
      on_release(from, release);
    });
    return;
  }
  if (kind == wire::kMark || kind == wire::kGradients) {
    agent_.post([agent = agent_.shared_from_this(), this, message = std::move(message)]() mutable {
      open_and_handle(std::move(message));
    });
    return;
  }
  wire::PassHeader header;
  archive(header);
  const auto context = contexts_.find(header.context);
  const auto pass = context ? context->find_pass(header.pass) : nullptr;
  switch (kind) {
    case wire::kAck: {
      wire::Ack ack;
      archive(ack);
      archive.expect_end();
      if (pass) pass->on_ack(message.from, ack);
      return;
    }
    case wire::kSettle:
      archive.expect_end();
      if (pass) pass->on_settle(message.from);
      return;
    case wire::kDone: {
      wire::Done done;
      archive(done);
      archive.expect_end();
      if (pass) pass->on_done(message.from, done);
      return;
    }
    default: {
      Error error(ErrorCode::internal, "");
      archive(error);
      archive.expect_end();
      if (pass) {
        pass->on_abort(message.from, error);
      } else if (context) {
        context->close_pass(header.pass);
        if (context->note_abort(header.pass)) relay_abort(*context, message.from, header, error);
      }
      return;
    }
  }
}

// What may be the first that this worker hears of a pass.
void Engine::open_and_handle(InMessage message) {
  wire::PassHeader header;
  const WorkerInfo from = message.from;
  try {
    InArchive archive(message, message.view.body());
    archive(header);
    static_cast<void>(
        agent_.peers().find(header.pass.root));  // throws for a worker that does not exist
    const auto context = contexts_.find(header.context);
    if (!context) {
      const std::string here = stitch::to_string(agent_.self());
      refuse(from, header,
             agent_.stopped() ? Error(ErrorCode::shutting_down, here + " is shutting down")
                              : Error(ErrorCode::cancelled, "context " + to_string(header.context) +
                                                                " was released on " + here));
      return;
    }
    const auto pass = context->open_pass(header.pass, [&] {
      return std::make_shared<Pass>(*this, agent_.shared_from_this(), context, header.pass,
                                    Pass::Settings::from_wire(header.flags));
    });
    if (!pass) return;  // it has ended here: an abort overtook this
    if (message.view.kind() == wire::kMark) {
      wire::Mark mark;
      archive(mark);
      archive.expect_end();
      pass->on_mark(from, mark);
      return;
    }
    decode_tensors(message);
    std::vector<wire::GradientEntry> entries;
    std::vector<at::Tensor> tensors;
    archive(entries, tensors);
    archive.expect_end();
    message.tensors.clear();  // so that whoever adds a gradient up may be its only holder
    pass->on_gradients(from, std::move(entries), std::move(tensors));
  } catch (...) {
    const Error error = to_error(std::current_exception());
    const auto context = contexts_.find(header.context);
    const auto pass = context ? context->find_pass(header.pass) : nullptr;
    if (pass) {
      pass->abort(error.with_prefix("message of " + stitch::to_string(from)));
    } else {
      refuse(from, header, error);
    }
  }
}

void Engine::refuse(const WorkerInfo& to, const wire::PassHeader& header, const Error& error) {
  send_abort(to, header, error.with_worker(agent_.self().name));
}

// The pass has ended here, but whoever failed may not reach those that this worker can.
void Engine::relay_abort(const ContextState& context, const WorkerInfo& from,
                         const wire::PassHeader& header, const Error& error) {
  for (const WorkerInfo& peer : context.peers()) {
    if (peer.id != from.id && peer.id != agent_.self().id) send_abort(peer, header, error);
  }
}

void Engine::send_abort(const WorkerInfo& to, const wire::PassHeader& header, const Error& error) {
  try {
    OutMessage out(wire::kAbort);
    OutArchive archive(out);
    archive(header, error);
    agent_.send_frame(to, std::move(out));
  } catch (const std::exception&) {
    // It learns from its own loss of this worker.
  }
}

// ---- contexts

void Engine::end_context(const std::shared_ptr<ContextState>& context) {
  static_cast<void>(contexts_.remove(context->id()));
  const auto ending = context->end();
  if (!ending.first) return;
  const Error over(ErrorCode::cancelled, "context " + to_string(context->id()) + " has ended");
  for (const auto& pass : ending.passes) pass->abort(over);
  for (const auto& pass : ending.passes) pass->wait_until_quiet();
  context->gradients()->clear();
  release(ending.peers, {context->id(), contexts_.low_water()});
}

void Engine::on_release(const WorkerInfo& from, const wire::Release& release_of) {
  const auto context = contexts_.remove(release_of.context);
  contexts_.raise_low_water(release_of.context.home, release_of.context.epoch,
                            release_of.low_water);
  if (!context) return;
  auto ending = context->end();
  const Error over(ErrorCode::cancelled, "context " + to_string(context->id()) + " has ended");
  for (const auto& pass : ending.passes) pass->abort(over);
  std::erase_if(ending.peers, [&](const WorkerInfo& peer) {
    return peer.id == from.id || peer.id == release_of.context.home;
  });
  release(ending.peers, release_of);
}

void Engine::release(const std::vector<WorkerInfo>& peers, const wire::Release& release_of) {
  if (agent_.stopped()) return;
  for (const WorkerInfo& peer : peers) {
    if (peer.id == agent_.self().id) continue;
    try {
      OutMessage out(wire::kRelease);
      OutArchive archive(out);
      archive(release_of);
      agent_.send_frame(peer, std::move(out));
    } catch (const std::exception&) {
      // A peer that cannot be reached is lost, and drops the contexts of a lost home by itself.
    }
  }
}

void Engine::on_peer_lost(const WorkerInfo& peer, const Error& reason) {
  const Error gone(ErrorCode::disconnected, "the home of the context, " + stitch::to_string(peer) +
                                                ", is gone: " + reason.what());
  for (const auto& context : contexts_.remove_home(peer.id, peer.epoch)) {
    for (const auto& pass : context->end().passes) pass->abort(gone);
  }
  for (const auto& context : contexts_.all()) {
    for (const auto& pass : context->passes()) pass->on_peer_lost(peer, reason);
  }
}

std::size_t Engine::active() {
  std::size_t passes = 0;
  for (const auto& context : contexts_.all()) passes += context->passes().size();
  return passes;
}

void Engine::stop() {
  const Error over =
      Error(ErrorCode::shutting_down, stitch::to_string(agent_.self()) + " is shutting down")
          .with_worker(agent_.self().name);
  for (const auto& context : contexts_.remove_all()) {
    for (const auto& pass : context->end().passes) pass->abort(over);
  }
}

void Engine::debug_info(std::map<std::string, std::int64_t>& numbers) {
  std::size_t passes = 0, links = 0, gradients = 0;
  const auto contexts = contexts_.all();
  for (const auto& context : contexts) {
    passes += context->passes().size();
    links += context->send_count();
    gradients += context->gradients()->size();
  }
  numbers["dist_autograd.contexts"] = static_cast<std::int64_t>(contexts.size());
  numbers["dist_autograd.passes"] = static_cast<std::int64_t>(passes);
  numbers["dist_autograd.links"] = static_cast<std::int64_t>(links);
  numbers["dist_autograd.gradients"] = static_cast<std::int64_t>(gradients);
  numbers["dist_autograd.ended_contexts_remembered"] =
      static_cast<std::int64_t>(contexts_.ended_remembered());
  numbers["dist_autograd.gradient_links_sent"] = static_cast<std::int64_t>(gradients_sent_.load());
}

}  // namespace stitch::dist_autograd
