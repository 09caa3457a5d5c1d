// Checkpoints of modules and named tensors: contents, deaths, refusals. Optimizers are in
// tests/dist_optim/checkpoint_test.cc.
#include "stitch/rref/checkpoint.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <fstream>
#include <iterator>
#include <limits>
#include <regex>

#include "stitch/rref/owner_part.h"
#include "stitch/rref/parameter_lock.h"
#include "tests/support/forked_child.h"
#include "tests/support/world_test.h"

namespace stitch::checkpoint_of_tensors_test {
namespace {

namespace fs = std::filesystem;
using namespace stitch::testing;
using NamedTensors = std::vector<std::pair<std::string, RRef<at::Tensor>>>;

// A folder that a checkpoint may make.
struct Folder : TemporaryFolder {
  [[nodiscard]] fs::path path() const { return TemporaryFolder::path() / "made" / "checkpoint"; }
  [[nodiscard]] std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& each : fs::directory_iterator(path())) names.insert(each.path().filename());
    return names;
  }
};
std::string contents(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void overwrite(const fs::path& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
}

struct Net : torch::nn::Module {
  Net() {
    linear = register_module("linear", torch::nn::Linear(3, 2));
    norm = register_module("norm", torch::nn::BatchNorm1d(2));
    register_parameter("tied", linear->weight);
  }
  at::Tensor forward(at::Tensor x) { return norm(linear(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

at::Tensor filled(std::vector<std::int64_t> sizes, double value) { return at::full(sizes, value); }
RRef<at::Tensor> on(const std::string& worker, std::vector<std::int64_t> sizes, double value) {
  return remote<filled>(worker, std::move(sizes), value);
}
void fill(const RRef<at::Tensor>& reference, double value) {
  const at::Tensor& tensor = reference.local_value();
  const auto lock = rref::parameter_lock(tensor);
  base::MutexLock held(*lock);
  tensor.fill_(value);
}
void set(const RRef<at::Tensor>& tensor, double value) {
  rpc_sync<fill>(tensor.owner(), tensor, value);
}
bool has(const RRef<at::Tensor>& tensor, double value) {
  const at::Tensor now = tensor.to_here();
  return at::equal(now, at::full_like(now, value));
}
Checkpoint of(const fs::path& folder, const NamedTensors& tensors, CheckpointOptions options = {}) {
  Checkpoint checkpoint(folder, std::move(options));
  checkpoint.add("t", tensors);
  return checkpoint;
}

TEST(Checkpoint, ModulesTensorsAndValuesComeBackOnOtherOwners) {
  Cluster cluster(3);
  const Folder folder;
  const RemoteModule<Net> net("worker1");
  const auto one = on("worker1", {4, 2}, 1.0), two = on("worker2", {3}, 2.0);
  net.forward(at::randn({5, 3}));  // changes buffers
  Checkpoint checkpoint(folder.path(), {.name = "run-1"});
  checkpoint.add("net", net);
  checkpoint.add("rows", {{"one", one}, {"two", two}});
  const double inf = std::numeric_limits<double>::infinity();
  checkpoint.values = {
      {"step", 7},      {"seed", std::int64_t{1} << 62},        {"lr", 0.1},    {"best", -inf},
      {"name", "\xe5"}, {"sizes", std::vector<double>{1, inf}}, {"done", true}, {"whole", 2.0}};
  EXPECT_TRUE(contains(error_of([&] { checkpoint.save(); }).what(), "not UTF-8"));
  checkpoint.values["name"] = "\xe5\x90\x8d";
  const auto saved_values = checkpoint.values;
  checkpoint.save();
  EXPECT_EQ(folder.files(),
            (std::set<std::string>{"run-1.1.json", "run-1.1.net.0.safetensors",
                                   "run-1.1.rows.0.safetensors", "run-1.1.rows.1.safetensors"}));
  for (const auto& each : folder.files())
    EXPECT_EQ(fs::status(folder.path() / each).permissions(),
              fs::perms::owner_read | fs::perms::owner_write);
  // Python's names, tied weights once.
  const auto state = net.state_dict();
  const auto file = stitch::load(folder.path() / "run-1.1.net.0.safetensors");
  EXPECT_EQ(file.size(), state.size() - 1);
  for (const auto& [name, tensor] : file) EXPECT_TRUE(at::equal(tensor, state.at(name))) << name;

  const RemoteModule<Net> other("worker2");
  const auto first = on("worker0", {3}, 0.0), second = on("worker0", {4, 2}, 0.0);
  Checkpoint again(folder.path(), {.name = "run-1"});
  again.add("net", other);
  again.add("rows", {{"two", first}, {"one", second}});
  again.load();
  EXPECT_EQ(again.values, saved_values);
  EXPECT_TRUE(has(first, 2.0) && has(second, 1.0));
  for (const auto& [name, tensor] : other.state_dict())
    EXPECT_TRUE(at::equal(tensor, state.at(name))) << name;
  // A part alone.
  set(first, 9.0);
  auto part = Checkpoint(folder.path(), {.name = "run-1"});
  part.add("rows", {{"two", first}, {"one", second}});
  part.load();
  EXPECT_TRUE(has(first, 2.0));
}

TEST(Checkpoint, OfAModuleAloneIsSavedAndLoadedByIt) {
  Cluster cluster(2);
  const Folder folder;
  const RemoteModule<Net> net("worker1"), other("worker0");
  net.save(folder.path());
  other.load(folder.path());
  const auto state = net.state_dict();
  for (const auto& [name, tensor] : other.state_dict())
    EXPECT_TRUE(at::equal(tensor, state.at(name))) << name;
  const RemoteModule<torch::nn::Linear> linear("worker1", 3, 2);
  EXPECT_TRUE(has_text(error_of([&] { linear.save(folder.path()); }), ErrorCode::invalid_argument,
                       "model.1.json: it has parameter \"linear.bias\" in part \"model\", which "
                       "this one has not"));
  linear.save(folder.path(), "linear");  // beside it
  other.load(folder.path());
}

TEST(Checkpoint, TensorsOfEveryTypeAndLayoutComeBack) {
  Cluster cluster(2);
  const Folder folder;
  const std::map<std::string, at::Tensor> tensors{
      {"bf16", at::randn({3}).to(at::kBFloat16)},
      {"half", at::randn({5}).to(at::kHalf)},
      {"bool", at::randn({7}) > 0},
      {"bytes", at::arange(3).to(at::kByte)},
      {"long", at::arange(11)},
      {"complex", at::complex(at::randn({3}), at::randn({3}))},
      {"transposed", at::randn({3, 5}).t()},
      {"large", at::randn({1031, 1033}).t()},  // more than a piece
      {"number", at::scalar_tensor(2.5)},
      {"none", at::empty({0, 4})},
      {"leaf", at::randn({2}, at::kDouble).set_requires_grad(true)}};
  NamedTensors from, to;
  for (const auto& [name, tensor] : tensors) {
    from.emplace_back(name, make_rref(tensor));
    to.emplace_back(name, make_rref(at::zeros_like(tensor)));
  }
  of(folder.path(), from).save();
  of(folder.path(), to).load();
  for (const auto& [name, tensor] : to)
    EXPECT_TRUE(at::equal(tensor.to_here(), tensors.at(name).detach())) << name;
  EXPECT_TRUE(contains(error_of([&] {
                         of(folder.path(), {{"a", make_rref(at::eye(2).to_sparse())}}).save();
                       }).what(),
                       "tensor \"a\" cannot be in a checkpoint"));
  const auto twice = make_rref(at::ones({2}));
  EXPECT_TRUE(contains(error_of([&] {
                         of(folder.path(), {{"a", twice}, {"b", twice}}).save();
                       }).what(),
                       "tensor \"b\" is undefined, or given under two names"));
}

TEST(Checkpoint, AsManySavesStayAsAreKept) {
  Cluster cluster(1);
  const Folder folder;
  const auto tensor = on("worker0", {2}, 0.0);
  for (const std::size_t keep : {3, 1}) {
    auto checkpoint = of(folder.path(), {{"a", tensor}}, {.keep = keep});
    for (int i = 0; i < 5; ++i) checkpoint.save();
    EXPECT_EQ(folder.files().size(), 2 * keep);
  }
  EXPECT_TRUE(folder.files().contains("checkpoint.10.json"));
}

// The process dies at each step of a second save: with files half written, whole, without the
// manifest. The former save is loaded, and the next one removes what is left.
TEST(Checkpoint, ASaveThatIsCutOffLeavesTheFormerOne) {
  Cluster cluster(2);
  const Folder folder, elsewhere;
  const auto one = on("worker0", {2}, 1.0), two = on("worker1", {2}, 1.0);
  auto checkpoint = of(folder.path(), {{"one", one}, {"two", two}});
  checkpoint.save();
  const auto whole = folder.files();
  set(one, 2.0);
  set(two, 2.0);
  of(elsewhere.path(), {{"one", one}, {"two", two}}).save();
  const auto expect_former = [&] {
    set(one, 3.0);
    set(two, 3.0);
    checkpoint.load();
    EXPECT_TRUE(has(one, 1.0) && has(two, 1.0));
  };
  const auto later = [&](const std::string& file) {
    return contents(elsewhere.path() / ("checkpoint.1." + file));
  };
  const auto put = [&](const std::string& file, const std::string& bytes) {
    overwrite(folder.path() / ("checkpoint.2." + file), bytes);
  };
  put("t.0.safetensors.123.part", later("t.0.safetensors").substr(0, 30));
  expect_former();
  put("t.0.safetensors.123.part", later("t.0.safetensors"));
  expect_former();
  put("t.0.safetensors", later("t.0.safetensors"));
  put("t.1.safetensors", later("t.1.safetensors"));
  expect_former();
  put("json.99.part", later("json").substr(0, 20));
  expect_former();
  // Files of others stay.
  overwrite(folder.path() / "checkpoint-2.1.json", "");
  overwrite(folder.path() / "checkpoint.x.t.0.safetensors", "");
  checkpoint.save();
  EXPECT_EQ(folder.files(),
            (std::set<std::string>{"checkpoint-2.1.json", "checkpoint.x.t.0.safetensors",
                                   "checkpoint.3.json", "checkpoint.3.t.0.safetensors",
                                   "checkpoint.3.t.1.safetensors"}));
}

// A worker saves on and on, is killed at a random time, and the next one loads.
TEST(Checkpoint, AProcessThatIsKilledWhileItSavesLeavesAWholeCheckpoint) {
  const Folder folder;
  std::mt19937 random(7);
  std::int64_t before = 0;
  for (int life = 0; life < 12; ++life) {
    const fs::path saved = folder.path().parent_path() / "saved";
    fs::remove(saved);
    ForkedChild child([&] {
      Cluster cluster(1);
      const auto one = on("worker0", {300}, 0.0), two = on("worker0", {2}, 0.0);
      auto checkpoint = of(folder.path(), {{"one", one}, {"two", two}}, {.keep = 2});
      if (life > 0) checkpoint.load();
      for (std::int64_t step = before + 1;; ++step) {
        set(one, static_cast<double>(step));
        set(two, static_cast<double>(step));
        checkpoint.values["step"] = step;
        checkpoint.save();
        overwrite(saved, "");
      }
    });
    ASSERT_TRUE(eventually([&] { return fs::exists(saved); }));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
    child.kill();
    child.wait();
    Cluster cluster(1);
    const auto one = on("worker0", {300}, 0.0), two = on("worker0", {2}, 0.0);
    auto checkpoint = of(folder.path(), {{"one", one}, {"two", two}}, {.keep = 2});
    checkpoint.load();
    const auto step = std::get<std::int64_t>(checkpoint.values.at("step"));
    EXPECT_GT(step, before);
    EXPECT_TRUE(has(one, static_cast<double>(step)) && has(two, static_cast<double>(step)));
    before = step;
  }
}

// Any changed byte of any file, and any file cut anywhere, is an error that names it.
TEST(Checkpoint, DamageAnywhereIsFoundAndNothingChanges) {
  Cluster cluster(2);
  const Folder folder;
  const auto one = on("worker0", {2}, 1.0), two = on("worker1", {3}, 1.0);
  auto checkpoint = of(folder.path(), {{"one", one}, {"two", two}});
  checkpoint.values["step"] = 5;
  checkpoint.save();
  set(one, 4.0);
  set(two, 4.0);
  const auto expect_refused = [&](const std::string& file) {
    const Error error = error_of([&] { checkpoint.load(); });
    ASSERT_TRUE(has_text(error, ErrorCode::invalid_argument, file)) << error.what();
  };
  for (const std::string& name : folder.files()) {
    SCOPED_TRACE(name);
    const fs::path file = folder.path() / name;
    const std::string good = contents(file);
    for (std::size_t at = 0; at < good.size(); at += at < 40 ? 1 : 7) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 0x41);
      overwrite(file, bad);
      expect_refused(name);
      overwrite(file, good.substr(0, at));
      expect_refused(name);
    }
    fs::remove(file);
    EXPECT_EQ(error_of([&] { checkpoint.load(); }).code(), ErrorCode::invalid_argument);
    overwrite(file, good);
  }
  EXPECT_TRUE(has(one, 4.0) && has(two, 4.0));
  const fs::path manifest = folder.path() / "checkpoint.1.json";
  const std::string good = contents(manifest);
  overwrite(manifest, "{}");
  EXPECT_TRUE(contains(error_of([&] { checkpoint.save(); }).what(),
                       "checkpoint.1.json: it is not the manifest of a checkpoint; to save under "
                       "its name, remove that file"));
  overwrite(manifest, good);
  // The older save is still there.
  auto keeping = of(folder.path(), {{"one", one}, {"two", two}}, {.keep = 2});
  keeping.save();
  overwrite(folder.path() / "checkpoint.2.t.1.safetensors", "bad");
  EXPECT_TRUE(has_text(error_of([&] { keeping.load(); }), ErrorCode::invalid_argument,
                       "checkpoint.2.t.1.safetensors: it is damaged"));
  fs::remove(folder.path() / "checkpoint.2.json");
  keeping.load();
  EXPECT_TRUE(has(one, 1.0) && has(two, 1.0));
}

TEST(Checkpoint, WhatDoesNotFitIsNamedAndNothingChanges) {
  Cluster cluster(2);
  const Folder folder;
  const auto a = on("worker0", {2}, 1.0), b = on("worker1", {3}, 1.0);
  of(folder.path(), {{"a", a}, {"b", b}}).save();
  const auto unloaded = [&](const NamedTensors& tensors, const std::string& why) {
    EXPECT_TRUE(has_text(error_of([&] { of(folder.path(), tensors).load(); }),
                         ErrorCode::invalid_argument, "checkpoint.1.json: " + why));
  };
  set(a, 4.0);
  unloaded({{"a", a}}, "part \"t\" has parameter \"b\", which is unknown here");
  unloaded({{"a", a}, {"b", b}, {"c", on("worker1", {1}, 0.0)}},
           "part \"t\" has no parameter \"c\"");
  unloaded({{"a", a}, {"b", on("worker1", {4}, 0.0)}},
           "parameter \"b\" of part \"t\" is F32 [3], here it is F32 [4]");
  unloaded({{"a", a}, {"b", make_rref(at::zeros({3}, at::kDouble))}},
           "parameter \"b\" of part \"t\" is F32 [3], here it is F64 [3]");
  Checkpoint other(folder.path());
  other.add("u", {{"a", a}});
  EXPECT_TRUE(contains(error_of([&] { other.load(); }).what(), "it has no part \"u\""));
  EXPECT_TRUE(has(a, 4.0));

  EXPECT_TRUE(contains(error_of([&] { other.save(); }).what(),
                       "checkpoint.1.json: it has part \"t\", which this one has not: it is "
                       "another program's or another optimizer's; give this checkpoint a name"));
  EXPECT_TRUE(contains(error_of([&] {
                         of(folder.path(), {{"a", a}, {"a", b}}).save();
                       }).what(),
                       "part \"t\" of a checkpoint has two parameters named \"a\""));
  of(folder.path(), {{"a", a}, {"b", b}, {"c", on("worker1", {1}, 0.0)}}).save();  // has grown
  EXPECT_TRUE(contains(error_of([&] { of(folder.path() / "none", {}).load(); }).what(),
                       "none: it cannot be read: No such file"));
  EXPECT_TRUE(contains(error_of([&] {
                         of("/proc/none", {{"a", a}}).save();
                       }).what(),
                       "/proc/none: it cannot be made"));
  for (const std::string& name : {std::string(), std::string("a.b"), std::string("../a"),
                                  std::string(65, 'a'), std::string("\xe5\x90\x8d")}) {
    EXPECT_TRUE(contains(error_of([&] { Checkpoint(folder.path(), {.name = name}); }).what(),
                         "is not 1 to 64 letters, digits"));
    EXPECT_THROW(other.add(name, NamedTensors()), Error);
  }
  EXPECT_TRUE(contains(error_of([&] { other.add("u", NamedTensors()); }).what(), "two parts"));
  EXPECT_THROW(Checkpoint(folder.path(), {.keep = 0}), Error);
}

TEST(Checkpoint, OfAnOlderVersionIsRefused) {
  Cluster cluster(1);
  const Folder folder;
  fs::create_directories(folder.path());
  overwrite(folder.path() / "worker0.optimizer", "stitchos");
  EXPECT_TRUE(contains(error_of([&] { of(folder.path(), {}).load(); }).what(),
                       "worker0.optimizer: it is of an older version of stitch"));
}

// An owner whose tensors cannot be exchanged after the first, change their shape, or are read while
// a step is under way.
class Failing final : public rref::StoredObject {
 public:
  explicit Failing(const std::string& how) : how_(how) {}
  std::vector<std::pair<std::string, at::Tensor>> parameters() const override {
    return {{"x", tensors_[0]}, {"y", tensors_[1]}};
  }
  Fields stored(std::size_t parameter) const override {
    if (how_ == "shape" && ++asked_ > 2) return {{"", at::zeros({3})}};
    return {{"", tensors_[parameter]}};
  }
  void check(std::size_t, const std::vector<rref::StoredTensor>&) const override {
    if (how_ == "check") throw Error(ErrorCode::invalid_argument, "not this one");
  }
  void exchange(std::size_t parameter, Fields& fields) override {
    if (how_ == "take" && parameter == 1) throw std::runtime_error("no memory on the device");
    std::swap(tensors_[parameter], fields.at(""));
    values()[parameter] = tensors_[parameter][0].item<double>();
  }
  static std::array<double, 2>& values() {
    static std::array<double, 2> values{};
    return values;
  }

 private:
  const std::string how_;
  mutable int asked_ = 0;
  std::array<at::Tensor, 2> tensors_{at::zeros({2}), at::zeros({2})};
};
rref::OwnerPart failing(const std::string& how) {
  return rref::OwnerPart(std::make_shared<Failing>(how));
}
// Tensors "a" and "b" of two workers, and "x" and "y" of one that fails.
struct WithFailing {
  [[nodiscard]] rref::CheckpointPart checkpoint_part() const {
    auto part = rref::checkpoint_of(tensors);
    part.owners.insert(part.owners.begin() + 1, remote<failing>("worker1", how));
    return part;
  }
  NamedTensors tensors;
  std::string how;
};

TEST(Checkpoint, IsLoadedByAllOwnersOrByNone) {
  Cluster cluster(3);
  const Folder folder;
  const auto a = on("worker0", {2}, 1.0), b = on("worker2", {2}, 1.0);
  const NamedTensors tensors{{"a", a}, {"b", b}};
  const auto with = [&](const std::string& how) {
    Checkpoint checkpoint(folder.path());
    checkpoint.add("all", WithFailing{tensors, how});
    return checkpoint;
  };
  with("").save();
  set(a, 4.0);
  set(b, 4.0);
  Failing::values() = {5, 5};
  EXPECT_TRUE(has_text(error_of([&] { with("check").load(); }), ErrorCode::invalid_argument,
                       "checkpoint.1.json: it does not fit: "));
  EXPECT_EQ(Failing::values()[0], 5);
  const Error error = error_of([&] { with("take").load(); });
  EXPECT_TRUE(contains(error.what(), "no memory on the device")) << error.what();
  EXPECT_TRUE(has(a, 4.0) && has(b, 4.0));
  EXPECT_EQ(Failing::values(), (std::array<double, 2>{0, 5}));  // what "take" had, and nothing
  EXPECT_TRUE(contains(error_of([&] { with("shape").save(); }).what(),
                       "tensor \"x\" has changed its type or shape while it was saved"));
  with("").load();
  EXPECT_TRUE(has(a, 1.0) && has(b, 1.0));
}

// What a peer can send to an owner.
TEST(Checkpoint, PiecesFromTheWireAreChecked) {
  Cluster cluster(2);
  using rref::OwnerPart;
  const auto tensor = on("worker1", {3}, 1.0);
  const auto part = remote<OwnerPart>("worker1", NamedTensors{{"a", tensor}});
  const auto refused = [&](const auto& call, const std::string& why) {
    const Error error = error_of(call);
    EXPECT_TRUE(has_text(error, ErrorCode::remote_exception, why)) << error.what();
  };
  const auto read = [&](std::uint64_t begin, std::uint64_t bytes) {
    return [=] { (void)part.rpc_sync<&OwnerPart::read>(begin, bytes); };
  };
  refused(read(0, 13), "piece of 13 bytes from byte 0 on does not exist: there are 12");
  refused(read(12, 1), "does not exist");
  refused(read(~std::uint64_t{0}, 2), "does not exist");
  const auto write = [&](std::uint64_t begin, const at::Tensor& bytes) {
    return [=] { part.rpc_sync<&OwnerPart::write>(begin, bytes); };
  };
  const at::Tensor all = at::zeros({12}, at::kByte);
  refused(write(0, all), "no tensors are being loaded");
  refused([&] { part.rpc_sync<&OwnerPart::take>(); }, "not loaded completely");
  using List = std::vector<rref::StoredParameter>;
  const auto prepare = [&](const List& list) {
    return [=] { part.rpc_sync<&OwnerPart::prepare>(list, CheckpointValues()); };
  };
  const rref::StoredTensor good{"", "F32", {3}};
  refused(prepare({}), "parameters are missing");
  refused(prepare({{"b", "F32", {3}, {good}}}), "given is \"b\"");
  refused(prepare({{"a", "F32", {3}, {{"", "F32", {1 << 30, 1 << 30}}}}}),
          "sizes that no tensor has");
  refused(prepare({{"a", "F32", {3}, {{"", "F99", {3}}}}}), "a type or sizes that no tensor has");
  refused(prepare({{"a", "F32", {3}, {{"", "F32", {-3}}}}}), "a type or sizes that no tensor has");
  refused(prepare({{"a", "F32", {3}, {good, good}}}), "of another type or shape");
  prepare({{"a", "F32", {3}, {good}}})();
  refused(prepare({{"a", "F32", {3}, {good}}}), "tensors are being loaded already");
  refused(write(1, all), "not expected");
  refused(write(0, at::zeros({12}).to_sparse()), "plain bytes");
  refused(write(0, all.narrow(0, 0, 8)), "not expected");
  refused([&] { part.rpc_sync<&OwnerPart::take>(); }, "not loaded completely");
  write(0, all)();
  refused(write(0, all), "or has come already");
  part.rpc_sync<&OwnerPart::take>();
  EXPECT_TRUE(has(tensor, 0.0));
  refused([&] { part.rpc_sync<&OwnerPart::take>(); }, "taken already");
  refused(write(0, all), "no tensors are being loaded");
  part.rpc_sync<&OwnerPart::take_back>();
  part.rpc_sync<&OwnerPart::take_back>();
  EXPECT_TRUE(has(tensor, 1.0));
}

}  // namespace
}  // namespace stitch::checkpoint_of_tensors_test
