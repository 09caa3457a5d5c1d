// One file, though long: each frame of a pass beside the step that it causes.
#include "stitch/dist_autograd/engine.h"

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/deadline.h"
#include "stitch/base/thread_state.h"
#include "stitch/dist_autograd/collected_work.h"
#include "stitch/dist_autograd/control_frames.h"
#include "stitch/dist_autograd/graph/device_order.h"
#include "stitch/dist_autograd/pass.h"
#include "stitch/dist_autograd/roots.h"
#include "stitch/rpc/agent/torch_state.h"
#include "stitch/rpc/default_streams.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/tensor_codec.h"

namespace stitch::dist_autograd {

int detail::register_engine() {
  static const int index =
      rpc::register_extension([](rpc::Agent& agent) -> std::unique_ptr<rpc::Extension> {
        return std::make_unique<Engine>(agent);
      });
  return index;
}

Engine::Engine(rpc::Agent& agent)
    : agent_(agent),
      contexts_(agent.self().id, agent.self().epoch),
      release_(agent, contexts_),
      recording_(agent, contexts_, release_) {
  for (std::uint16_t kind = wire::kFirstKind; kind <= wire::kLastKind; ++kind) {
    agent_.set_frame_handler(kind,
                             [this](rpc::InMessage message) { on_frame(std::move(message)); });
  }
}

Engine& Engine::of(rpc::Agent& agent) {
  return static_cast<Engine&>(agent.extension(detail::register_engine()));
}

// ---- passes

Engine::NewPass Engine::make_pass(const std::shared_ptr<ContextState>& context,
                                  std::vector<at::Tensor> roots, const Options& options,
                                  std::shared_ptr<AtSettled> at_settled) {
  context->throw_if_unusable();
  variable_list gradients = check_roots(roots, options);
  // They are taken up under default streams, by a thread whose state is fresh.
  for (const at::Tensor& gradient : gradients) {
    if (!is_on_device(gradient)) continue;
    const c10::Stream own = current_stream(gradient.device());
    order_streams(own, default_stream(own));
    keep_for(gradient, default_stream(own));
  }
  check_inputs(options.inputs);
  Pass::Settings settings;
  settings.run.retain_graph = options.retain_graph || options.create_graph;
  settings.run.create_graph = options.create_graph;
  settings.run.anomaly = torch::autograd::AnomalyMode::is_enabled();
  settings.run.allow_nan = !torch::autograd::AnomalyMode::should_check_nan();
  settings.run.only_inputs = !options.inputs.empty();
  const auto deadline =
      std::min(rpc::ExecutionContext::current().deadline, base::deadline_or_none(options.timeout));

  const PassId id{agent_.self().id, agent_.self().epoch, context->next_pass()};
  std::shared_ptr<Pass> pass;
  try {
    pass = std::make_shared<Pass>(*this, agent_.shared_from_this(), context, id, settings,
                                  std::move(at_settled));
    std::vector<Edge> edges;
    edges.reserve(roots.size());
    for (const at::Tensor& root : roots)
      edges.push_back(torch::autograd::impl::gradient_edge(root));
    pass->prepare(std::move(edges), leaf_set(options.inputs));
    static_cast<void>(context->open_pass(id, [&] { return pass; }));
  } catch (...) {
    context->close_pass(id);  // else its number would count as open
    throw;
  }
  agent_.events().record("pass begun", agent_.self().id.value(), agent_.self().epoch, id.counter);
  return {std::move(pass), std::move(gradients), deadline};
}

Future<void> Engine::backward_async(const std::shared_ptr<ContextState>& context,
                                    std::vector<at::Tensor> roots, const Options& options,
                                    std::shared_ptr<AtSettled> at_settled) {
  Promise<void> promise;
  auto future = promise.future();
  NewPass made = make_pass(context, std::move(roots), options, std::move(at_settled));
  made.pass->begin(std::move(made.gradients), std::move(promise), made.deadline);
  return future;
}

void Engine::backward(const std::shared_ptr<ContextState>& context, std::vector<at::Tensor> roots,
                      const Options& options, std::shared_ptr<AtSettled> at_settled) {
  const auto wait = [](Pass& pass, const Future<void>& future) {
    try {
      future.get();
    } catch (...) {
      pass.replay_warnings();
      throw;
    }
    pass.replay_warnings();
    // The pass has ordered the default streams after all that its nodes do here.
    rpc::current_streams_wait_for_default();
  };
  const auto run = [&](bool drive) {
    Promise<void> promise;
    const auto future = promise.future();
    NewPass made = make_pass(context, std::move(roots), options, std::move(at_settled));
    made.pass->collect_warnings();
    if (drive) {
      made.pass->begin_and_drive(std::move(made.gradients), std::move(promise), made.deadline);
    } else {
      made.pass->begin(std::move(made.gradients), std::move(promise), made.deadline);
    }
    wait(*made.pass, future);
  };
  if (rpc::Agent::delivers_here()) {  // it waits where it must not; nodes would keep others waiting
    rpc::Agent::outside_delivery([&] { run(false); });
    return;
  }
  static_cast<void>(rpc::has_fresh_torch_state());  // throws, if ever, while no pass is open
  run(true);
}

void Engine::on_frame(rpc::InMessage message) {
  const auto kind = message.view.kind();
  rpc::InArchive archive(message, message.view.body());
  if (kind == wire::kRelease) {
    wire::Release release;
    archive(release);
    archive.expect_end();
    const rpc::PeerLife* const home = agent_.peers().life(release.context.home);
    if (home == nullptr || home->info().epoch != release.context.epoch) return;  // it is over
    if (release.context.home == agent_.self().id)
      throw Error(ErrorCode::protocol,
                  "only its home may end context " + to_string(release.context));
    if (release.ended_from > release.context.counter)
      throw Error(ErrorCode::protocol, "contexts up to " + to_string(release.context) +
                                           " cannot have ended from " +
                                           std::to_string(release.ended_from) + " on");
    agent_.post_where_read([agent = agent_.shared_from_this(), this, from = message.from, release] {
      release_.on_release(from, release);
    });
    return;
  }
  wire::PassHeader header;
  if (kind == wire::kMark || kind == wire::kGradients) {
    bool collect = CollectedWork::collects();
    if (collect) {
      archive(header);
      collect = CollectedWork::collects(header);
    }
    auto boxed = std::make_unique<rpc::InMessage>(std::move(message));
    serve(collect, [agent = agent_.shared_from_this(), this, boxed = std::move(boxed)] {
      open_and_handle(std::move(*boxed));
    });
    return;
  }
  archive(header);
  handle(kind, header, find(header).pass, message, archive);
}

void Engine::handle(std::uint16_t kind, const wire::PassHeader& header,
                    const std::shared_ptr<Pass>& pass, const rpc::InMessage& message,
                    rpc::InArchive& archive) {
  switch (kind) {
    case wire::kAck: {
      wire::Ack ack;
      archive(ack);
      archive.expect_end();
      if (pass && pass->root() && pass->may_take_long()) {
        serve(CollectedWork::collects(header), [pass, from = message.from, ack = std::move(ack)] {
          CollectedWork slices(*pass);
          pass->on_ack(from, ack);
        });
      } else if (pass) {
        pass->on_ack(message.from, ack);
      }
      return;
    }
    case wire::kQuiet: {
      wire::OlderPasses older;
      archive(older);
      archive.expect_end();
      return on_quiet(header, pass, message.from, older);
    }
    case wire::kCloseMarking: {
      wire::OlderPasses older;
      archive(older);
      archive.expect_end();
      if (pass) {
        pass->on_close_marking(message.from, older);
      } else {
        refuse_to_end(header, message.from);
      }
      return;
    }
    case wire::kDone: {
      archive.expect_end();
      if (pass) pass->on_done(message.from);
      return;
    }
    default: {
      Error error(ErrorCode::internal, "");
      archive(error);
      archive.expect_end();
      on_abort(header, error);
      return;
    }
  }
}

void Engine::on_quiet(const wire::PassHeader& header, const std::shared_ptr<Pass>& pass,
                      const WorkerInfo& from, const wire::OlderPasses& older) {
  if (!pass) return refuse_to_end(header, from);
  if (!pass->may_take_long()) return pass->on_quiet(from, older);
  serve(CollectedWork::collects(header), [pass, from, older] {
    CollectedWork slices(*pass);
    pass->on_quiet(from, older);
  });
}

void Engine::serve(bool collect, base::UniqueFunction<void()> task) {
  if (collect) {
    CollectedWork::add(std::move(task));
  } else {
    agent_.post_where_read(std::move(task));
  }
}

Engine::Target Engine::find(const wire::PassHeader& header) const {
  auto context = contexts_.find(header.context);
  auto pass = context ? context->find_pass(header.pass) : nullptr;
  return {std::move(context), std::move(pass)};
}

// MARK and GRADIENTS: each may be the first message of its pass here.
void Engine::open_and_handle(rpc::InMessage message) {
  wire::PassHeader header;
  const WorkerInfo& from = message.from;
  try {
    rpc::InArchive archive(message, message.view.body());
    archive(header);
    if (!require_life(agent_, header.pass.root, header.pass.epoch, "the root of a pass"))
      throw Error(ErrorCode::disconnected, "the worker that began the pass is gone");
    const auto context = contexts_.find(header.context);
    if (!context) throw not_here(header.context);
    const auto pass = context->open_pass(header.pass, [&] {
      if (header.pass.root == agent_.self().id) {
        throw Error(ErrorCode::protocol,
                    "pass " + std::to_string(header.pass.counter) + " was not begun here");
      }
      agent_.events().record("pass joined", from.id.value(), from.epoch, header.pass.counter);
      return std::make_shared<Pass>(*this, agent_.shared_from_this(), context, header.pass,
                                    Pass::Settings::from_wire(header.flags));
    });
    if (!pass) return;  // it has ended here
    if (pass->flags() != header.flags)
      throw Error(ErrorCode::protocol, "the flags of the pass differ from those it began with");
    CollectedWork slices(*pass);  // which the message makes due
    if (message.view.kind() == wire::kMark) {
      wire::Mark mark;
      archive(mark);
      archive.expect_end();
      pass->on_mark(from, mark);
      return;
    }
    rpc::decode_tensors(message);
    wire::Ack ack;
    std::vector<wire::GradientEntry> entries;
    std::vector<at::Tensor> tensors;
    archive(ack, entries, tensors);
    archive.expect_end();
    message.tensors.clear();  // so that a sum may take over a gradient that has no other owner
    pass->on_gradients(from, ack, entries, std::move(tensors));
  } catch (...) {
    const Error error = to_error(std::current_exception());
    const Target found = find(header);
    if (found.pass) {
      found.pass->abort(error.with_prefix("message of " + stitch::to_string(from)));
      return;
    }
    const auto failure = found.context ? found.context->failure() : std::nullopt;
    send_abort(agent_, from, header, failure ? *failure : error.with_worker(agent_.self().name));
  }
}

// The root of a pass wants DONE of this worker, where it is not open. A correct ACK names those
// that take part, and these have it open until then, unless it has failed.
void Engine::refuse_to_end(const wire::PassHeader& header, const WorkerInfo& from) {
  if (from.id != header.pass.root || from.epoch != header.pass.epoch) return;
  const auto context = contexts_.find(header.context);
  if (context && context->has_ended(header.pass)) return;
  const auto failure = context ? context->failure() : std::nullopt;
  const Error why =
      context ? Error(ErrorCode::protocol,
                      stitch::to_string(agent_.self()) +
                          " was named as a participant of a pass in which it takes no part")
              : not_here(header.context);
  send_abort(agent_, from, header, failure ? *failure : why.with_worker(agent_.self().name));
}

Error Engine::not_here(const ContextId& context) const {
  const std::string here = stitch::to_string(agent_.self());
  return agent_.stopped() ? Error(ErrorCode::shutting_down, here + " is shutting down")
                          : Error(ErrorCode::cancelled,
                                  "context " + to_string(context) + " was released on " + here);
}

// Also for a pass that has ended here or is unknown here: the context's sums on this worker may be
// partial, or whole where those of others are partial.
void Engine::on_abort(const wire::PassHeader& header, const Error& error) noexcept {
  const auto [context, pass] = find(header);
  if (!context) return;
  const Error remote = error.with_remote(true);
  if (pass) pass->abort(remote);
  fail_context(*context, header, remote, {});
}

void Engine::fail_context(ContextState& context, const wire::PassHeader& header, const Error& error,
                          std::set<WorkerId> told) noexcept {
  spread_failure(context, header, std::move(told), context.fail(error));
}

void Engine::spread_failure(const ContextState& context, const wire::PassHeader& header,
                            std::set<WorkerId> told, ContextState::FailEffects effects) noexcept {
  if (effects.first) {
    for (const WorkerInfo& peer : effects.peers) told.insert(peer.id);
    told.insert(context.id().home);
    // No reader gets them any more. What a running pass still adds is cleared when that ends.
    agent_.post_where_read([gradients = context.gradients()] { gradients->clear(); });
  }
  told.erase(agent_.self().id);
  for (const WorkerId worker : told)
    send_abort(agent_, agent_.peers().find(worker), header, effects.error);
  for (const auto& pass : effects.passes) {
    if (pass->id() != header.pass) pass->abort(effects.error);
  }
}

// ---- the worker

void Engine::on_peer_lost(const WorkerInfo& peer, const Error& reason) {
  const rpc::PeerLife* const life = agent_.peers().life(peer);
  if (life == nullptr) return;  // nothing here is of a life that this worker never knew
  const WorkerInfo& lost = life->info();
  const auto gone = [&](const char* what) {
    return Error(ErrorCode::disconnected, std::string("the ") + what + " of the context, " +
                                              stitch::to_string(lost) +
                                              ", is gone: " + reason.what());
  };
  release_.end_contexts_of(lost, gone("home"));
  for (const auto& context : contexts_.all()) {
    for (const auto& pass : context->passes()) pass->on_peer_lost(lost, reason);
  }
  release_.end_contexts_told_by(lost, gone("last teller"));
}

// A life that is over is lost here, too, whether or not there was a connection to it.
void Engine::on_member_dead(const WorkerInfo& dead, const Error& reason) {
  on_peer_lost(dead, reason);
}

void Engine::on_member_left(const WorkerInfo& left) {
  on_peer_lost(left, Error(ErrorCode::disconnected, "it has left the world"));
}

std::size_t Engine::active() {
  std::size_t passes = 0;
  for (const auto& context : contexts_.all()) passes += context->passes().size();
  return passes;
}

void Engine::stop() {
  release_.end_all(
      Error(ErrorCode::shutting_down, stitch::to_string(agent_.self()) + " is shutting down")
          .with_worker(agent_.self().name));
}

// ---- lists and numbers for people and tests

rpc::Table Engine::table_of(const std::vector<std::shared_ptr<Pass>>& passes) {
  const auto now = rpc::Clock::now();
  rpc::Table table{
      "backward passes",
      {"context", "root", "root here", "age", "waits for", "nodes run", "thread", "thread state"}};
  for (const auto& pass : passes) {
    const auto progress = pass->progress();
    std::string awaited;
    for (const WorkerId worker : progress.awaited)
      awaited += (awaited.empty() ? "" : " ") + agent_.peers().find(worker).name;
    std::string state;
    if (progress.thread != 0) state = base::thread_state(progress.thread);
    table.add({to_string(pass->context_id()), agent_.peers().find(pass->id().root).name,
               pass->root() ? 1 : 0, now - progress.opened, std::move(awaited), progress.nodes_run,
               progress.thread, std::move(state)});
  }
  return table;
}

void Engine::report(rpc::Page page, rpc::Report& report) {
  if (page != rpc::Page::contexts) return;
  rpc::Table contexts{"contexts", {"context", "home", "links", "gradients", "failed"}};
  std::vector<std::shared_ptr<Pass>> passes;
  for (const auto& context : contexts_.all()) {
    const ContextId& id = context->id();
    const auto failure = context->failure();
    contexts.add({to_string(id), agent_.peers().find(id.home).name, context->send_count(),
                  context->gradients()->size(),
                  failure ? rpc::Cell(failure->what()) : rpc::Cell()});
    for (auto& pass : context->passes()) passes.push_back(std::move(pass));
  }
  report.push_back(std::move(contexts));
  report.push_back(table_of(passes));
}

void Engine::debug_info(std::map<std::string, std::int64_t>& numbers) {
  std::size_t passes = 0, past_passes = 0, links = 0, gradients = 0;
  const auto contexts = contexts_.all();
  for (const auto& context : contexts) {
    passes += context->passes().size();
    past_passes += context->past_passes_remembered();
    links += context->send_count();
    gradients += context->gradients()->size();
  }
  numbers["dist_autograd.contexts"] = static_cast<std::int64_t>(contexts.size());
  numbers["dist_autograd.passes"] = static_cast<std::int64_t>(passes);
  numbers["dist_autograd.links"] = static_cast<std::int64_t>(links);
  numbers["dist_autograd.gradients"] = static_cast<std::int64_t>(gradients);
  numbers["dist_autograd.ended_contexts_remembered"] =
      static_cast<std::int64_t>(contexts_.ended_remembered());
  numbers["dist_autograd.ended_passes_remembered"] = static_cast<std::int64_t>(past_passes);
  numbers["dist_autograd.gradient_links_sent"] = static_cast<std::int64_t>(gradients_sent_.load());
}

}  // namespace stitch::dist_autograd
