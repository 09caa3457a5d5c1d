#include "stitch/dist_optim/sparse_rows.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <ATen/ATen.h>
#include <ATen/TensorIterator.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "stitch/dist_optim/named_values.h"

// What is inlined into the loop over rows, once for each set of instructions.
#define STITCH_ROW_INLINE __attribute__((always_inline)) inline

namespace stitch::optim {

namespace {

constexpr std::int64_t kAhead = 8;            // rows that are on their way to the cache
constexpr std::int64_t kFetchedBytes = 1024;  // of each of them
constexpr std::int64_t kLine = 64;            // bytes
constexpr std::size_t kLanes = 16;            // partial sums of a row
constexpr std::int64_t kLimit = 1LL << 32;    // of rows, and of their occurrences
constexpr std::int64_t kGrain = 1LL << 15;    // elements that are worth a thread

// The places where a gradient names rows, in the order of the rows: so those of one row lie side by
// side, and neighbours in the table follow one another, which saves misses of the TLB.
class NamedRows {
 public:
  struct Named {
    std::int64_t row;
    std::int64_t position;  // in the gradient
  };

  // All rows.
  explicit NamedRows(std::int64_t rows) : size_(rows) {}
  // REQUIRES: `indices` is a vector of int64 that outlives this; both sizes are below the limit.
  NamedRows(const at::Tensor& indices, std::int64_t rows)
      : size_(indices.numel()), indices_(indices.data_ptr<std::int64_t>()) {
    bool ascending = true;
    for (std::int64_t i = 0; i < size_; ++i) {
      TORCH_CHECK_INDEX(indices_[i] >= 0 && indices_[i] < rows, "a gradient names row ",
                        indices_[i], " of a table of ", rows);
      ascending = ascending && (i == 0 || indices_[i - 1] < indices_[i]);
    }
    if (!ascending) sort(std::bit_width(static_cast<std::uint64_t>(rows - 1)));
  }

  [[nodiscard]] std::int64_t size() const { return size_; }
  STITCH_ROW_INLINE Named operator[](std::int64_t i) const {
    if (!sorted_.empty()) {
      const std::uint64_t both = sorted_[static_cast<std::size_t>(i)];
      return {static_cast<std::int64_t>(both >> 32), static_cast<std::int64_t>(both & 0xffffffff)};
    }
    return {indices_ != nullptr ? indices_[i] : i, i};
  }

 private:
  // By the digits of the row, of which there are `bits`, from the lowest. Positions stay in order.
  void sort(int bits) {
    constexpr std::uint64_t kDigits = 256;
    std::vector<std::uint64_t> from(static_cast<std::size_t>(size_));
    sorted_.resize(from.size());
    for (std::size_t i = 0; i < from.size(); ++i)
      sorted_[i] = static_cast<std::uint64_t>(indices_[i]) << 32 | i;
    for (int shift = 32; shift < 32 + bits; shift += 8) {
      sorted_.swap(from);
      std::array<std::size_t, kDigits + 1> starts{};
      for (const auto each : from) ++starts[(each >> shift) % kDigits + 1];
      for (std::size_t i = 1; i < kDigits; ++i) starts[i] += starts[i - 1];
      for (const auto each : from) sorted_[starts[(each >> shift) % kDigits]++] = each;
    }
  }

  const std::int64_t size_;
  const std::int64_t* const indices_ = nullptr;  // null: row i at position i
  std::vector<std::uint64_t> sorted_;            // row and position; empty: in order already
};

// In plain loops, for the compiler to vectorize.
template <class Number>
STITCH_ROW_INLINE void step_row(const RowRule& rule, std::int64_t columns, Number* __restrict w,
                                const Number* __restrict g, Number* __restrict first,
                                Number* __restrict second) {
  const auto n = static_cast<std::size_t>(columns);
  const auto rate = static_cast<Number>(rule.rate);
  const auto eps = static_cast<Number>(rule.eps);
  switch (rule.kind) {
    case RowRule::Kind::sgd:
      for (std::size_t k = 0; k < n; ++k) w[k] -= rate * g[k];
      break;
    case RowRule::Kind::rowwise_adagrad: {
      Number sums[kLanes] = {};
      std::size_t k = 0;
      for (; k + kLanes <= n; k += kLanes)
        for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += g[k + lane] * g[k + lane];
      for (; k < n; ++k) sums[k % kLanes] += g[k] * g[k];
      Number sum = 0;
      for (const Number each : sums) sum += each;
      *first += sum / static_cast<Number>(columns);
      const Number scale = rate / (std::sqrt(*first) + eps);
      for (k = 0; k < n; ++k) w[k] -= scale * g[k];
      break;
    }
    case RowRule::Kind::adagrad:
      for (std::size_t k = 0; k < n; ++k) {
        first[k] += g[k] * g[k];
        w[k] -= rate * g[k] / (std::sqrt(first[k]) + eps);
      }
      break;
    case RowRule::Kind::adam: {
      const auto approach_first = static_cast<Number>(rule.approach_first);
      const auto approach_second = static_cast<Number>(rule.approach_second);
      for (std::size_t k = 0; k < n; ++k) {
        first[k] += approach_first * (g[k] - first[k]);
        second[k] += approach_second * (g[k] * g[k] - second[k]);
        w[k] -= rate * first[k] / (std::sqrt(second[k]) + eps);
      }
      break;
    }
  }
}

template <class From, class To>
STITCH_ROW_INLINE void convert(const From* __restrict from, To* __restrict to, std::int64_t n) {
  for (std::int64_t k = 0; k < n; ++k) to[k] = static_cast<To>(from[k]);
}
#ifdef __x86_64__
// c10 converts a number of fp16 in steps that g++ does not vectorize.
__attribute__((target("avx2,f16c"))) void convert_by_f16c(const at::Half* from, float* to,
                                                          std::int64_t n) {
  std::int64_t k = 0;
  for (; k + 8 <= n; k += 8) {
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k));
    _mm256_storeu_ps(to + k, _mm256_cvtph_ps(some));
  }
  convert(from + k, to + k, n - k);
}
__attribute__((target("avx2,f16c"))) void convert_by_f16c(const float* from, at::Half* to,
                                                          std::int64_t n) {
  std::int64_t k = 0;
  for (; k + 8 <= n; k += 8) {
    const __m128i some = _mm256_cvtps_ph(_mm256_loadu_ps(from + k), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k), some);
  }
  convert(from + k, to + k, n - k);
}
#endif

// The pass over the rows of one table.
template <class T>
class Pass {
 public:
  using Number = std::conditional_t<std::is_same_v<T, double>, double, float>;

  Pass(const NamedRows& named, const RowRule& rule, const at::Tensor& table,
       const at::Tensor& gradients, const at::Tensor& first, const at::Tensor& second)
      : named_(named),
        rule_(rule),
        columns_(table.numel() / table.size(0)),
        state_columns_(rule.kind == RowRule::Kind::rowwise_adagrad ? 1 : columns_),
        table_(table.data_ptr<T>()),
        gradients_(gradients.data_ptr<T>()),
        first_(first.defined() ? first.data_ptr<Number>() : nullptr),
        second_(second.defined() ? second.data_ptr<Number>() : nullptr) {}

  // Steps the rows whose first place is one of `begin` to `end`.
  template <bool kAvx2>
  STITCH_ROW_INLINE void run(std::int64_t begin, std::int64_t end) const {
    constexpr bool kWide = std::is_same_v<T, Number>;
    std::vector<Number> scratch(static_cast<std::size_t>(2 * columns_));
    Number* const sum = scratch.data();
    Number* const wide = sum + columns_;
    for (std::int64_t i = begin; i < end; ++i) {
      if (i + kAhead < named_.size()) fetch(named_[i + kAhead]);
      const auto [row, position] = named_[i];
      if (i > 0 && named_[i - 1].row == row) continue;
      const T* const gradient = gradients_ + position * columns_;
      const bool once = i + 1 == named_.size() || named_[i + 1].row != row;
      if (!kWide || !once) copy<kAvx2>(gradient, sum);
      for (std::int64_t j = i + 1; j < named_.size() && named_[j].row == row; ++j) {
        copy<kAvx2>(gradients_ + named_[j].position * columns_, wide);
        for (std::int64_t k = 0; k < columns_; ++k) sum[k] += wide[k];
      }
      T* const weights = table_ + row * columns_;
      Number* const first = first_ == nullptr ? nullptr : first_ + row * state_columns_;
      Number* const second = second_ == nullptr ? nullptr : second_ + row * state_columns_;
      if constexpr (kWide) {
        step_row(rule_, columns_, weights, once ? gradient : sum, first, second);
      } else {
        copy<kAvx2>(weights, wide);
        step_row(rule_, columns_, wide, sum, first, second);
        copy<kAvx2>(wide, weights);
      }
    }
  }

 private:
  template <bool kAvx2, class From, class To>
  STITCH_ROW_INLINE void copy(const From* from, To* to) const {
#ifdef __x86_64__
    if constexpr (kAvx2 && std::is_same_v<T, at::Half>) return convert_by_f16c(from, to, columns_);
#endif
    convert(from, to, columns_);
  }
  template <int kWrite>
  STITCH_ROW_INLINE static void fetch(const void* start, std::int64_t bytes) {
    const char* const line = static_cast<const char*>(start);
    for (std::int64_t at = 0; at < std::min(bytes, kFetchedBytes); at += kLine)
      __builtin_prefetch(line + at, kWrite);
  }
  STITCH_ROW_INLINE void fetch(const NamedRows::Named& named) const {
    const auto bytes = columns_ * static_cast<std::int64_t>(sizeof(T));
    const auto state_bytes = state_columns_ * static_cast<std::int64_t>(sizeof(Number));
    fetch<0>(gradients_ + named.position * columns_, bytes);
    fetch<1>(table_ + named.row * columns_, bytes);
    if (first_ != nullptr) fetch<1>(first_ + named.row * state_columns_, state_bytes);
    if (second_ != nullptr) fetch<1>(second_ + named.row * state_columns_, state_bytes);
  }

  const NamedRows& named_;
  const RowRule rule_;
  const std::int64_t columns_;
  const std::int64_t state_columns_;
  T* const table_;
  const T* const gradients_;
  Number* const first_;
  Number* const second_;
};

template <class T>
void run_plain(const Pass<T>& pass, std::int64_t begin, std::int64_t end) {
  pass.template run<false>(begin, end);
}
#ifdef __x86_64__
// Without fused multiply-add, which would round otherwise.
template <class T>
__attribute__((target("avx2,f16c"))) void run_avx2(const Pass<T>& pass, std::int64_t begin,
                                                   std::int64_t end) {
  pass.template run<true>(begin, end);
}
#endif

// at::parallel_for would run on this thread alone, for want of OpenMP where this is compiled; the
// loop of libtorch's operators has it.
template <class Body>
void in_parallel(std::int64_t size, std::int64_t grain, const Body& body) {
  const at::Tensor places = at::empty({size}, at::kByte);  // never touched
  const char* const first = static_cast<const char*>(places.data_ptr());
  at::TensorIterator::borrowing_nullary_op(places).for_each(
      [&](char** data, const std::int64_t*, std::int64_t n) {
        body(*data - first, *data - first + n);
      },
      grain);
}

template <class T>
void run(const Pass<T>& pass, std::int64_t size, std::int64_t columns) {
  const auto some = [&](std::int64_t begin, std::int64_t end) {
#ifdef __x86_64__
    if (step_rows_with_avx2) return run_avx2(pass, begin, end);
#endif
    run_plain(pass, begin, end);
  };
  in_parallel(size, std::max<std::int64_t>(1, kGrain / columns), some);
}

template <class T>
void step_in_one_pass(const at::Tensor& table, const at::Tensor& gradient, const RowRule& rule,
                      const at::Tensor& first, const at::Tensor& second) {
  const bool sparse = gradient.is_sparse();
  const at::Tensor indices = sparse ? gradient._indices().select(0, 0).contiguous() : at::Tensor();
  const at::Tensor values = (sparse ? gradient._values() : gradient).contiguous();
  const NamedRows named = sparse ? NamedRows(indices, table.size(0)) : NamedRows(table.size(0));
  if (named.size() == 0) return;
  run(Pass<T>(named, rule, table, values, first, second), named.size(),
      table.numel() / table.size(0));
  torch::autograd::impl::bump_version(table);
}

void step_by_operators(const at::Tensor& table, const at::Tensor& gradient, const RowRule& rule,
                       const at::Tensor& first, const at::Tensor& second) {
  const at::Tensor once = gradient.is_sparse() ? gradient.coalesce() : at::Tensor();
  const at::Tensor rows = once.defined()
                              ? once.indices()[0]
                              : at::arange(table.size(0), gradient.options().dtype(at::kLong));
  const std::int64_t count = rows.numel();
  if (count == 0) return;
  const auto type = state_type(table);
  const at::Tensor g = (once.defined() ? once.values() : gradient).to(type).reshape({count, -1});
  const auto changed = [&](const at::Tensor& state, const auto& change) {
    at::Tensor kept = state.index_select(0, rows);
    at::Tensor flat = kept.view({count, -1});
    change(flat);
    state.index_copy_(0, rows, kept);
    return flat;
  };
  at::Tensor delta = g;
  if (rule.kind == RowRule::Kind::adam) {
    const at::Tensor mean =
        changed(first, [&](at::Tensor& kept) { kept.add_(g - kept, rule.approach_first); });
    const at::Tensor square =
        changed(second, [&](at::Tensor& kept) { kept.add_(g * g - kept, rule.approach_second); });
    delta = mean / square.sqrt().add_(rule.eps);
  } else if (rule.kind != RowRule::Kind::sgd) {
    const bool rowwise = rule.kind == RowRule::Kind::rowwise_adagrad;
    const at::Tensor sum = changed(first, [&](at::Tensor& kept) {
      kept.add_(rowwise ? g.square().mean(1, /*keepdim=*/true) : g.square());
    });
    delta = g / sum.sqrt().add_(rule.eps);
  }
  const at::Tensor old = table.index_select(0, rows);
  table.index_copy_(0, rows,
                    old.to(type).view_as(delta).sub(delta, rule.rate).view_as(old).to(old.dtype()));
}

bool has_avx2() {
#ifdef __x86_64__
  unsigned int a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  return f16c && __builtin_cpu_supports("avx2");
#else
  return false;
#endif
}

}  // namespace

bool step_rows_with_avx2 = has_avx2();

void step_rows(const at::Tensor& table, const at::Tensor& gradient, const RowRule& rule,
               const at::Tensor& first, const at::Tensor& second) {
  const bool rowwise = rule.kind == RowRule::Kind::rowwise_adagrad;
  const auto plain = [&](const at::Tensor& each, at::ScalarType type, std::int64_t size) {
    return !each.defined() ||
           (each.device().is_cpu() && each.layout() == at::kStrided && each.is_contiguous() &&
            each.scalar_type() == type && each.numel() == size);
  };
  const auto state = [&](const at::Tensor& each) {
    return plain(each, state_type(table), rowwise ? table.size(0) : table.numel());
  };
  const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  const bool in_one_pass = plain(table, table.scalar_type(), table.numel()) && state(first) &&
                           state(second) && values.device().is_cpu() &&
                           values.layout() == at::kStrided &&
                           values.scalar_type() == table.scalar_type() && table.size(0) < kLimit &&
                           values.size(0) < kLimit;
  const auto with = [&](const auto& step) { step(table, gradient, rule, first, second); };
  if (in_one_pass && table.scalar_type() == at::kFloat) return with(step_in_one_pass<float>);
  if (in_one_pass && table.scalar_type() == at::kDouble) return with(step_in_one_pass<double>);
  if (in_one_pass && table.scalar_type() == at::kHalf) return with(step_in_one_pass<at::Half>);
  if (in_one_pass && table.scalar_type() == at::kBFloat16)
    return with(step_in_one_pass<at::BFloat16>);
  with(step_by_operators);
}

}  // namespace stitch::optim
