#pragma once

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/dist_optim/local_optimizer.h"
#include "stitch/rref/rref.h"

namespace stitch::optim {

// Steps parameters wherever they live: each owner of parameters has a LocalOptimizer<Optimizer> for
// its share, and step() tells all of them to step with one context's gradients, side by side. The
// math and the state are torch::optim's; `.grad` is never touched. A parameter without a gradient
// in the context is left alone. Steps of different contexts, from whatever worker, are serialized
// per parameter and by nothing else. Belongs to the worker that made it; its destruction frees the
// parts on the owners. Thread contract: any thread.
template <class Optimizer>
class DistributedOptimizer {
 public:
  using Options = OptionsOf<Optimizer>;

  // Makes the parts on the owners and waits for them. Throws Error: invalid_argument for no
  // parameters, one given twice, or an optimizer that cannot work this way; what an owner refuses
  // (a tensor that is not a leaf requiring grad) comes as remote_exception.
  DistributedOptimizer(const std::vector<RRef<at::Tensor>>& parameters, const Options& options,
                       StalePolicy policy = StalePolicy::detect) {
    if constexpr (requires { OptimizerTraits<Optimizer>::kRefused; }) {
      throw Error(ErrorCode::invalid_argument, std::string("optimizer cannot be distributed: ") +
                                                   OptimizerTraits<Optimizer>::kRefused);
    } else {
      if (parameters.empty())
        throw Error(ErrorCode::invalid_argument, "optimizer has no parameters to step");
      std::map<WorkerId, std::pair<WorkerInfo, std::vector<RRef<at::Tensor>>>> by_owner;
      for (const auto& parameter : parameters) {
        auto& [owner, owned] = by_owner[parameter.owner().id];
        owner = parameter.owner();
        if (std::find(owned.begin(), owned.end(), parameter) != owned.end()) {
          throw Error(ErrorCode::invalid_argument,
                      "optimizer was given " + parameter.describe() + " twice");
        }
        owned.push_back(parameter);
      }
      const std::string encoded = encode_options(options);
      for (auto& [id, part] : by_owner)
        parts_.push_back({part.first, remote<LocalOptimizer<Optimizer>>(part.first, part.second,
                                                                        encoded, policy)});
      std::vector<Future<void>> created;
      for (const auto& part : parts_) created.push_back(part.optimizer.when_created());
      when_all(std::move(created)).get();
    }
  }

  // Steps with the gradients that `context` has gathered, and waits until all owners have. Throws
  // the first owner's error, counting the others.
  void step(const dist_autograd::ContextHandle& context) { step_async(context).get(); }
  [[nodiscard]] Future<void> step_async(const dist_autograd::ContextHandle& context) {
    const dist_autograd::ContextId id = context.id();
    std::vector<Future<std::int64_t>> steps;
    for (const auto& part : parts_)
      steps.push_back(part.optimizer.template rpc_async<&LocalOptimizer<Optimizer>::step>(id));
    return when_all(std::move(steps)).then([](const std::vector<std::int64_t>&) {});
  }

  // New options, a learning rate say, for all parameters from the next step on. Waits.
  void set_options(const Options& options) {
    const std::string encoded = encode_options(options);
    on_all<&LocalOptimizer<Optimizer>::set_options>([&](const WorkerInfo&) { return encoded; });
  }

  // Writes the optimizers' state (not the parameters) to `folder`, on each owner's own file system:
  // one file per owner,
  // "<owner>.optimizer". load() reads it back into an optimizer of the same type over the same
  // parameters in the same order; when an owner finds other shapes or counts in its file, its state
  // stays as it was and it throws (remote_exception).
  void save(const std::string& folder) {
    on_all<&LocalOptimizer<Optimizer>::save>(
        [&](const WorkerInfo& owner) { return file_of(folder, owner); });
  }
  void load(const std::string& folder) {
    on_all<&LocalOptimizer<Optimizer>::load>(
        [&](const WorkerInfo& owner) { return file_of(folder, owner); });
  }

 private:
  struct Part {
    WorkerInfo owner;
    RRef<LocalOptimizer<Optimizer>> optimizer;
  };
  static std::string file_of(const std::string& folder, const WorkerInfo& owner) {
    return (std::filesystem::path(folder) / (owner.name + ".optimizer")).string();
  }
  template <auto Method, class Argument>
  void on_all(Argument argument) {
    std::vector<Future<void>> done;
    for (const auto& part : parts_)
      done.push_back(part.optimizer.template rpc_async<Method>(argument(part.owner)));
    when_all(std::move(done)).get();
  }

  std::vector<Part> parts_;  // one for each owner; constant after construction
};

}  // namespace stitch::optim
