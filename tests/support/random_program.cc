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
  at::Tensor matrix = at::empty({3, 3}, at::kDouble);
  std::uniform_real_distribution<double> uniform(-1.0, 1.0);
  for (int i = 0; i < 9; ++i) matrix.data_ptr<double>()[i] = uniform(random);
  return matrix.to(dtype);
}

// Any tensor of the program as a 3x3 matrix of moderate size, differentiably.
at::Tensor squared(const at::Tensor& value) {
  if (value.sizes() == at::IntArrayRef({3, 3})) return value;
  return at::tanh(value.sum()).expand({3, 3});
}

class Block {
 public:
  Block(const ProgramHost& host, const ProgramBlock& block, const Tensors& arguments)
      : host_(host), block_(block), random_(block.path) {
    for (const at::Tensor& argument : arguments)
      values_.push_back(argument.defined() ? argument : random_matrix(random_, dtype()));
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
  [[nodiscard]] at::ScalarType dtype() const { return block_.program.dtype(); }
  int pick(int count) { return static_cast<int>(random_() % static_cast<std::uint64_t>(count)); }
  at::Tensor any() { return values_[random_() % values_.size()]; }

  void step() {
    switch (pick(20)) {
      case 0:
        values_.push_back(at::tanh(squared(any()) + squared(any())));
        break;
      case 1:
        values_.push_back(squared(any()) * squared(any()));
        break;
      case 2:
        values_.push_back(at::tanh(at::matmul(squared(any()), squared(any()))));
        break;
      case 3:
        values_.push_back(at::sin(any()));
        break;
      case 4:
        values_.push_back(squared(any()).t());
        break;
      case 5:
        values_.push_back(any() * host_.parameter(pick(kProgramParameters)).sum());
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
      default:
        call();
        break;
    }
  }

  void call() {
    if (block_.level >= block_.program.depth) return;
    const int worker = pick(block_.program.workers);
    const ProgramBlock child{block_.program, hash(block_.path, ++calls_), block_.level + 1};
    Tensors arguments;
    for (int i = pick(3); i >= 0; --i) arguments.push_back(any());
    if (pick(8) == 0) arguments.push_back(at::Tensor());
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
    Tensors out{at::tanh(sum)};
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
  for (int i = 0; i < kProgramParameters; ++i)
    parameters.push_back(random_matrix(random, program.dtype()).requires_grad_());
  return parameters;
}

Tensors run_block(const ProgramHost& host, const ProgramBlock& block, const Tensors& arguments) {
  return Block(host, block, arguments).run();
}

at::Tensor run_program(const ProgramHost& host, const RandomProgram& program) {
  at::Tensor loss = host.parameter(0).sum();
  for (const at::Tensor& result : run_block(host, {program, hash(program.seed, 7), 0}, {})) {
    if (result.defined()) loss = loss + result.sum();
  }
  return loss;
}

}  // namespace stitch::testing
