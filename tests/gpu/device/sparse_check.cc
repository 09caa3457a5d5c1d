#include <algorithm>
#include <random>
#include <string>

#include "tests/gpu/device/device_memory.h"
#include "tests/gpu/device/kernel_check.h"
#include "tests/gpu/sparse_reference.h"

namespace stitch::transport::gpu {
namespace {

constexpr SparseRule kRules[] = {SparseRule::sgd, SparseRule::adagrad, SparseRule::rowwise_adagrad,
                                 SparseRule::adam};
constexpr const char* kNames[] = {"sgd", "adagrad", "row-wise adagrad", "adam"};

// A case on the device.
class SparseOnDevice {
 public:
  SparseOnDevice(const KernelCheck& check, const SparseCase& c)
      : check_(check),
        update_(c.update()),
        indices_(c.indices),
        gradients_(c.gradients),
        weights_(c.weights),
        first_(c.first),
        second_(c.second),
        errors_(std::vector<std::uint32_t>{0}),
        workspace_(workspace_bytes()) {
    update_.indices = indices_.address();
    update_.gradients = gradients_.address();
    update_.weights = weights_.address();
    update_.first_state = first_.address();
    update_.second_state = second_.address();
    update_.workspace = workspace_.address();
    update_.workspace_bytes = workspace_.bytes();
  }

  void run(const Stream& stream) {
    expect("sparse_update",
           check_.table.sparse_update(check_.device, &update_,
                                      static_cast<std::uint32_t*>(errors_.get()), stream.get()));
  }
  [[nodiscard]] SparseCase result(SparseCase c) const {
    c.weights = weights_.values<float>();
    c.first = first_.values<float>();
    c.second = second_.values<float>();
    return c;
  }
  [[nodiscard]] bool reports_error() const { return errors_.values<std::uint32_t>()[0] != 0; }

 private:
  void expect(const char* what, int status) const {
    if (status != 0)
      throw std::runtime_error(std::string(what) + ": " + check_.table.describe(status));
  }
  [[nodiscard]] std::uint64_t workspace_bytes() const {
    std::uint64_t bytes = 0;
    expect("sparse_workspace",
           check_.table.sparse_workspace(check_.device, update_.count, update_.rows,
                                         update_.columns, &bytes));
    return bytes;
  }

  const KernelCheck& check_;
  SparseUpdate update_;
  DeviceMemory indices_;
  DeviceMemory gradients_;
  DeviceMemory weights_;
  DeviceMemory first_;
  DeviceMemory second_;
  DeviceMemory errors_;
  DeviceMemory workspace_;
};

std::string check_case(const KernelCheck& check, const SparseCase& c, double tolerance) {
  const Stream stream;
  SparseOnDevice once(check, c);
  once.run(stream);
  SparseOnDevice twice(check, c);
  twice.run(stream);
  stream.wait();
  const SparseCase result = once.result(c);
  const SparseCase again = twice.result(c);
  const auto shape = [&] {
    return " with " + std::to_string(c.rows) + " rows of " + std::to_string(c.columns) + ", " +
           std::to_string(c.indices.size()) + " indices";
  };
  if (result.weights != again.weights || result.first != again.first ||
      result.second != again.second)
    return "two runs differ" + shape();
  const SparseTables expected = sparse_reference(c);
  const double difference = std::max({largest_difference(result.weights, expected.weights),
                                      largest_difference(result.first, expected.first),
                                      largest_difference(result.second, expected.second)});
  if (!(difference <= tolerance))
    return "differs from fp64 by " + std::to_string(difference) + shape();
  const bool outside = std::any_of(c.indices.begin(), c.indices.end(), [&](std::int64_t index) {
    return index < 0 || index >= c.rows;
  });
  if (once.reports_error() != outside) return "an index outside of the table is not reported";
  return {};
}

// `count` floating-point operations for fp64 and for the device are the tolerance's reason: sums of
// thousands of gradients are compared less closely.
void check_rule(const KernelCheck& check, SparseRule rule, const char* name) {
  std::mt19937_64 random(5);
  std::string why;
  for (int round = 0; round < check.rounds && why.empty(); ++round) {
    const auto rows = static_cast<std::int64_t>(1 + random() % 3000);
    const auto columns = static_cast<std::int64_t>(1 + random() % 300);
    const auto stride = columns + static_cast<std::int64_t>(random() % 3);
    const auto count = static_cast<std::int64_t>(random() % 5000);
    SparseCase c =
        random_sparse_case(rule, rows, columns, stride, count, round % 3 == 0 ? 0.5 : 0.0, random);
    if (round % 4 == 1 && count > 1) c.indices[1] = rows;
    why = check_case(check, c, 1e-4);
  }
  for (const std::int64_t columns : {4, 128, 130, 700}) {
    if (!why.empty()) break;
    why = check_case(check, random_sparse_case(rule, 1, columns, columns, 20000, 0, random), 1e-3);
  }
  check.report.check(std::string("sparse ") + name, why);
}

void measure_rule(const KernelCheck& check, SparseRule rule, const char* name, double hot) {
  constexpr std::int64_t kColumns = 128;
  // Weights, two states and gradients; filling more of it on the host would take minutes.
  const std::uint64_t size = std::min<std::uint64_t>(check.bytes, 512U << 20U);
  const std::int64_t rows =
      std::max<std::int64_t>(1, static_cast<std::int64_t>(size) / (4 * kColumns * 4));
  std::mt19937_64 random(6);
  SparseCase c = random_sparse_case(rule, rows, kColumns, kColumns, rows, hot, random);
  std::vector<std::int64_t> touched = c.indices;
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  // Each gradient is read once; weights and states of touched rows are read and written.
  const double tables = rule == SparseRule::adam ? 3 : rule == SparseRule::adagrad ? 2 : 1;
  const double bytes =
      static_cast<double>(kColumns * 4) *
      (static_cast<double>(rows) + 2 * tables * static_cast<double>(touched.size()));
  SparseOnDevice device(check, c);
  const Stream stream;
  const double seconds = median_seconds(stream, check.rounds, [&] { device.run(stream); });
  check.report.figure(std::string("sparse ") + name + (hot > 0 ? ", half of one row" : ""), bytes,
                      seconds);
}

}  // namespace

void check_sparse(const KernelCheck& check) {
  for (std::size_t i = 0; i < std::size(kRules); ++i) check_rule(check, kRules[i], kNames[i]);
}

void measure_sparse(const KernelCheck& check) {
  for (std::size_t i = 0; i < std::size(kRules); ++i) {
    measure_rule(check, kRules[i], kNames[i], 0);
    measure_rule(check, kRules[i], kNames[i], 0.5);
  }
}

}  // namespace stitch::transport::gpu
