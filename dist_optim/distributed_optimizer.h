#pragma once

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/dist_optim/checkpoint.h"
#include "stitch/dist_optim/local_optimizer.h"
#include "stitch/rref/rref.h"

namespace stitch::optim {

// Has one owner step its parameters with the gradients of one context: the number of them.
using OwnersStep = std::function<Future<std::int64_t>()>;

// Starts all of them. Their results, or the first error, counting the others; when one cannot be
// started, neither are those after it, and its error, when those before it have ended, says how
// many parameters they stepped.
[[nodiscard]] Future<std::vector<std::int64_t>> start_steps(const std::vector<OwnersStep>& steps);
namespace detail {
inline std::atomic<bool> said_no_gradient{false};  // in this process
}
// How many parameters all owners together have stepped. For none it says so on stderr, once.
[[nodiscard]] std::int64_t sum_of(const std::vector<std::int64_t>& stepped);
// Waits for them. This thread's current streams then run after the steps of its own worker.
[[nodiscard]] std::int64_t sum_when_done(const Future<std::vector<std::int64_t>>& stepped);

// What backward_and_step() of backward_and_step.h does.
std::int64_t backward_and_steps(const dist_autograd::ContextHandle& context,
                                std::vector<at::Tensor> losses,
                                const dist_autograd::Options& options,
                                std::vector<OwnersStep> steps);
// What backward_and_step_async() does.
[[nodiscard]] Future<std::int64_t> backward_and_steps_async(
    const dist_autograd::ContextHandle& context, std::vector<at::Tensor> losses,
    const dist_autograd::Options& options, std::vector<OwnersStep> steps);

// Steps parameters on the workers that own them: each owner has a LocalOptimizer<Optimizer> for its
// share, and step() has all of them step with one context's gradients, in parallel. The
// math and the state are torch::optim's; `.grad` is never touched. A parameter without a gradient
// in the context (for example a frozen one) is not changed. Steps of different contexts,
// from any workers, are serialized per parameter only. A step is not one transaction: when an
// owner fails, others have stepped. Belongs to the worker that made it; its destruction frees the
// parts on the owners. Thread contract: any thread.
template <class Optimizer>
class DistributedOptimizer {
 public:
  using Options = OptionsOf<Optimizer>;  // torch::optim::AdamOptions, say

  // Makes the parts on the owners and waits for them. The names of the parameters are their
  // positions. Throws Error(invalid_argument) for no parameters, one given twice, or an optimizer
  // that cannot work this way, and remote_exception for what an owner refuses.
  DistributedOptimizer(const std::vector<RRef<at::Tensor>>& parameters, const Options& options,
                       StalePolicy policy = StalePolicy::detect)
      : DistributedOptimizer(numbered(parameters), options, policy) {}

  // The same with names, as RemoteModule::named_parameters() has them: state is saved and loaded by
  // name, so it survives another order and other owners. Two equal names: invalid_argument.
  DistributedOptimizer(std::initializer_list<NamedParameter> parameters, const Options& options,
                       StalePolicy policy = StalePolicy::detect)
      : DistributedOptimizer(std::vector<NamedParameter>(parameters), options, policy) {}
  // The same for a vector. (A template, so that a braced list can mean only one of the others.)
  template <std::same_as<NamedParameter> Parameter>
  DistributedOptimizer(const std::vector<Parameter>& parameters, const Options& options,
                       StalePolicy policy = StalePolicy::detect) {
    if constexpr (requires { OptimizerTraits<Optimizer>::kRefused; }) {
      throw Error(ErrorCode::invalid_argument, std::string("optimizer cannot be distributed: ") +
                                                   OptimizerTraits<Optimizer>::kRefused);
    } else {
      if (parameters.empty())
        throw Error(ErrorCode::invalid_argument, "optimizer has no parameters to step");
      std::map<WorkerId, std::pair<WorkerInfo, std::vector<NamedParameter>>> by_owner;
      std::unordered_set<std::string> names;
      std::unordered_set<std::string> references;
      for (const auto& [name, parameter] : parameters) {
        if (!references.insert(parameter.describe()).second) {
          throw Error(ErrorCode::invalid_argument,
                      "optimizer was given " + parameter.describe() + " twice");
        }
        if (!names.insert(name).second) {
          throw Error(ErrorCode::invalid_argument,
                      "optimizer was given two parameters named \"" + name + '"');
        }
        auto& [owner, owned] = by_owner[parameter.owner().id];
        owner = parameter.owner();
        owned.emplace_back(name, parameter);
      }
      const NamedValues values = options_to_values<Optimizer>(options);
      for (auto& [id, part] : by_owner)
        parts_.push_back({part.first, remote<LocalOptimizer<Optimizer>>(part.first, part.second,
                                                                        values, policy)});
      std::vector<Future<void>> created;
      for (const auto& part : parts_) created.push_back(part.optimizer.when_created());
      when_all(std::move(created)).get();
    }
  }

  // Steps with the gradients of `context` and waits for all owners. Returns how many parameters had
  // a gradient and were stepped. Throws the first owner's error, counting the others. On devices of
  // this worker the steps come between what this thread's current streams have and what they are
  // given afterwards.
  std::int64_t step(const dist_autograd::ContextHandle& context) {
    return sum_when_done(start(context));
  }
  // The same without waiting. The context must not end before the future is ready: owners that
  // know of its end refuse to step. Once it is ready, the default streams come after the steps.
  [[nodiscard]] Future<std::int64_t> step_async(const dist_autograd::ContextHandle& context) {
    return start(context).then(&sum_of);
  }
  // For backward_and_step(): appends what step() has each owner do.
  void add_steps(const dist_autograd::ContextId& context, std::vector<OwnersStep>& steps) const {
    for (const auto& part : parts_) {
      steps.emplace_back([optimizer = part.optimizer, context] {
        return optimizer.template rpc_async<&Local::step>(context);
      });
    }
  }

  // New options, for example a learning rate, for all parameters from the next step on. Waits.
  void set_options(const Options& options) {
    when_all(on_all<&LocalOptimizer<Optimizer>::set_options>(options_to_values<Optimizer>(options)))
        .get();
  }
  // The options that the parameters are stepped with. Waits.
  [[nodiscard]] Options options() const {
    return options_from_values<Optimizer>(
        parts_.front().optimizer.template rpc_sync<&LocalOptimizer<Optimizer>::options>());
  }

  // Writes the options and the state of all parameters (not the parameters) into `folder` on this
  // worker's file system, one file per owner (docs/checkpoints.md). An existing checkpoint stays
  // until the new one is complete and on the disk. Steps that run meanwhile are included for some
  // parameters only. Throws Error(invalid_argument) for a folder that cannot be written or is
  // another optimizer's.
  void save(const std::filesystem::path& folder) const;
  // Reads options and state back by the parameters' names, from whichever owners: all or nothing.
  // Steps must not run meanwhile. Throws Error(invalid_argument) naming the file and the parameter
  // when something is damaged, missing, or of another shape or another type of optimizer.
  void load(const std::filesystem::path& folder);

 private:
  using Local = LocalOptimizer<Optimizer>;
  // Has all owners step.
  [[nodiscard]] Future<std::vector<std::int64_t>> start(
      const dist_autograd::ContextHandle& context) const {
    context.throw_if_unusable();
    std::vector<OwnersStep> steps;
    add_steps(context.id(), steps);
    return start_steps(steps);
  }
  struct Part {
    WorkerInfo owner;
    RRef<Local> optimizer;
  };
  // Where a parameter is stepped.
  struct Place {
    const Part* part;
    std::uint64_t position;
    std::vector<std::int64_t> sizes;
    bool found = false;
  };

  static std::vector<NamedParameter> numbered(const std::vector<RRef<at::Tensor>>& parameters) {
    std::vector<NamedParameter> named;
    for (const auto& parameter : parameters)
      named.emplace_back(std::to_string(named.size()), parameter);
    return named;
  }
  template <auto Method, class... Arguments>
  auto on_all(const Arguments&... arguments) const {
    using Result = decltype(parts_.front().optimizer.template rpc_async<Method>(arguments...));
    std::vector<Result> results;
    for (const auto& part : parts_)
      results.push_back(part.optimizer.template rpc_async<Method>(arguments...));
    return results;
  }

  std::vector<Part> parts_;  // one for each owner; constant after construction
};

template <class Optimizer>
void DistributedOptimizer<Optimizer>::save(const std::filesystem::path& folder) const {
  ShardHeader header;
  header.optimizer = optimizer_name<Optimizer>();
  header.save_id = new_save_id();
  header.options = options_to_values<Optimizer>(options());
  for (const auto& part : parts_) header.owners.push_back(part.owner.name);
  const auto parameters = when_all(on_all<&Local::parameters>()).get();
  expect_folder_for(folder, header.optimizer, parameters);
  std::vector<std::unique_ptr<ShardWriter>> writers;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    header.owner = parts_[i].owner.name;
    auto& writer =
        *writers.emplace_back(std::make_unique<ShardWriter>(folder, header, parameters[i].size()));
    // The state of one parameter at a time, the next one on its way while one is written.
    const auto fetch = [&](std::size_t position) {
      return parts_[i].optimizer.template rpc_async<&Local::state>(position);
    };
    auto next = fetch(0);
    for (std::size_t position = 0; position < parameters[i].size(); ++position) {
      SavedParameter saved = parameters[i][position];
      saved.state = next.get();
      if (position + 1 < parameters[i].size()) next = fetch(position + 1);
      writer.add(saved);
    }
    writer.finish();
  }
  publish(folder, header.owners);
}

template <class Optimizer>
void DistributedOptimizer<Optimizer>::load(const std::filesystem::path& folder) {
  const std::string load_id = new_save_id();
  std::map<std::string, Place> places;
  const auto parameters = when_all(on_all<&Local::parameters>()).get();
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    for (std::size_t position = 0; position < parameters[i].size(); ++position)
      places[parameters[i][position].name] = {&parts_[i], position, parameters[i][position].sizes};
  }
  const auto place_of = [&](const std::filesystem::path& file, const SavedParameter& saved) {
    const auto place = places.find(saved.name);
    check_saved(file, saved, place == places.end() ? nullptr : &place->second.sizes);
    return place;
  };

  // Once to check everything, once to send it.
  const auto files = find_shards(folder);
  std::optional<NamedValues> saved_options;
  for (const auto& file : files) {
    const ShardHeader header = read_shard(file, [&](const SavedParameter& saved) {
      if (saved.state) (void)state_from_values<Optimizer>(*saved.state);
      place_of(file, saved)->second.found = true;
    });
    check_optimizer(file, header, optimizer_name<Optimizer>());
    (void)options_from_values<Optimizer>(header.options);
    saved_options = header.options;
  }
  for (const auto& [name, place] : places) {
    if (!place.found) throw missing_parameter(folder, name);
  }
  try {
    for (const auto& file : files) {
      std::optional<Future<void>> last;
      read_shard(file, [&](const SavedParameter& saved) {
        const Place& place = place_of(file, saved)->second;
        auto staged = place.part->optimizer.template rpc_async<&Local::stage>(
            load_id, place.position, saved.state);
        if (last) last->get();
        last = std::move(staged);
      });
      if (last) last->get();
    }
  } catch (...) {
    for (auto& discarded : on_all<&Local::discard>(load_id))
      static_cast<void>(base::failure_of([&] { discarded.get(); }));  // the first error counts
    throw;
  }
  when_all(on_all<&Local::commit>(load_id, *saved_options)).get();
}

}  // namespace stitch::optim
