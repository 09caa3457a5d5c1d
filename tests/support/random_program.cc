#include "tests/support/random_program.h"

#include <torch/torch.h>

#include <random>

#include "tests/support/blind_to_first.h"

namespace stitch::testing {

namespace {

std::uint64_t hash(std::uint64_t a, std::uint64_t b) {
  std::uint64_t h = (a ^ (b + 0x9e3779b97f4a7c15u)) * 0xbf58476d1ce4e5b9u;
  h ^= h >> 31;
  return h * 0x94d049bb133111ebu;
}

at::Tensor random_matrix(std::mt19937_64& random, at::ScalarType dtype) {
  at::Tensor matrix = at::empty({2, 3, 3}, at::kDouble);
  std::uniform_real_distribution<double> uniform(-1.0, 1.0);
  for (int i = 0; i < 18; ++i) matrix.data_ptr<double>()[i] = uniform(random);
  return (c10::isComplexType(dtype) ? at::complex(matrix[0], matrix[1]) : matrix[0]).to(dtype);
}

// A value of moderate size, whatever came in. Of complex numbers, tanh and sin have poles or grow.
at::Tensor bounded(const at::Tensor& value) {
  return value.is_complex() ? value / (1 + at::real(value * value.conj())) : at::tanh(value);
}

// A hook that scales each element by an amount that depends on it: applied to parts of a gradient
// instead of their sum, it gives something else.
at::Tensor uneven(const at::Tensor& gradient) {
  if (!gradient.defined() || gradient.layout() != c10::kStrided) return gradient;
  return gradient + bounded(gradient * 0.5);
}

class Block {
 public:
  Block(const ProgramHost& host, const ProgramBlock& block, const Tensors& arguments)
      : host_(host), block_(block), random_(block.path) {
    for (const at::Tensor& argument : arguments)
      values_.push_back(argument.defined() ? argument : random_matrix(random_, dtype()));
    if (block_.table) {
      const at::Tensor table = values_.back();
      values_.back() = look_up(table);
    }
    if (values_.empty()) values_.push_back(random_matrix(random_, dtype()));
    values_.push_back(host_.parameter(pick(kProgramParameters)));
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
  int pick(int count) { return static_cast<int>(random_() % static_cast<std::uint64_t>(count)); }
  at::Tensor any() { return values_[random_() % values_.size()]; }

  // A value of the program as a 3x3 matrix of its dtype and of moderate size, differentiably.
  at::Tensor squared(const at::Tensor& value) const {
    const bool foreign = value.is_complex() && !c10::isComplexType(dtype());
    const at::Tensor own = foreign ? at::real(value) : value;
    if (own.sizes() == at::IntArrayRef({3, 3})) return own;
    return bounded(own.sum()).expand({3, 3});
  }

  // Rows of a table, with a sparse gradient for it.
  at::Tensor look_up(const at::Tensor& table) {
    const at::Tensor rows = at::tensor({pick(3), pick(3), pick(3)}, at::kLong);
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
        values_.push_back(bounded(at::matmul(squared(any()), squared(any()))));
        break;
      case 3:
        values_.push_back(bounded(any()));
        break;
      case 4:
        values_.push_back(squared(any()).t());
        break;
      case 5:
        values_.push_back(squared(any()) * host_.parameter(pick(kProgramParameters)).sum());
        break;
      case 6:
        values_.push_back(host_.parameter(pick(kProgramParameters)));
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
        if (block_.program.hooks && value.requires_grad()) value.register_hook(uneven);
        values_.push_back(value);
        break;
      }
      case 14:
        if (block_.program.sparse)
          values_.push_back(look_up(host_.parameter(pick(kProgramParameters))));
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

  void call() {
    if (block_.level >= block_.program.depth) return;
    const int worker = pick(block_.program.workers);
    ProgramBlock child{block_.program, hash(block_.path, ++calls_), block_.level + 1};
    Tensors arguments;
    for (int i = pick(3); i >= 0; --i) arguments.push_back(any());
    if (pick(8) == 0) arguments.push_back(at::Tensor());
    if (block_.program.sparse && pick(3) == 0) {
      arguments.push_back(host_.parameter(pick(kProgramParameters)));
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
    for (const at::Tensor& result : results) {
      if (used && result.defined()) values_.push_back(result);
    }
  }

  Tensors results() {
    at::Tensor sum = at::zeros({3, 3}, dtype());
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
  Tensors values_;
  std::vector<std::pair<std::function<Tensors()>, bool>> waiting_;
  std::uint64_t calls_ = 0;
};

}  // namespace

Tensors program_parameters(const RandomProgram& program, int worker) {
  std::mt19937_64 random(hash(program.seed, 1000 + static_cast<std::uint64_t>(worker)));
  Tensors parameters;
  for (int i = 0; i < kProgramParameters; ++i) {
    parameters.push_back(random_matrix(random, program.dtype).requires_grad_());
    if (program.hooks && i == 0) parameters.back().register_hook(uneven);
  }
  return parameters;
}

Tensors run_block(const ProgramHost& host, const ProgramBlock& block, const Tensors& arguments) {
  return Block(host, block, arguments).run();
}

at::Tensor run_program(const ProgramHost& host, const RandomProgram& program) {
  const auto real_sum = [](const at::Tensor& value) {
    return (value.is_complex() ? at::real(value) : value).sum();
  };
  at::Tensor loss = real_sum(host.parameter(0));
  for (const at::Tensor& result : run_block(host, {program, hash(program.seed, 7), 0}, {})) {
    if (result.defined()) loss = loss + real_sum(result);
  }
  return loss;
}

}  // namespace stitch::testing
