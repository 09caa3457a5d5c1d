// Steps of row-wise Adagrad on a table of which a gradient names every tenth row, on one core.
#include <ATen/ATen.h>

#include <cstring>
#include <string>

#include "measure.h"
#include "stitch/base/freed_memory.h"
#include "stitch/dist_optim/sparse_optimizers.h"
#include "timing.h"

namespace stitch_bench {

namespace rows_measure {
namespace {

constexpr std::int64_t kColumns = 64;

void measure_rows(const Side& side, at::ScalarType type, const std::string& name,
                  std::int64_t touched, const std::string& floor) {
  const std::int64_t rows = 10 * touched;
  const at::Tensor table = at::full({rows, kColumns}, 0.5, type).set_requires_grad(true);
  const at::Tensor values = at::rand({touched, kColumns}).to(type);
  const at::Tensor indices = at::randperm(rows, at::kLong).slice(0, 0, touched).unsqueeze(0);
  const auto report = [&](const std::string& key, const at::Tensor& gradient) {
    stitch::optim::SparseAdagrad optimizer({table}, stitch::optim::SparseAdagradOptions(1e-3));
    table.mutable_grad() = gradient;
    const auto times =
        time_each_us(side.settings().seconds, 3, [&] { static_cast<void>(optimizer.step()); });
    side.result(key, static_cast<double>(touched) / (median(times) * 1e-6), "rows/s", floor);
  };
  const at::Tensor any = at::sparse_coo_tensor(indices, values, {rows, kColumns});
  report("rows.adagrad." + name, any);
  report("rows.adagrad." + name + ".coalesced", any.coalesce());
}

void first(Side& side) {
  stitch::base::keep_freed_memory();  // as every worker
  const auto& sizes = side.settings().sizes_mib;
  const std::int64_t touched =
      static_cast<std::int64_t>(*std::max_element(sizes.begin(), sizes.end()) * kMiB) /
      (kColumns * static_cast<std::int64_t>(sizeof(float)));
  {
    // A row is read with its gradient, and written.
    const std::size_t bytes = static_cast<std::size_t>(touched * kColumns) * sizeof(float) * 3 / 2;
    const std::vector<char> from(bytes, 'x');
    std::vector<char> to(bytes, 'y');
    const auto times = time_each_us(side.settings().seconds, 3, [&] {
      std::memcpy(to.data(), from.data(), bytes);
      asm volatile("" : : "r"(to.data()) : "memory");
    });
    side.result("floor.rows.memcpy", static_cast<double>(touched) / (median(times) * 1e-6),
                "rows/s");
  }
  measure_rows(side, at::kFloat, "float32", touched, "floor.rows.memcpy");
  measure_rows(side, at::kBFloat16, "bfloat16", touched, "");
  measure_rows(side, at::kHalf, "float16", touched, "");
}

}  // namespace
}  // namespace rows_measure

Measure rows() {
  using namespace rows_measure;
  return {.name = "rows",
          .about = "steps of row-wise Adagrad on every tenth row of a table of 64 columns",
          .first = &first};
}

}  // namespace stitch_bench
