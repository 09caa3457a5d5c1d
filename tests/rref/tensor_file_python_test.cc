// Files that Python reads and writes: PYTHON names the interpreter (default: Debian's, which has
// its torch). A file goes there and back, through torch.load(weights_only=True) and torch.save, or
// through safetensors.
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <string>

#include "stitch/rref/checkpoint.h"
#include "stitch/rref/files/tensor_file.h"
#include "tests/rref/every_type.h"
#include "tests/support/cluster.h"
#include "tests/support/running_command.h"
#include "tests/support/temporary_folder.h"

namespace tensor_file_python_test {
namespace {

using stitch::testing::every_type;
using stitch::testing::RunningCommand;
using stitch::testing::same_bits;
using Tensors = std::map<std::string, at::Tensor>;

class TensorFileInPython : public ::testing::Test {
 protected:
  static bool has(const std::string& module) {
    RunningCommand import({python(), "-c", "import " + module}, std::chrono::seconds(100));
    return import.wait() == 0;
  }
  // The tensors after Python: `script` reads the file `ours` and writes the file `theirs`.
  [[nodiscard]] Tensors through(const std::string& script, const Tensors& tensors,
                                const std::string& ending) const {
    const auto ours = folder_.path() / ("ours" + ending);
    const auto theirs = folder_.path() / ("theirs" + ending);
    stitch::save(ours, tensors);
    RunningCommand run(
        {python(), "-c", "import sys; ours, theirs = sys.argv[1:]; " + script, ours, theirs},
        std::chrono::seconds(100));
    EXPECT_EQ(run.wait(), 0) << run.out() << run.err();
    return run.wait() == 0 ? stitch::load(theirs) : Tensors();
  }
  static Tensors of_all_kinds(bool pt) {
    Tensors tensors = every_type(pt);
    tensors["a/b \"c\" \xe5\x90\x8d"] = at::arange(6, at::kFloat).reshape({2, 3}).t();
    tensors["number"] = at::scalar_tensor(3.5);
    tensors["none"] = at::empty({0, 3});
    return tensors;
  }
  static std::string python() {
    const char* const named = std::getenv("PYTHON");
    return named != nullptr ? named : "/usr/bin/python3";
  }
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_.path(); }

 private:
  const stitch::testing::TemporaryFolder folder_;
};

TEST_F(TensorFileInPython, PtGoesThereAndBack) {
  if (!has("torch")) GTEST_SKIP() << "Python has no torch: install python3-torch";
  const Tensors tensors = of_all_kinds(true);
  EXPECT_TRUE(same_bits(
      through("import torch; from collections import OrderedDict; "
              "tensors = torch.load(ours, weights_only=True); assert type(tensors) is dict; "
              "assert all(type(each) is torch.Tensor for each in tensors.values()); "
              "torch.save(OrderedDict(tensors), theirs)",
              tensors, ".pt"),
      tensors));
}

TEST_F(TensorFileInPython, SafetensorsGoThereAndBack) {
  if (!has("safetensors.torch, numpy")) GTEST_SKIP() << "Python has no torch, safetensors or numpy";
  const Tensors tensors = of_all_kinds(false);
  EXPECT_TRUE(same_bits(through("import safetensors.torch as st; st.save_file(st.load_file(ours), "
                                "theirs, {'made by': 'a test'})",
                                tensors, ".safetensors"),
                        tensors));
}

// The output of python/read_checkpoint.py.
class ReadCheckpoint : public TensorFileInPython {
 protected:
  [[nodiscard]] static std::string printed(const std::filesystem::path& file) {
    RunningCommand run({python(), STITCH_READ_CHECKPOINT, file}, std::chrono::seconds(100));
    EXPECT_EQ(run.wait(), 0) << run.out() << run.err();
    return run.out();
  }
};

TEST_F(ReadCheckpoint, ReadsAPtFile) {
  if (!has("torch")) GTEST_SKIP() << "Python has no torch: install python3-torch";
  const auto file = folder() / "a.pt";
  stitch::save(file, {{"w", at::full({2, 3}, 0.5)}});
  EXPECT_EQ(printed(file), "a.pt w torch.float32 [2, 3] 3.0\n");
}

TEST_F(ReadCheckpoint, ReadsTheTensorsOfAllOwners) {
  if (!has("safetensors.torch, numpy")) GTEST_SKIP() << "Python has no torch, safetensors or numpy";
  stitch::testing::Cluster cluster(1);
  stitch::Checkpoint checkpoint(folder(), {.name = "run"});
  checkpoint.add("half", {{"h", stitch::make_rref(at::ones({3}, at::kBFloat16))}});
  checkpoint.add("more", {{"a", stitch::make_rref(at::full({2, 2}, 0.25))},
                          {"n", stitch::make_rref(at::scalar_tensor(7, at::kLong))}});
  checkpoint.values["best"] = std::numeric_limits<double>::infinity();
  checkpoint.save();
  EXPECT_EQ(printed(folder() / "run.1.json"),
            "run.1.half.0.safetensors h torch.bfloat16 [3] 3.0\n"
            "run.1.more.0.safetensors a torch.float32 [2, 2] 1.0\n"
            "run.1.more.0.safetensors n torch.int64 [] 7\n");
}

}  // namespace
}  // namespace tensor_file_python_test
