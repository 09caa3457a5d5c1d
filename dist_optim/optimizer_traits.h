#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <sstream>
#include <string>
#include <type_traits>

#include "stitch/base/error.h"
#include "stitch/dist_optim/named_values.h"

namespace stitch::optim {

// What DistributedOptimizer<Optimizer> needs to know about its optimizer: the types of its options
// and of the state it keeps for a parameter, and the names of their fields. Options and state are
// sent and saved as these named values, not with libtorch's own serialization. Specialize it for an
// optimizer of your own that derives from torch::optim::Optimizer, is constructed from
// (parameters, options) and updates each parameter by itself:
//
//   template <> struct stitch::optim::OptimizerTraits<SignDescent> {
//     using Options = SignOptions;
//     static void options(auto& o, auto&& field) { field("rate", o.rate); }
//     using State = SignState;  // left out, with state(), when it keeps none
//     static void state(auto& s, auto&& field) { field("count", s.count); }
//   };
//
// A trait that declares `static at::IntArrayRef state_sizes(const at::Tensor& parameter)` has state
// that is loaded checked: its tensors must have these sizes and the parameter's dtype.
//
// Fields may be bool, integers, floating-point numbers, std::string, std::vector<double>, tuples of
// double, and, in the state, tensors. The functions are called with const objects to read them and
// with others to write them. An optimizer that changes parameters without counting up their version
// declares `static constexpr bool kBumpsVersion = false;`.
template <class Optimizer>
struct OptimizerTraits;

template <>
struct OptimizerTraits<torch::optim::SGD> {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static void options(auto& options, auto&& field) {
    field("lr", options.lr());
    field("momentum", options.momentum());
    field("dampening", options.dampening());
    field("weight_decay", options.weight_decay());
    field("nesterov", options.nesterov());
  }
  static void state(auto& state, auto&& field) {
    field("momentum_buffer", state.momentum_buffer());
  }
  static at::IntArrayRef state_sizes(const at::Tensor& parameter) { return parameter.sizes(); }
  // C++ SGD writes past the version counter; the others do not.
  static constexpr bool kBumpsVersion = false;
};

// Adam and AdamW have the same fields.
template <class OptionsType, class StateType>
struct AdamTraits {
  using Options = OptionsType;
  using State = StateType;
  static void options(auto& options, auto&& field) {
    field("lr", options.lr());
    field("betas", options.betas());
    field("eps", options.eps());
    field("weight_decay", options.weight_decay());
    field("amsgrad", options.amsgrad());
  }
  static void state(auto& state, auto&& field) {
    field("step", state.step());
    field("exp_avg", state.exp_avg());
    field("exp_avg_sq", state.exp_avg_sq());
    field("max_exp_avg_sq", state.max_exp_avg_sq());
  }
  static at::IntArrayRef state_sizes(const at::Tensor& parameter) { return parameter.sizes(); }
};
template <>
struct OptimizerTraits<torch::optim::Adam>
    : AdamTraits<torch::optim::AdamOptions, torch::optim::AdamParamState> {};
template <>
struct OptimizerTraits<torch::optim::AdamW>
    : AdamTraits<torch::optim::AdamWOptions, torch::optim::AdamWParamState> {};

template <>
struct OptimizerTraits<torch::optim::Adagrad> {
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  static void options(auto& options, auto&& field) {
    field("lr", options.lr());
    field("lr_decay", options.lr_decay());
    field("weight_decay", options.weight_decay());
    field("initial_accumulator_value", options.initial_accumulator_value());
    field("eps", options.eps());
  }
  static void state(auto& state, auto&& field) {
    field("step", state.step());
    field("sum", state.sum());
  }
  static at::IntArrayRef state_sizes(const at::Tensor& parameter) { return parameter.sizes(); }
};

template <>
struct OptimizerTraits<torch::optim::RMSprop> {
  using Options = torch::optim::RMSpropOptions;
  using State = torch::optim::RMSpropParamState;
  static void options(auto& options, auto&& field) {
    field("lr", options.lr());
    field("alpha", options.alpha());
    field("eps", options.eps());
    field("weight_decay", options.weight_decay());
    field("momentum", options.momentum());
    field("centered", options.centered());
  }
  static void state(auto& state, auto&& field) {
    field("step", state.step());
    field("square_avg", state.square_avg());
    field("momentum_buffer", state.momentum_buffer());
    field("grad_avg", state.grad_avg());
  }
  static at::IntArrayRef state_sizes(const at::Tensor& parameter) { return parameter.sizes(); }
};

template <>
struct OptimizerTraits<torch::optim::LBFGS> {
  using Options = torch::optim::LBFGSOptions;
  static constexpr const char* kRefused =
      "LBFGS re-evaluates the loss while it steps, which workers that hold only parameters cannot "
      "do";
};

// OptionsOf<torch::optim::Adam> is torch::optim::AdamOptions.
template <class Optimizer>
using OptionsOf = typename OptimizerTraits<Optimizer>::Options;

// "torch::optim::Adam".
template <class Optimizer>
std::string optimizer_name() {
  return base::demangle(typeid(Optimizer).name());
}

template <class Optimizer>
NamedValues options_to_values(const OptionsOf<Optimizer>& options) {
  static_assert(
      requires(FieldCollector field) { OptimizerTraits<Optimizer>::options(options, field); },
      "stitch: OptimizerTraits<Optimizer> must name the fields of the options: static void "
      "options(auto& o, auto&& field) { field(\"rate\", o.rate); }");
  NamedValues values;
  OptimizerTraits<Optimizer>::options(options, FieldCollector(values));
  return values;
}

// Throws Error(invalid_argument) for options that the optimizer's constructor refuses (a negative
// learning rate).
template <class Optimizer>
void check_options(const OptionsOf<Optimizer>& options) {
  try {
    const Optimizer checked(std::vector<at::Tensor>{}, options);
  } catch (const c10::Error& error) {
    throw Error(ErrorCode::invalid_argument, "options of " + optimizer_name<Optimizer>() +
                                                 " are refused: " + error.what_without_backtrace());
  }
}

// Says that options of one's own do not override get_lr() and set_lr().
template <class Optimizer>
Error no_rate() {
  return Error(ErrorCode::invalid_argument,
               "options of " + optimizer_name<Optimizer>() +
                   " have no learning rate: override get_lr() and set_lr() of "
                   "torch::optim::OptimizerOptions");
}
// Throws Error(invalid_argument) for options of one's own that do not override get_lr().
template <class Optimizer>
double rate_of(const OptionsOf<Optimizer>& options) {
  try {
    return options.get_lr();
  } catch (const c10::Error&) {
    throw no_rate<Optimizer>();
  }
}
// Throws Error(invalid_argument) for a rate that is refused, and for options of one's own that do
// not override get_lr() and set_lr().
template <class Optimizer>
void set_rate(OptionsOf<Optimizer>& options, double lr) {
  try {
    options.set_lr(lr);
  } catch (const c10::Error&) {
    throw no_rate<Optimizer>();
  }
  check_options<Optimizer>(options);
}

// Throws Error(invalid_argument) that names what is missing, unknown, of another type, or refused
// as in check_options().
template <class Optimizer>
OptionsOf<Optimizer> options_from_values(const NamedValues& values) {
  OptionsOf<Optimizer> options = [] {
    if constexpr (std::is_default_constructible_v<OptionsOf<Optimizer>>) {
      return OptionsOf<Optimizer>();
    } else {
      return OptionsOf<Optimizer>(0.0);  // SGD demands a learning rate; the real one follows
    }
  }();
  const std::string what = "options of " + optimizer_name<Optimizer>();
  FieldAssigner fields(values, what);
  OptimizerTraits<Optimizer>::options(options, fields);
  fields.finish();
  check_options<Optimizer>(options);
  return options;
}

// What `optimizer` finds a parameter's state by: its identity, as text in older libtorch.
template <class Optimizer>
auto state_key(Optimizer& optimizer, const at::Tensor& parameter) {
  using Key = typename std::remove_reference_t<decltype(optimizer.state())>::key_type;
  if constexpr (std::is_same_v<Key, std::string>) {
    std::ostringstream key;
    key << parameter.unsafeGetTensorImpl();
    return key.str();
  } else {
    return Key(parameter.unsafeGetTensorImpl());
  }
}

template <class Optimizer>
inline constexpr bool kHasState = requires {
  typename OptimizerTraits<Optimizer>::State;
};

template <class Optimizer>
NamedValues state_to_values(const torch::optim::OptimizerParamState& state) {
  NamedValues values;
  if constexpr (kHasState<Optimizer>) {
    OptimizerTraits<Optimizer>::state(
        static_cast<const typename OptimizerTraits<Optimizer>::State&>(state),
        FieldCollector(values));
  } else {
    throw Error(ErrorCode::invalid_argument,
                optimizer_name<Optimizer>() +
                    " keeps state, but its stitch::optim::OptimizerTraits names no State");
  }
  return values;
}

// Puts the tensors of a state, which may have been saved elsewhere, on the device of its parameter.
template <class Optimizer>
void move_state(torch::optim::OptimizerParamState& state, c10::Device device) {
  if constexpr (kHasState<Optimizer>) {
    OptimizerTraits<Optimizer>::state(
        static_cast<typename OptimizerTraits<Optimizer>::State&>(state), FieldMover(device));
  }
}

// Throws Error(invalid_argument) naming a tensor of the state that cannot be of this parameter.
template <class Optimizer>
void check_state_sizes(const NamedValues& values, const at::Tensor& parameter) {
  if constexpr (requires { OptimizerTraits<Optimizer>::state_sizes(parameter); }) {
    const at::IntArrayRef sizes = OptimizerTraits<Optimizer>::state_sizes(parameter);
    for (const auto& [name, value] : values) check_state_tensor(name, value, parameter, sizes);
  }
}

// Throws Error(invalid_argument) that names what does not fit.
template <class Optimizer>
std::unique_ptr<torch::optim::OptimizerParamState> state_from_values(const NamedValues& values) {
  const std::string what = "state values of " + optimizer_name<Optimizer>();
  if constexpr (kHasState<Optimizer>) {
    auto state = std::make_unique<typename OptimizerTraits<Optimizer>::State>();
    FieldAssigner fields(values, what);
    OptimizerTraits<Optimizer>::state(*state, fields);
    fields.finish();
    return state;
  } else {
    throw Error(ErrorCode::invalid_argument,
                what + " cannot be used: its stitch::optim::OptimizerTraits names no State");
  }
}

}  // namespace stitch::optim
