#include "tests/support/random_program.h"

#include <torch/torch.h>

#include <memory>
#include <random>

#include "stitch/rpc/agent/agent.h"
#include "stitch/stitch.h"
#include "tests/support/blind_to_first.h"
#include "tests/support/tensor_hook.h"

namespace stitch::testing {

namespace {

std::uint64_t hash(std::uint64_t a, std::uint64_t b) {
  std::uint64_t h = (a ^ (b + 0x9e3779b97f4a7c15u)) * 0xbf58476d1ce4e5b9u;
  h ^= h >> 31;
  return h * 0x94d049bb133111ebu;
}

at::Device device_of(const RandomProgram& program, std::uint64_t number) {
  if (program.devices == 0) return at::kCPU;
  return {at::kCUDA,
          static_cast<c10::DeviceIndex>(number % static_cast<std::uint64_t>(program.devices))};
}

at::Tensor random_matrix(std::mt19937_64& random, at::ScalarType dtype) {
  at::Tensor matrix = at::empty({2, 3, 3}, at::kDouble);
  std::uniform_real_distribution<double> uniform(-1.0, 1.0);
  for (int i = 0; i < 18; ++i) matrix.data_ptr<double>()[i] = uniform(random);
  return (c10::isComplexType(dtype) ? at::complex(matrix[0], matrix[1]) : matrix[0]).to(dtype);
}

// libtorch 1.13 has no tanh and no matrix product of half precision on CPUs: in single precision.
at::Tensor computable(const at::Tensor& value) {
  return value.scalar_type() == at::kHalf ? value.to(at::kFloat) : value;
}

// A value of moderate size, whatever came in. Of complex numbers, tanh and sin have poles or grow.
at::Tensor bounded(const at::Tensor& value) {
  if (value.scalar_type() == at::kHalf) return at::tanh(computable(value)).to(at::kHalf);
  return value.is_complex() ? value / (1 + at::real(value * value.conj())) : at::tanh(value);
}

// A hook that scales each element by an amount that depends on it: applied to parts of a gradient
// instead of their sum, it gives something else.
at::Tensor uneven(const at::Tensor& gradient) {
  if (!gradient.defined() || gradient.layout() != c10::kStrided) return gradient;
  return gradient + bounded(gradient * 0.5);
}

torch::autograd::variable_list all_uneven(const torch::autograd::variable_list& gradients) {
  torch::autograd::variable_list changed;
  for (const at::Tensor& gradient : gradients) changed.push_back(uneven(gradient));
  return changed;
}

// The same of all that comes into a node, and of all that leaves it.
struct UnevenPreHook final : torch::autograd::FunctionPreHook {
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    return all_uneven(gradients);
  }
};
struct UnevenPostHook final : torch::autograd::FunctionPostHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    return all_uneven(outputs);
  }
};

at::Tensor real_sum(const at::Tensor& value) {
  return (value.is_complex() ? at::real(value) : value).sum();
}

// Where tables are apart.
constexpr int kTable = kProgramParameters - 1;

class Block {
 public:
  Block(const ProgramHost& host, const ProgramBlock& block, const Tensors& arguments)
      : host_(host),
        block_(block),
        random_(block.path),
        hook_random_(hash(block.path, 11)),
        place_random_(hash(block.path, 13)),
        device_(device_of(block.program, hash(block.path, 12))) {
    hook_received(arguments);
    for (const at::Tensor& argument : arguments) {
      const bool table = block_.table && &argument == &arguments.back();
      if (!argument.defined()) {
        values_.push_back(new_matrix());
      } else {
        values_.push_back(table ? look_up(argument) : changed_in_place(argument));
      }
    }
    if (values_.empty()) values_.push_back(new_matrix());
    values_.push_back(parameter());
  }

  Tensors run() {
    const int steps = 4 + pick(6);
    for (int i = 0; i < steps; ++i) step();
    for (const auto& [wait, used] : waiting_) take(wait(), used);
    waiting_.clear();
    return results();
  }

 private:
  [[nodiscard]] at::ScalarType dtype() const { return block_.program.dtype; }
  at::Tensor new_matrix() { return random_matrix(random_, dtype()).to(device_); }
  int pick(int count) { return static_cast<int>(random_() % static_cast<std::uint64_t>(count)); }
  at::Tensor parameter() {
    return host_.parameter(pick(block_.program.tables_apart ? kTable : kProgramParameters));
  }
  at::Tensor table() {
    return host_.parameter(block_.program.tables_apart ? kTable : pick(kProgramParameters));
  }
  at::Tensor any() { return values_[random_() % values_.size()]; }

  // A value of the program as a 3x3 matrix of its dtype and of moderate size, on the device of this
  // block, differentiably.
  at::Tensor squared(const at::Tensor& anywhere) const {
    const at::Tensor value = anywhere.to(device_);
    const bool foreign = value.is_complex() && !c10::isComplexType(dtype());
    const at::Tensor own = foreign ? at::real(value) : value;
    if (own.sizes() == at::IntArrayRef({3, 3})) return own;
    return bounded(own.sum()).expand({3, 3});
  }

  // Rows of a table, with a sparse gradient for it.
  at::Tensor look_up(const at::Tensor& table) {
    const at::Tensor rows = at::tensor({pick(3), pick(3), pick(3)}, at::kLong).to(table.device());
    return at::embedding(table, rows, -1, false, /*sparse=*/true);
  }

  void step() {
    switch (pick(23)) {
      case 0:
        values_.push_back(bounded(squared(any()) + squared(any())));
        break;
      case 1:
        values_.push_back(squared(any()) * squared(any()));
        break;
      case 2:
        values_.push_back(bounded(
            at::matmul(computable(squared(any())), computable(squared(any()))).to(dtype())));
        break;
      case 3:
        values_.push_back(bounded(any()));
        break;
      case 4:
        values_.push_back(squared(any()).t());
        break;
      case 5:
        values_.push_back(squared(any()) * parameter().sum().to(device_));
        break;
      case 6:
        values_.push_back(parameter());
        break;
      case 7:
        values_.push_back(squared(any()).narrow(0, 1, 2));
        break;
      case 8:
        values_.push_back(squared(any()).narrow(0, 0, 0));
        break;
      case 9:
        values_.push_back(BlindToFirst::apply(squared(any()), squared(any())));
        break;
      case 10:
        values_.push_back(squared(any()).select(1, 0));
        break;
      case 11: {
        const at::Tensor value = any();
        if (!block_.program.uses_everything) values_.push_back(value.detach());
        break;
      }
      case 12: {
        const at::Tensor value = squared(any()) * 1;
        value.mul_(squared(any()));
        value.select(0, 0).add_(value.select(0, 1).clone());
        values_.push_back(value);
        break;
      }
      case 13: {
        const at::Tensor value = squared(any()) * 1;  // a node of this block alone
        hook(value);
        values_.push_back(value);
        break;
      }
      case 14:
        if (block_.program.sparse) values_.push_back(look_up(table()));
        break;
      case 15:
        if (dtype() == at::kDouble || dtype() == at::kFloat) {
          const at::Tensor number = at::complex(squared(any()), squared(any()));
          values_.push_back(bounded(number * number.conj() + number));
        }
        break;
      default:
        call();
        break;
    }
  }

  // Before anything else uses them: a hook of a tensor is one of its grad_fn then.
  void hook(const at::Tensor& value) {
    if (!block_.program.hooks || !value.requires_grad()) return;
    const auto kinds = hook_random_() % 8;
    if ((kinds & 1) != 0) add_tensor_hook(value, uneven);
    if ((kinds & 2) != 0) value.grad_fn()->add_pre_hook(std::make_unique<UnevenPreHook>());
    if ((kinds & 4) != 0) value.grad_fn()->add_post_hook(std::make_unique<UnevenPostHook>());
  }

  // On tensors as they came in one message, and on the node that they share.
  void hook_received(const Tensors& tensors) {
    if (!block_.program.hooks) return;
    bool first = true;
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || !tensor.requires_grad()) continue;
      if (hook_random_() % 3 == 0) add_tensor_hook(tensor, uneven);
      if (first && hook_random_() % 4 == 0)
        tensor.grad_fn()->add_pre_hook(std::make_unique<UnevenPreHook>());
      first = false;
    }
  }

  // As it came: the history of the message is rebased, that of a part through CopySlices.
  at::Tensor changed_in_place(at::Tensor received) {
    if (!block_.program.in_place) return received;
    // An expanded one arrives expanded, though not in the oracle.
    if (!received.is_non_overlapping_and_dense()) received = received.clone();
    const auto kinds = place_random_() % 8;
    if ((kinds & 1) != 0) received.mul_(0.75);
    if ((kinds & 2) != 0 && received.dim() > 0 && received.size(0) > 0)
      received.select(0, 0).mul_(-0.5);
    if ((kinds & 4) != 0) {
      const int index = static_cast<int>(place_random_() % kTable);
      received.add_(host_.parameter(index).sum().to(received.device()));
    }
    return received;
  }

  void call() {
    if (block_.level >= block_.program.depth) return;
    const int worker = pick(block_.program.workers);
    ProgramBlock child{block_.program, hash(block_.path, ++calls_), block_.level + 1};
    Tensors arguments;
    for (int i = pick(3); i >= 0; --i) arguments.push_back(any());
    if (pick(8) == 0) arguments.push_back(at::Tensor());
    if (block_.program.sparse && pick(3) == 0) {
      arguments.push_back(table());
      child.table = true;
    }
    auto wait = host_.call(worker, child, arguments);
    const bool used = block_.program.uses_everything || pick(4) != 0;
    if (pick(2) == 0) {
      take(wait(), used);
    } else {
      waiting_.emplace_back(std::move(wait), used);  // its result is taken at the end of the block
    }
  }

  void take(const Tensors& results, bool used) {
    if (!used) return;
    hook_received(results);
    for (const at::Tensor& result : results) {
      if (result.defined()) values_.push_back(changed_in_place(result));
    }
  }

  Tensors results() {
    at::Tensor sum = at::zeros({3, 3}, at::TensorOptions().dtype(dtype()).device(device_));
    for (const at::Tensor& value : values_) {
      if (block_.program.uses_everything || pick(3) != 0) sum = sum + squared(value);
    }
    Tensors out{bounded(sum)};
    if (pick(4) == 0) out.push_back(at::Tensor());
    if (pick(3) == 0) out.push_back(any());
    return out;
  }

  const ProgramHost& host_;
  const ProgramBlock block_;
  std::mt19937_64 random_;
  std::mt19937_64 hook_random_;  // apart, so that a program does the same with and without hooks
  std::mt19937_64 place_random_;
  const at::Device device_;
  Tensors values_;
  std::vector<std::pair<std::function<Tensors()>, bool>> waiting_;
  std::uint64_t calls_ = 0;
};

}  // namespace

Tensors program_parameters(const RandomProgram& program, int worker) {
  std::mt19937_64 random(hash(program.seed, 1000 + static_cast<std::uint64_t>(worker)));
  Tensors parameters;
  for (int i = 0; i < kProgramParameters; ++i) {
    const at::Device device =
        device_of(program, static_cast<std::uint64_t>(worker) + static_cast<std::uint64_t>(i));
    parameters.push_back(random_matrix(random, program.dtype).to(device).requires_grad_());
    if (program.hooks && i == 0) add_tensor_hook(parameters.back(), uneven);
  }
  return parameters;
}

Tensors run_block(const ProgramHost& host, const ProgramBlock& block, const Tensors& arguments) {
  return Block(host, block, arguments).run();
}

at::Tensor run_program(const ProgramHost& host, const RandomProgram& program) {
  at::Tensor loss = real_sum(host.parameter(0));
  for (const at::Tensor& result : run_block(host, {program, hash(program.seed, 7), 0}, {})) {
    if (result.defined()) loss = loss + real_sum(result).to(loss.device());
  }
  return loss;
}

at::Tensor run_second_program(const ProgramHost& host, const RandomProgram& program) {
  at::Tensor matrix = host.parameter(1) * 1;
  for (const at::Tensor& result : run_block(host, {program, hash(program.seed, 8), 0}, {})) {
    if (result.defined()) matrix = matrix + real_sum(result).to(matrix.device());
  }
  return matrix;
}

at::Tensor program_seed(const RandomProgram& program, std::uint64_t root) {
  std::mt19937_64 random(hash(program.seed, 2000 + root));
  return random_matrix(random, program.dtype).to(device_of(program, root));
}

ParametersOfPrograms& parameters() {
  static auto* const all = new ParametersOfPrograms;  // tensors of devices do not outlive these
  return *all;
}

namespace {

Tensors run_remote_block(const ProgramBlock& block, Tensors arguments) {
  return run_block(remote_host(block.program.seed), block, arguments);
}

}  // namespace

ProgramHost remote_host(std::uint64_t seed) {
  ProgramHost host;
  host.parameter = [seed, worker = rpc::current_agent()->self().id.value()](int index) {
    return parameters().get(seed, worker, index);
  };
  host.call = [](int callee, const ProgramBlock& block, const Tensors& arguments) {
    auto future =
        rpc_async<run_remote_block>(WorkerId(static_cast<std::uint32_t>(callee)), block, arguments);
    return [future] { return future.get(); };
  };
  return host;
}

}  // namespace stitch::testing
