#pragma once

#include <ATen/core/Tensor.h>

namespace stitch::optim {

// What a step of sparse_optimizers.h does to a row w of a table, g being the sum of the gradients
// that name the row. `first` and `second` are the state of the table. Thread contract: a value.
struct RowRule {
  enum class Kind : unsigned char {
    sgd,              // w -= rate * g
    rowwise_adagrad,  // first += mean(g * g), one number a row; w -= rate * g / (sqrt(first) + eps)
    adagrad,          // the same with a number for each element: first += g * g
    adam,  // first and second approach g and g * g; w -= rate * first / (sqrt(second) + eps)
  };
  Kind kind = Kind::sgd;
  double rate = 0;
  double eps = 0;
  double approach_first = 0, approach_second = 0;  // 1 - beta
};

// Steps the rows of `table` that `gradient` names, and counts up the table's version. The state, of
// state_type(table), is what the rule needs. Contiguous tables on the CPU are stepped in one pass
// over their rows, by libtorch's threads; others by operators of libtorch. Throws c10::Error,
// having changed nothing, for a row that is not there. Thread contract: one thread at a time for a
// table.
void step_rows(const at::Tensor& table, const at::Tensor& gradient, const RowRule& rule,
               const at::Tensor& first = {}, const at::Tensor& second = {});

// Whether rows are stepped with AVX2: where the processor has it, until a test says otherwise. The
// results are the same to the last bit.
extern bool step_rows_with_avx2;

}  // namespace stitch::optim
