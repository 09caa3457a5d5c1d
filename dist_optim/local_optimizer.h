#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stitch/dist_autograd/ids.h"
#include "stitch/dist_optim/checkpoint.h"
#include "stitch/dist_optim/context_gradients.h"
#include "stitch/dist_optim/optimizer_options.h"
#include "stitch/dist_optim/shadow_parameter.h"
#include "stitch/rref/rref.h"

namespace stitch::optim {

// The part of a DistributedOptimizer that lives on one owner of parameters: a torch::optim
// optimizer for each parameter. Made and owned through an RRef. Thread contract: any thread; a step
// holds one parameter's lock at a time.
template <class Optimizer>
class LocalOptimizer {
 public:
  // REQUIRES: this worker owns all of `parameters`.
  LocalOptimizer(std::vector<RRef<at::Tensor>> parameters, std::string options,
                 StalePolicy policy) {
    OptionsOf<Optimizer> decoded = decode(options);
    for (const auto& parameter : parameters) {
      const at::Tensor& tensor = parameter.local_value();
      if (!tensor.defined() || !tensor.is_leaf() || !tensor.requires_grad()) {
        throw Error(ErrorCode::invalid_argument,
                    parameter.describe() +
                        " is not a parameter: it must be a leaf tensor that requires grad");
      }
      auto entry = std::make_unique<Entry>(parameter, tensor, policy);
      entry->optimizer =
          std::make_unique<Optimizer>(std::vector<at::Tensor>{entry->shadow.shadow()}, decoded);
      entries_.push_back(std::move(entry));
    }
  }

  // Steps every parameter that has a gradient in the context; the others, and their state, stay as
  // they are. Returns how many were stepped.
  std::int64_t step(const dist_autograd::ContextId& context) {
    const ContextGradients gradients(context);
    std::int64_t stepped = 0;
    for (const auto& entry : entries_) {
      const at::Tensor gradient = gradients.find(entry->shadow.parameter());
      if (!gradient.defined()) continue;
      MutexLock lock(entry->shadow.lock());
      entry->shadow.begin_step(gradient);
      struct End {
        ShadowParameter& shadow;
        ~End() { shadow.end_step(!bumps_version()); }
      } const end{entry->shadow};
      entry->optimizer->step();
      ++stepped;
    }
    return stepped;
  }

  void set_options(const std::string& options) {
    const OptionsOf<Optimizer> decoded = decode(options);
    for (const auto& entry : entries_) {
      MutexLock lock(entry->shadow.lock());
      for (auto& group : entry->optimizer->param_groups())
        group.set_options(std::make_unique<OptionsOf<Optimizer>>(decoded));
    }
  }

  // Writes, or reads back, the state of all parameters: one file.
  void save(const std::string& file) {
    CheckpointWriter writer;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      MutexLock lock(entries_[i]->shadow.lock());
      writer.add(i, entries_[i]->shadow.parameter(), *entries_[i]->optimizer);
    }
    writer.write(file);
  }
  void load(const std::string& file) {
    CheckpointReader reader(file, entries_.size());
    for (std::size_t i = 0; i < entries_.size(); ++i)
      reader.check(i, entries_[i]->shadow.parameter());
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      MutexLock lock(entries_[i]->shadow.lock());
      reader.read(i, *entries_[i]->optimizer);
    }
  }

 private:
  struct Entry {
    Entry(RRef<at::Tensor> held, const at::Tensor& tensor, StalePolicy policy)
        : reference(std::move(held)), shadow(tensor, policy) {}
    RRef<at::Tensor> reference;  // keeps the parameter
    ShadowParameter shadow;
    std::unique_ptr<Optimizer> optimizer;
  };

  static constexpr bool bumps_version() {
    if constexpr (requires { OptimizerTraits<Optimizer>::kBumpsVersion; }) {
      return OptimizerTraits<Optimizer>::kBumpsVersion;
    } else {
      return true;
    }
  }
  static OptionsOf<Optimizer> decode(const std::string& bytes) {
    OptionsOf<Optimizer> options = [] {
      if constexpr (std::is_default_constructible_v<OptionsOf<Optimizer>>) {
        return OptionsOf<Optimizer>();
      } else {
        return OptionsOf<Optimizer>(0.0);  // SGD demands a learning rate; the real one follows
      }
    }();
    decode_options(bytes, options);
    return options;
  }

  std::vector<std::unique_ptr<Entry>> entries_;  // constant after construction
};

}  // namespace stitch::optim
