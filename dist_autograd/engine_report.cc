// What a worker's contexts and passes are: lists and numbers for people and tests.
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/thread_state.h"
#include "stitch/dist_autograd/engine.h"
#include "stitch/dist_autograd/pass.h"

namespace stitch::dist_autograd {

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
