#include "stitch/dist_autograd/engine.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/dist_autograd/pass.h"
#include "stitch/dist_autograd/roots.h"
#include "stitch/rpc/agent/incoming_call.h"
#include "stitch/rpc/message/tensor_codec.h"

namespace stitch::dist_autograd {

namespace {

constexpr std::size_t kShortText = 256;
constexpr std::size_t kHeldAtOnce = 512;
constexpr std::chrono::milliseconds kSendAgain{10};

// Of a context with links over gradients: not every pass uses them, and fast mode waits for all.
Error fast_mode_error() {
  return Error(ErrorCode::invalid_argument,
               "fast mode cannot be used with create_graph: gradients that were sent are links "
               "that a later pass need not use; use exact mode");
}

}  // namespace

int detail::register_engine() {
  static const int index =
      rpc::register_extension([](rpc::Agent& agent) -> std::unique_ptr<rpc::Extension> {
        return std::make_unique<Engine>(agent);
      });
  return index;
}

Engine::Engine(rpc::Agent& agent) : agent_(agent), contexts_(agent.self().id, agent.self().epoch) {
  for (std::uint16_t kind = wire::kMark; kind <= wire::kHold; ++kind) {
    agent_.set_frame_handler(kind,
                             [this](rpc::InMessage message) { on_frame(std::move(message)); });
  }
}

Engine& Engine::of(rpc::Agent& agent) {
  return static_cast<Engine&>(agent.extension(detail::register_engine()));
}

// ---- passes

Future<void> Engine::backward(const std::shared_ptr<ContextState>& context,
                              std::vector<at::Tensor> roots, const Options& options) {
  context->throw_if_unusable();
  variable_list gradients = check_roots(roots, options);
  if (options.mode == Mode::fast && (options.create_graph || context->has_gradient_links()))
    throw fast_mode_error();
  Pass::Settings settings;
  settings.run.retain_graph = options.retain_graph || options.create_graph;
  settings.run.create_graph = options.create_graph;
  settings.run.anomaly = torch::autograd::AnomalyMode::is_enabled() &&
                         torch::autograd::AnomalyMode::should_check_nan();
  settings.fast = options.mode == Mode::fast;
  const auto deadline =
      std::min(rpc::ExecutionContext::current().deadline, base::deadline_or_none(options.timeout));

  const PassId id{agent_.self().id, agent_.self().epoch, context->next_pass()};
  const auto pass = std::make_shared<Pass>(*this, agent_.shared_from_this(), context, id, settings);
  std::vector<Edge> edges;
  edges.reserve(roots.size());
  for (const at::Tensor& root : roots) edges.push_back(torch::autograd::impl::gradient_edge(root));
  pass->prepare(std::move(edges));
  static_cast<void>(context->open_pass(id, [&] { return pass; }));
  Promise<void> promise;
  auto future = promise.future();
  pass->begin(std::move(gradients), std::move(promise), deadline);
  return future;
}

void Engine::on_frame(rpc::InMessage message) {
  const auto kind = message.view.kind();
  rpc::InArchive archive(message, message.view.body());
  if (kind == wire::kRelease) {
    wire::Release release;
    archive(release);
    archive.expect_end();
    expect_life(release.context.home, release.context.epoch,
                "the home of a context that has ended");
    if (release.context.home == agent_.self().id)
      throw Error(ErrorCode::protocol,
                  "only its home may end context " + to_string(release.context));
    agent_.post([agent = agent_.shared_from_this(), this, from = message.from, release] {
      on_release(from, release);
    });
    return;
  }
  if (kind == wire::kHold) {
    wire::Hold hold;
    archive(hold);
    archive.expect_end();
    expect_life(agent_.self().id, hold.epoch, "the home of contexts that are held");
    agent_.post([agent = agent_.shared_from_this(), this, from = message.from,
                 hold = std::move(hold)] { on_hold(from, hold); });
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
      on_abort(message.from, header, error);
      return;
    }
  }
}

// What may be the first that this worker hears of a pass.
void Engine::open_and_handle(rpc::InMessage message) {
  wire::PassHeader header;
  const WorkerInfo from = message.from;
  try {
    rpc::InArchive archive(message, message.view.body());
    archive(header);
    expect_life(header.pass.root, header.pass.epoch, "the root of a pass");
    const auto context = contexts_.find(header.context);
    if (!context) {
      const std::string here = stitch::to_string(agent_.self());
      refuse(from, header,
             agent_.stopped() ? Error(ErrorCode::shutting_down, here + " is shutting down")
                              : Error(ErrorCode::cancelled, "context " + to_string(header.context) +
                                                                " was released on " + here));
      return;
    }
    if ((header.flags & wire::PassHeader::kFast) != 0 && context->has_gradient_links())
      throw fast_mode_error();
    const auto pass = context->open_pass(header.pass, [&] {
      return std::make_shared<Pass>(*this, agent_.shared_from_this(), context, header.pass,
                                    Pass::Settings::from_wire(header.flags));
    });
    if (!pass) return;  // it has ended here
    if (message.view.kind() == wire::kMark) {
      wire::Mark mark;
      archive(mark);
      archive.expect_end();
      pass->on_mark(from, mark);
      return;
    }
    rpc::decode_tensors(message);
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
    const auto failure = context ? context->failure() : std::nullopt;
    if (pass) {
      pass->abort(error.with_prefix("message of " + stitch::to_string(from)));
    } else if (failure) {
      send_abort(from, header, *failure);
    } else {
      refuse(from, header, error);
    }
  }
}

void Engine::refuse(const WorkerInfo& to, const wire::PassHeader& header, const Error& error) {
  send_abort(to, header, error.with_worker(agent_.self().name));
}

// Also of a pass that has ended here, or that this worker has not heard of: its sums here may be
// partial, or whole where others are partial.
void Engine::on_abort(const WorkerInfo&, const wire::PassHeader& header, const Error& error) {
  const auto context = contexts_.find(header.context);
  if (!context) return;
  if (const auto pass = context->find_pass(header.pass)) pass->abort(error.with_remote(true));
  auto failing = context->fail(error.with_remote(true));
  if (failing.first) spread_failure(*context, header, std::move(failing), {});
}

void Engine::spread_failure(const ContextState& context, const wire::PassHeader& header,
                            ContextState::Failing failing, std::set<WorkerId> told) {
  if (failing.first) {
    for (const WorkerInfo& peer : failing.peers) told.insert(peer.id);
    told.insert(context.id().home);
    // Nobody will see them. What a pass that still runs adds goes when that ends.
    agent_.post([gradients = context.gradients()] { gradients->clear(); });
  }
  told.erase(agent_.self().id);
  for (const WorkerId to : told) send_abort(agent_.peers().find(to), header, failing.error);
  for (const auto& pass : failing.passes) {
    if (pass->id() != header.pass) pass->abort(failing.error);
  }
}

void Engine::send_abort(const WorkerInfo& to, const wire::PassHeader& header, const Error& error) {
  // A text may be longer than a frame.
  const std::size_t most = std::max(kShortText, agent_.options().max_frame_bytes / 2);
  const std::string text = error.what();
  const Error sendable = text.size() <= most ? error
                                             : Error(error.code(), text.substr(0, most))
                                                   .with_worker(error.worker())
                                                   .with_function(error.function())
                                                   .with_remote(error.remote());
  tell(to, [header, sendable] {
    rpc::OutMessage out(wire::kAbort);
    rpc::OutArchive archive(out);
    archive(header, sendable);
    return out;
  });
}

// A control frame arrives, or its peer is lost and both sides are told. Only a lack of memory keeps
// it from being made, and passes.
void Engine::tell(const WorkerInfo& to, std::function<rpc::OutMessage()> make) {
  try {
    agent_.send_control(to, make());
  } catch (...) {
    if (to_error(std::current_exception()).code() == ErrorCode::out_of_range) return;  // for good
    if (agent_.stopped() || agent_.peers().lost(to.id)) return;
    agent_.loop().call_at(rpc::Clock::now() + kSendAgain, [weak = agent_.weak_from_this(), this, to,
                                                           make = std::move(make)]() mutable {
      if (const auto agent = weak.lock()) tell(to, std::move(make));
    });
  }
}

void Engine::expect_life(WorkerId worker, std::uint64_t epoch, const char* what) {
  if (worker.value() < agent_.world_size() && agent_.peers().find(worker).epoch == epoch) return;
  throw Error(ErrorCode::protocol, std::string(what) + " is worker " +
                                       std::to_string(worker.value()) + " in epoch " +
                                       std::to_string(epoch) + ", which does not exist");
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

// From the home, or from a worker that had told this one the id. From others it means nothing, as
// long as the context is not known here at all: then the call that would make it known has been
// overtaken.
void Engine::on_release(const WorkerInfo& from, const wire::Release& release_of) {
  const ContextId& id = release_of.context;
  const bool from_home = from.id == id.home;
  const auto known = contexts_.find(id);
  if (known && !from_home && !known->told_by(from.id)) return;
  std::vector<std::shared_ptr<ContextState>> over;
  if (auto context = contexts_.remove(id)) over.push_back(std::move(context));
  if (from_home) {
    for (auto& each : contexts_.raise_low_water(id.home, id.epoch, release_of.low_water))
      over.push_back(std::move(each));
  }
  for (const auto& context : over) {
    auto ending = context->end();
    const Error error(ErrorCode::cancelled, "context " + to_string(context->id()) + " has ended");
    for (const auto& pass : ending.passes) pass->abort(error);
    std::erase_if(ending.peers,
                  [&](const WorkerInfo& peer) { return peer.id == from.id || peer.id == id.home; });
    release(ending.peers, {context->id(), release_of.low_water});
  }
}

// `from` takes part in contexts of this worker, but whoever told it so has died: from now on this
// worker tells it of their end.
void Engine::on_hold(const WorkerInfo& from, const wire::Hold& hold) {
  for (const std::uint64_t counter : hold.contexts) {
    const ContextId id{agent_.self().id, agent_.self().epoch, counter};
    const auto context = contexts_.find(id);
    if (!context || !context->add_peer(from)) {
      release({from}, {id, contexts_.low_water()});
    } else if (const auto failure = context->failure()) {
      send_abort(from, {id, {}, 0}, *failure);
    }
  }
}

void Engine::hold_contexts_told_by(const WorkerInfo& lost) {
  std::map<std::pair<WorkerId, std::uint64_t>, std::vector<std::uint64_t>> by_home;
  for (const auto& context : contexts_.all()) {
    const ContextId& id = context->id();
    if (id.home == agent_.self().id || context->told_by(id.home) || !context->told_by(lost.id))
      continue;
    by_home[{id.home, id.epoch}].push_back(id.counter);
  }
  for (auto& [home, counters] : by_home) {
    for (std::size_t i = 0; i < counters.size(); i += kHeldAtOnce) {
      const auto first = counters.begin() + static_cast<std::ptrdiff_t>(i);
      const auto count = std::min(kHeldAtOnce, counters.size() - i);
      hold(home.first, home.second, {first, first + static_cast<std::ptrdiff_t>(count)});
    }
  }
}

void Engine::hold(WorkerId home, std::uint64_t epoch, std::vector<std::uint64_t> contexts) {
  tell(agent_.peers().find(home), [held = wire::Hold{epoch, std::move(contexts)}] {
    rpc::OutMessage out(wire::kHold);
    rpc::OutArchive archive(out);
    archive(held);
    return out;
  });
}

void Engine::release(const std::vector<WorkerInfo>& peers, const wire::Release& release_of) {
  if (agent_.stopped()) return;
  for (const WorkerInfo& peer : peers) {
    if (peer.id == agent_.self().id) continue;
    tell(peer, [release_of] {
      rpc::OutMessage out(wire::kRelease);
      rpc::OutArchive archive(out);
      archive(release_of);
      return out;
    });
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
  hold_contexts_told_by(peer);
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
