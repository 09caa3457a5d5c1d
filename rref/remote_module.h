#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "stitch/rref/checkpoint.h"
#include "stitch/rref/rref.h"

namespace stitch {

// What load_state_dict(state, false) left alone.
struct StateDifference {
  std::vector<std::string> missing;  // in the module, not in the state
  std::vector<std::string> unknown;  // in the state, not in the module
  template <class Archive>
  void serialize(Archive& archive) {
    archive(missing, unknown);
  }
};

}  // namespace stitch

namespace stitch::rref {

// Copies of a module's parameters and buffers, by name. Not safe while another thread modifies the
// module.
[[nodiscard]] std::map<std::string, at::Tensor> module_state(const torch::nn::Module& module);

// Overwrites them in place. Throws Error(invalid_argument), having changed nothing, that lists
// every name whose sizes or dtype differ and, if `strict`, the names missing from `state` and those
// that the module does not have. Otherwise these are returned.
StateDifference load_module_state(torch::nn::Module& module,
                                  const std::map<std::string, at::Tensor>& state, bool strict);

// The device of `to` that a module is to be made on, with its index. Throws Error: an unknown
// worker, or one that does not have this device.
[[nodiscard]] at::Device module_device(const Target& to, const at::Device& device);

// A device in a message.
struct SentDevice {
  std::string name;  // as at::Device reads and writes it
  template <class Archive>
  void serialize(Archive& archive) {
    archive(name);
  }
};
// Moves the parameters and buffers of a module to a device.
void move_module(torch::nn::Module& module, const SentDevice& device);

}  // namespace stitch::rref

namespace stitch {

namespace detail {

template <class M>
struct ModuleImpl {
  static_assert(std::is_base_of_v<torch::nn::Module, M>,
                "stitch: RemoteModule<M> needs a torch::nn module");
  using type = M;
};
template <class M>
requires std::is_base_of_v<torch::nn::Module, typename M::Impl>
struct ModuleImpl<M> {
  using type = typename M::Impl;
};

// The object on the owner: the module, with methods whose types can be sent.
template <class M>
class ModuleHost {
 public:
  using Impl = typename ModuleImpl<M>::type;

  template <class... A>
  requires std::is_constructible_v<Impl, A&&...>
  explicit ModuleHost(A&&... arguments)
      : module_(std::make_shared<Impl>(std::forward<A>(arguments)...)) {}
  // On a device of this worker.
  template <class... A>
  requires std::is_constructible_v<Impl, A&&...>
  explicit ModuleHost(const rref::SentDevice& device, A&&... arguments)
      : ModuleHost(std::forward<A>(arguments)...) {
    rref::move_module(*module_, device);
  }

  template <class... A>
  auto forward(A... arguments)
      -> std::remove_cvref_t<decltype(std::declval<Impl&>().forward(std::move(arguments)...))> {
    return module_->forward(std::move(arguments)...);
  }
  std::vector<RRef<at::Tensor>> parameters() const {
    std::vector<RRef<at::Tensor>> references;
    for (const auto& [name, parameter] : own_parameters())
      references.push_back(make_rref(parameter));
    return references;
  }
  std::vector<std::pair<std::string, RRef<at::Tensor>>> named_parameters() const {
    std::vector<std::pair<std::string, RRef<at::Tensor>>> references;
    for (const auto& [name, parameter] : own_parameters())
      references.emplace_back(name, make_rref(parameter));
    return references;
  }
  std::vector<RRef<at::Tensor>> buffers() const {
    std::vector<RRef<at::Tensor>> references;
    for (const auto& buffer : module_->buffers()) references.push_back(make_rref(buffer));
    return references;
  }
  std::vector<std::pair<std::string, RRef<at::Tensor>>> named_buffers() const {
    std::vector<std::pair<std::string, RRef<at::Tensor>>> references;
    std::unordered_set<const void*> seen;  // a submodule may have two names
    for (const auto& buffer : module_->named_buffers()) {
      if (seen.insert(buffer.value().unsafeGetTensorImpl()).second)
        references.emplace_back(buffer.key(), make_rref(buffer.value()));
    }
    return references;
  }
  std::vector<std::string> parameter_names() const {
    std::vector<std::string> names;
    for (const auto& [name, parameter] : own_parameters()) names.push_back(name);
    return names;
  }
  void train(bool on) { module_->train(on); }
  std::map<std::string, at::Tensor> state_dict() const { return rref::module_state(*module_); }
  StateDifference load_state_dict(const std::map<std::string, at::Tensor>& state, bool strict) {
    return rref::load_module_state(*module_, state, strict);
  }

  [[nodiscard]] Impl& module() noexcept { return *module_; }

 private:
  // Each once, by its first name.
  std::vector<std::pair<std::string, at::Tensor>> own_parameters() const {
    std::vector<std::pair<std::string, at::Tensor>> own;
    std::unordered_set<const void*> seen;
    for (const auto& parameter : module_->named_parameters()) {
      if (seen.insert(parameter.value().unsafeGetTensorImpl()).second)
        own.emplace_back(parameter.key(), parameter.value());
    }
    return own;
  }

  std::shared_ptr<Impl> module_;
};

// The parameter of M::forward() for an argument: an RRef<T> stands for its T, unless forward()
// takes the reference itself.
template <class A>
struct ForwardParameter {
  using type = A;
};
template <class T>
requires kCanStandIn<T>
struct ForwardParameter<RRef<T>> {
  using type = T;
};
template <class Impl, class... A>
inline constexpr bool kForwardTakes = requires(Impl& module, A... arguments) {
  module.forward(std::move(arguments)...);
};
template <class M, bool AsGiven, class... A>
struct ForwardOf {
  static constexpr auto kMethod = &ModuleHost<M>::template forward<A...>;
};
template <class M, class... A>
struct ForwardOf<M, false, A...> {
  static_assert(
      kForwardTakes<typename ModuleHost<M>::Impl, typename ForwardParameter<A>::type...>,
      "stitch: forward() of this module cannot be called with these arguments; an RRef<T> "
      "may stand for a T");
  static constexpr auto kMethod =
      &ModuleHost<M>::template forward<typename ForwardParameter<A>::type...>;
};

}  // namespace detail

// Where a remote module is to live: RemoteModule<M>({.to = "ps0", .device = at::kCPU}, ...).
struct ModulePlace {
  Target to;                                          // its worker, as for remote()
  std::optional<std::chrono::nanoseconds> timeout{};  // of its construction; 0: none
  at::Device device = at::kCPU;                       // of its parameters and buffers
};

// A torch::nn module that lives on another worker: RemoteModule<torch::nn::Linear>("ps0", 8, 4) or
// of a user-defined module. A value like RRef: copies and sent copies refer to the same module,
// which lives while any of them does. Errors of construction and of calls: as RRef. Thread
// contract: as RRef; the module's methods run on the owner's user-function threads, concurrently if
// they are called concurrently.
template <class M>
class RemoteModule {
 public:
  using Host = detail::ModuleHost<M>;  // the object that reference() refers to

  // Refers to nothing, as an RRef made so.
  RemoteModule() = default;
  // Constructs an M on the target from the arguments, sent as remote<T>() sends them. Returns
  // immediately.
  template <class... Args>
  explicit RemoteModule(Target target, Args&&... args)
      : host_(remote<Host>(std::move(target), std::forward<Args>(args)...)) {}
  // The same on a device of the target: made on the CPU and moved there. Throws
  // Error(invalid_argument) for one that the target does not have.
  template <class... Args>
  explicit RemoteModule(ModulePlace place, Args&&... args)
      : host_(make(std::move(place), std::forward<Args>(args)...)) {}

  // Runs forward() on the owner. The result type follows from the types of the arguments. Where
  // forward() takes a T, an RRef<T> may be given, as in other calls: also of an object that is
  // still being created, so net2.forward(net1.forward_remote(x)) sends the data from one owner to
  // the other.
  template <class... Args>
  auto forward_async(Args&&... args) const {
    return host_.template rpc_async<kForward<Args...>>(std::forward<Args>(args)...);
  }
  // The same, waiting. Throws its Error.
  template <class... Args>
  auto forward(Args&&... args) const {
    const rpc::AnswerWaitScope waits;
    return forward_async(std::forward<Args>(args)...).get();
  }
  // As forward_async(), but the result stays on the owner: an RRef to it.
  template <class... Args>
  auto forward_remote(Args&&... args) const {
    return host_.template remote<kForward<Args...>>(std::forward<Args>(args)...);
  }

  // References to the parameters, owned there, in the order of module.parameters(). A tensor that
  // the module has under several names (tied weights) is there once, under the first. Waits.
  [[nodiscard]] std::vector<RRef<at::Tensor>> parameters() const {
    return host_.template rpc_sync<&Host::parameters>();
  }
  // The same with their names, in the same order. DistributedOptimizer saves state by these names.
  [[nodiscard]] std::vector<std::pair<std::string, RRef<at::Tensor>>> named_parameters() const {
    return host_.template rpc_sync<&Host::named_parameters>();
  }
  // References to the buffers, owned there, in the order of module.buffers(). Waits.
  [[nodiscard]] std::vector<RRef<at::Tensor>> buffers() const {
    return host_.template rpc_sync<&Host::buffers>();
  }
  // The same with their names.
  [[nodiscard]] std::vector<std::pair<std::string, RRef<at::Tensor>>> named_buffers() const {
    return host_.template rpc_sync<&Host::named_buffers>();
  }
  // The names of the parameters alone, in their order. Waits.
  [[nodiscard]] std::vector<std::string> parameter_names() const {
    return host_.template rpc_sync<&Host::parameter_names>();
  }
  // Training or evaluation mode, for the module and all it contains. Waits.
  void train(bool on = true) const { host_.template rpc_sync<&Host::train>(on); }
  // The same as train(false).
  void eval() const { train(false); }
  // Copies of all parameters and buffers by name. Waits.
  [[nodiscard]] std::map<std::string, at::Tensor> state_dict() const {
    return host_.template rpc_sync<&Host::state_dict>();
  }
  // Overwrites parameters and buffers in place, all or none. Throws Error(remote_exception) that
  // lists what does not fit: sizes, dtypes and, if `strict`, names that are missing or unknown;
  // without it these names are returned. Waits.
  StateDifference load_state_dict(const std::map<std::string, at::Tensor>& state,
                                  bool strict = true) const {
    return host_.template rpc_sync<&Host::load_state_dict>(state, strict);
  }

  // Writes parameters and buffers into `folder`, a checkpoint of one part (Checkpoint::save()): of
  // any size, while training goes on.
  void save(const std::filesystem::path& folder, const std::string& name = "model") const {
    checkpoint(folder, name).save();
  }
  // Reads them back, all or none, as Checkpoint::load().
  void load(const std::filesystem::path& folder, const std::string& name = "model") const {
    checkpoint(folder, name).load();
  }
  // For Checkpoint::add(). Waits.
  [[nodiscard]] rref::CheckpointPart checkpoint_part() const {
    auto tensors = named_parameters();
    const auto buffers = named_buffers();
    tensors.insert(tensors.end(), buffers.begin(), buffers.end());
    return rref::checkpoint_of(tensors);
  }

  // The worker on which the module lives.
  [[nodiscard]] const WorkerInfo& owner() const { return host_.owner(); }
  // As RRef::when_created().
  [[nodiscard]] Future<void> when_created() const { return host_.when_created(); }
  // A reference to the module's host, for user-defined methods: reference().rpc_sync<&...>().
  [[nodiscard]] const RRef<Host>& reference() const noexcept { return host_; }

  template <class Archive>
  void serialize(Archive& archive) {
    archive(host_);
  }

 private:
  [[nodiscard]] Checkpoint checkpoint(const std::filesystem::path& folder,
                                      const std::string& name) const {
    Checkpoint one(folder, {.name = name});
    one.add("model", *this);
    return one;
  }
  template <class... Args>
  static constexpr auto kForward =
      detail::ForwardOf<M, detail::kForwardTakes<typename Host::Impl, detail::SentAs<Args>...>,
                        detail::SentAs<Args>...>::kMethod;

  template <class... Args>
  static RRef<Host> make(ModulePlace place, Args&&... args) {
    const at::Device device = rref::module_device(place.to, place.device);
    TargetOptions target{.to = std::move(place.to), .timeout = place.timeout};
    if (device.is_cpu()) return remote<Host>(std::move(target), std::forward<Args>(args)...);
    return remote<Host>(std::move(target), rref::SentDevice{device.str()},
                        std::forward<Args>(args)...);
  }

  RRef<Host> host_;
};

}  // namespace stitch
