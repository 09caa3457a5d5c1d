// Schedules beside torch.optim.lr_scheduler of Python: PYTHON names the interpreter (default:
// Debian's, which has its torch).
#include "stitch/dist_optim/schedules.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iomanip>
#include <sstream>

#include "tests/support/running_command.h"

namespace schedules_python_test {
namespace {

namespace optim = stitch::optim;

// `code` is run with these names; they print one number a line.
constexpr const char* kPython = R"(
import sys, torch
from torch.optim.lr_scheduler import *
def optimizer():
    return torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.5)
def rates(make, steps):
    o = optimizer()
    scheduler = make(o)
    for _ in range(steps):
        print(repr(o.param_groups[0]['lr']))
        o.step()
        scheduler.step()
def factors(**options):
    o = optimizer()
    scheduler = ReduceLROnPlateau(o, eps=0, **options)
    for metric in sys.argv[1:]:
        scheduler.step(float(metric))
        print(repr(o.param_groups[0]['lr']))
)";

class SchedulesInPython : public ::testing::Test {
 protected:
  void SetUp() override {
    stitch::testing::RunningCommand import({python(), "-c", "import torch"},
                                           std::chrono::seconds(100));
    if (import.wait() != 0) GTEST_SKIP() << "Python has no torch: install python3-torch";
  }
  static std::vector<double> printed(const std::string& code,
                                     const std::vector<double>& arguments = {}) {
    std::vector<std::string> command{python(), "-W", "ignore", "-c", kPython + code};
    for (const double each : arguments) {
      std::ostringstream text;
      text << std::setprecision(17) << each;
      command.push_back(text.str());
    }
    stitch::testing::RunningCommand run(command, std::chrono::seconds(100));
    EXPECT_EQ(run.wait(), 0) << run.err();
    std::vector<double> numbers;
    std::istringstream out(run.out());
    for (std::string each; out >> each;) numbers.push_back(std::strtod(each.c_str(), nullptr));
    return numbers;
  }

 private:
  static std::string python() {
    const char* const named = std::getenv("PYTHON");
    return named != nullptr ? named : "/usr/bin/python3";
  }
};

TEST_F(SchedulesInPython, HaveTheSameRates) {
  constexpr std::size_t kSteps = 11;
  const std::pair<optim::Schedule, std::string> cases[] = {
      {optim::linear({.steps = 8, .first = 0.25, .last = 1}), "LinearLR(o, 0.25, 1, 8)"},
      {optim::step({.steps = 3, .factor = 0.5}), "StepLR(o, 3, 0.5)"},
      {optim::exponential({.factor = 0.9}), "ExponentialLR(o, 0.9)"},
      {optim::cosine({.steps = 10, .last = 0.1}), "CosineAnnealingLR(o, 10, eta_min=0.1)"},
      {optim::one_cycle({.steps = 11}), "OneCycleLR(o, 1.0, total_steps=11)"},
      {optim::step({.warm_up = 4, .steps = 2, .factor = 0.5}),
       "SequentialLR(o, [LinearLR(o, 0.2, total_iters=4), StepLR(o, 2, 0.5)], [4])"}};
  std::string code;
  for (const auto& [schedule, make] : cases)
    code += "rates(lambda o: " + make + ", " + std::to_string(kSteps) + ")\n";
  const auto expected = printed(code);
  ASSERT_EQ(expected.size(), std::size(cases) * kSteps);
  std::size_t at = 0;
  for (const auto& [schedule, make] : cases) {
    for (std::size_t t = 0; t < kSteps; ++t)
      EXPECT_NEAR(schedule(static_cast<std::int64_t>(t)), expected[at++], 1e-14) << make << t;
  }
}

TEST_F(SchedulesInPython, PlateausHaveTheSameFactors) {
  std::vector<double> metrics{2.5, std::nan("")};
  for (int i = 0; i < 100; ++i) metrics.push_back(1 + 1.0 / (1 + i) + (i * 7919 % 13) / 100.0);
  const std::pair<optim::PlateauOptions, std::string> cases[] = {
      {{}, ""},
      {{.factor = 0.5, .patience = 2, .threshold = 0.01, .cooldown = 3},
       "factor=0.5, patience=2, threshold=0.01, cooldown=3"},
      {{.factor = 0.9, .patience = 0, .threshold = 0.1, .absolute = true, .min = 0.1},
       "factor=0.9, patience=0, threshold=0.1, threshold_mode='abs', min_lr=0.1"},
      {{.patience = 4, .greater_is_better = true}, "patience=4, mode='max'"},
      {{.patience = 4, .absolute = true, .greater_is_better = true},
       "patience=4, mode='max', threshold_mode='abs'"}};
  std::string code;
  for (const auto& [options, arguments] : cases) code += "factors(" + arguments + ")\n";
  const auto expected = printed(code, metrics);
  ASSERT_EQ(expected.size(), std::size(cases) * metrics.size());
  std::size_t at = 0;
  for (const auto& [options, arguments] : cases) {
    optim::Plateau plateau(options);
    double factor = 1;
    for (const double metric : metrics) {
      factor = plateau.observe(metric);
      EXPECT_DOUBLE_EQ(factor, expected[at++]) << arguments << " after " << metric;
    }
    EXPECT_LT(factor, 1) << arguments;
  }
}

}  // namespace
}  // namespace schedules_python_test
