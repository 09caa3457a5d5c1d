#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>

#include "stitch/rref/rref.h"

namespace stitch_reliability {

// What workers call of each other. Each takes the number of the operation, which it notes as run.

[[nodiscard]] std::uint64_t answer(std::uint64_t number);         // number + 1
[[nodiscard]] std::uint64_t answer_slowly(std::uint64_t number);  // the same, after 20 ms
void hear(std::uint64_t number);
// Has worker `rank` answer.
[[nodiscard]] std::uint64_t ask(std::uint64_t number, int rank);
[[nodiscard]] at::Tensor scaled(std::uint64_t number, at::Tensor x, double factor);

// An object whose methods are called from everywhere.
class Tally {
 public:
  explicit Tally(std::uint64_t number);
  std::uint64_t add(std::uint64_t number);

 private:
  std::atomic<std::uint64_t> sum_{0};
};
// Calls add() on its owner.
[[nodiscard]] std::uint64_t use(std::uint64_t number, stitch::RRef<Tally> tally);
// Keeps the reference until 64 others have come.
void keep(std::uint64_t number, stitch::RRef<Tally> tally);
void forget_kept();

// A parameter of four numbers, 0 at first, and what is computed from it.
class Parameter {
 public:
  explicit Parameter(std::uint64_t number);
  stitch::RRef<at::Tensor> value(std::uint64_t number);
  at::Tensor times(std::uint64_t number, at::Tensor x);
  at::Tensor now(std::uint64_t number);

 private:
  const at::Tensor value_;
};

// Returns once its caller has given up, at the latest after a minute.
void wait_until_stopped();

}  // namespace stitch_reliability
