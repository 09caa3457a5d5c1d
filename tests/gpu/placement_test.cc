// Where tensors on devices are put: device maps, on(), containers, references, gradients. Over
// the double of CUDA.
#include <torch/nn/modules/linear.h>

#include <cstdlib>

#include "stitch/rpc/message/message.h"
#include "tests/gpu/device_test.h"

namespace placement_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing::device_names;  // NOLINT

[[maybe_unused]] const bool installed = stitch::testing::double_device::install(false);

at::Tensor cuda(int index, float value, at::IntArrayRef sizes = {2, 3}) {
  return filled(index, value, sizes);
}
bool holds(const at::Tensor& tensor, const std::string& device, float value) {
  return tensor.device().str() == device && all_are(tensor, value);
}
std::map<std::string, std::string> swapped() {
  return {{"cuda:0", "cuda:1"}, {"cuda:1", "cuda:0"}};
}
void worker0_swaps(Options& options) {
  if (options.rank == 0) options.device_maps["worker1"] = swapped();
}

std::string device_of(const at::Tensor& tensor) { return tensor.device().str(); }
at::Tensor twice(const at::Tensor& tensor) { return tensor * 2; }
at::Tensor same(at::Tensor tensor) { return tensor; }
at::Tensor made_on(int index) { return cuda(index, 5); }

TEST(DevicePlacement, AnArgumentArrivesOnTheDeviceOfTheSameNumberAndItsResultReturns) {
  Cluster cluster(2);
  EXPECT_EQ(rpc_sync<device_of>("worker1", cuda(1, 3)), "cuda:1");
  EXPECT_TRUE(holds(rpc_sync<twice>("worker1", cuda(1, 3)), "cuda:1", 6));
}

TEST(DevicePlacement, AMapMovesArgumentsAndItsInverseMovesResults) {
  Cluster cluster(2, worker0_swaps);
  EXPECT_EQ(rpc_sync<device_of>("worker1", cuda(0, 3)), "cuda:1");
  EXPECT_TRUE(holds(rpc_sync<twice>("worker1", cuda(0, 3)), "cuda:0", 6));
  // The map of worker 1, which it has not set, counts for its own calls.
  EXPECT_EQ(cluster[1].rpc_sync<device_of>("worker0", cuda(0, 3)), "cuda:0");
}

std::string devices_of(const std::vector<at::Tensor>& first, const at::Tensor& second) {
  std::string text;
  for (const auto& each : first) text += (each.defined() ? each.device().str() : "none") + ' ';
  return text + second.device().str();
}

TEST(DevicePlacement, AnUnmappedTensorFailsItsCallByPositionBeforeAnythingIsSent) {
  Cluster cluster(2, worker0_maps);
  static_cast<void>(rpc_sync<device_of>("worker1", at::ones(1)));
  const auto sent = cluster[0].debug_info().at("rpc.messages_sent");
  const auto error = error_of([] {
    static_cast<void>(
        rpc_sync<devices_of>("worker1", std::vector{at::ones(1), cuda(0, 1)}, cuda(3, 1)));
  });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                       "argument 2 (tensor 3 of 3) is on device cuda:3, which no device map names "
                       "for worker \"worker1\" (id 1); its map is cuda:0=cuda:1"));
  EXPECT_EQ(cluster[0].debug_info().at("rpc.messages_sent"), sent);
  EXPECT_EQ(rpc_sync<devices_of>("worker1", std::vector{at::ones(1), at::Tensor(), cuda(0, 1)},
                                 cuda(0, 1)),
            "cpu none cuda:1 cuda:1");
}

TEST(DevicePlacement, AResultOnAnUnmappedDeviceIsTheErrorOfItsCall) {
  Cluster cluster(2, worker0_maps);
  const auto error = error_of([] { static_cast<void>(rpc_sync<made_on>("worker1", 2)); });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "its result cannot be sent"));
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "tensor 1 of 1 is on device cuda:2"));
  EXPECT_TRUE(holds(rpc_sync<made_on>("worker1", 1), "cuda:0", 5));
}

TEST(DevicePlacement, AMapToTheCpuBringsResultsBackToTheDevice) {
  Cluster cluster(2, [](Options& options) {
    if (options.rank == 0) options.device_maps["worker1"] = {{"cuda:1", "cpu"}};
  });
  EXPECT_EQ(rpc_sync<device_of>("worker1", cuda(1, 3)), "cpu");
  EXPECT_TRUE(holds(rpc_sync<twice>("worker1", cuda(1, 3)), "cuda:1", 6));
}

PlacedTensor back_to_device(const at::Tensor& tensor) { return on("cuda:2", tensor + 1); }

TEST(DevicePlacement, OnPlacesArgumentsAndResultsOverTheMap) {
  Cluster cluster(2, worker0_swaps);
  EXPECT_EQ(rpc_sync<device_of>("worker1", on("cuda:3", cuda(0, 1))), "cuda:3");
  EXPECT_EQ(rpc_sync<device_of>("worker1", on("cuda", at::ones(2))), "cuda:0");
  EXPECT_EQ(rpc_sync<device_of>("worker1", on(at::kCPU, cuda(3, 1))), "cpu");
  // To the CPU and back to a device in one call.
  const at::Tensor back = rpc_sync<back_to_device>("worker1", on(at::kCPU, cuda(3, 1)));
  EXPECT_TRUE(holds(back, "cuda:2", 2));
}

std::vector<PlacedTensor> placed_inside(std::vector<PlacedTensor> tensors) {
  for (auto& each : tensors) {
    if (each.tensor().defined()) each = on(each.device(), each.tensor() * 3);
  }
  return tensors;
}

TEST(DevicePlacement, OnWorksInsideContainers) {
  Cluster cluster(2);
  const auto results = rpc_sync<placed_inside>(
      "worker1",
      std::vector{on("cuda:3", at::ones(4)), on("cpu", cuda(1, 2)), on("cuda:1", at::Tensor())});
  EXPECT_TRUE(holds(results.at(0), "cuda:3", 3));
  EXPECT_TRUE(holds(results.at(1), "cpu", 6));
}

TEST(DevicePlacement, OnRefusesATextThatNamesNoDevice) {
  for (const char* const text : {"mps", "cudda", "cuda:", "cuda:-1", "cuda:300", "cuda:1x", ""}) {
    const auto error = error_of([&] { static_cast<void>(on(text, at::ones(1))); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << text;
    EXPECT_NE(std::string(error.what()).find('"' + std::string(text) + "\" is no device"),
              std::string::npos)
        << error.what();
  }
}

TEST(DevicePlacement, OnRefusesADeviceThatTheReceiverDoesNotHave) {
  Cluster cluster(2);
  const auto error = error_of(
      [] { static_cast<void>(rpc_sync<device_of>("worker1", on("cuda:9", at::ones(1)))); });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                       "argument 1 (tensor 1 of 1) is to be put on device cuda:9 of worker "
                       "\"worker1\" (id 1), which has the CPU and 4 CUDA devices"));
  const auto kind = error_of(
      [] { static_cast<void>(rpc_sync<device_of>("worker1", on(at::kMPS, at::ones(1)))); });
  EXPECT_TRUE(has_text(kind, ErrorCode::invalid_argument, "is to be put on device mps"));
}

TEST(DevicePlacement, ATensorOfAnotherKindOfDeviceIsRefusedByPosition) {
  Cluster cluster(2);
  const auto error = error_of([] {
    const auto meta = at::empty({2}, at::TensorOptions().device(at::kMeta));
    static_cast<void>(rpc_sync<device_of>("worker1", meta));
  });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                       "argument 1 (tensor 1 of 1) is on device meta, which cannot be sent"));
}

TEST(DevicePlacement, AMapOfADeviceThatIsNotThereFailsInitOfAllNamingBothWorkers) {
  const auto error = error_of([] {
    const Cluster cluster(2, [](Options& options) {
      if (options.rank == 1) options.device_maps["worker0"] = {{"cuda:0", "cuda:7"}};
    });
  });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                       "device_maps of worker \"worker1\" for worker \"worker0\" (cuda:0=cuda:7) "
                       "name cuda:7, which worker \"worker0\" does not have: it has 4 CUDA"));
}

TEST(DevicePlacement, AMapOfAnUnknownWorkerFailsInit) {
  const auto error = error_of([] {
    const Cluster cluster(2, [](Options& options) {
      if (options.rank == 1) options.device_maps["ps0"] = {{"cuda:0", "cuda:1"}};
    });
  });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "name worker \"ps0\"; workers are"));
}

Options elastic(const std::string& name, const std::shared_ptr<stitch::transport::Store>& store) {
  Options options;
  options.name = name;
  options.world_size = "1:4";
  options.store = store;
  return options;
}

TEST(DevicePlacement,
     InAnElasticWorldAMapMayNameAWorkerThatIsStillToComeButNoDeviceThatIsNotThere) {
  const auto store = stitch::transport::make_hash_store();
  const auto text = [&](const std::string& from, const std::string& to) {
    Options options = elastic("a", stitch::transport::make_hash_store());
    options.device_maps["b"] = {{from, to}};
    return error_of([&] { static_cast<void>(stitch::init(options)); });
  };
  EXPECT_TRUE(has_text(text("cuda:7", "cuda:0"), ErrorCode::invalid_argument,
                       "device_maps of worker \"a\" for worker \"b\" (cuda:7=cuda:0) name cuda:7, "
                       "which worker \"a\" does not have: it has 4 CUDA devices"));
  Options of_a = elastic("a", store);
  of_a.device_maps["b"] = {{"cuda:0", "cuda:7"}};
  auto a = stitch::init(of_a);
  const auto refused = error_of([&] { static_cast<void>(stitch::init(elastic("b", store))); });
  EXPECT_TRUE(has_text(refused, ErrorCode::invalid_argument,
                       "device_maps of worker \"a\" for worker \"b\" (cuda:0=cuda:7) name cuda:7, "
                       "which worker \"b\" does not have: it has 4 CUDA devices"));
  Options of_c = elastic("c", store);
  of_c.device_maps["a"] = {{"cuda:0", "cuda:9"}};
  const auto wrong = error_of([&] { static_cast<void>(stitch::init(of_c)); });
  EXPECT_TRUE(has_text(wrong, ErrorCode::invalid_argument, "for worker \"a\" (cuda:0=cuda:9)"));
  auto d = stitch::init(elastic("d", store));
  EXPECT_EQ(a.rpc_sync<device_of>("d", cuda(1, 3)), "cuda:1");
}

// Whose two workers have joined at one time, for example, so that no check has seen both.
TEST(DevicePlacement, AMapToADeviceThatThePeerDoesNotHaveFailsItsCallByPosition) {
  using stitch::WorkerId;
  using Text = std::map<std::string, std::string>;
  namespace wire = stitch::rpc::wire;
  const stitch::WorkerInfo own{"a", WorkerId(0), 1};
  const stitch::WorkerInfo peer{"b", WorkerId(1), 1};
  stitch::rpc::WorkerDevices devices{4};
  devices.maps.emplace("b", DeviceMap(Text{{"cuda:0", "cuda:7"}, {"cuda:1", "cuda:0"}}));
  stitch::rpc::DeviceTensors tensors("a");
  tensors.start({{own, devices}, {peer, {4}}}, own.id, {});
  const auto stage = [&](std::uint16_t kind) {
    stitch::rpc::OutMessage message(kind);
    message.tensors = {cuda(1, 1), cuda(0, 1)};
    static_cast<void>(tensors.stage(message, peer));
  };
  EXPECT_TRUE(has_text(error_of([&] { stage(wire::kRequest); }), ErrorCode::invalid_argument,
                       "tensor 2 of 2 is on device cuda:0, which the device map cuda:0=cuda:7, "
                       "cuda:1=cuda:0 puts on device cuda:7 of worker \"b\" (id 1), which has the "
                       "CPU and 4 CUDA devices"));
  // Replies go by the inverse of the caller's map.
  stitch::rpc::DeviceTensors of_b("b");
  devices.maps.clear();
  devices.maps.emplace("b", DeviceMap(Text{{"cuda:9", "cuda:0"}}));
  of_b.start({{own, devices}, {peer, {4}}}, peer.id, {});
  stitch::rpc::OutMessage reply(wire::kReply);
  reply.tensors = {cuda(0, 1)};
  EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(of_b.stage(reply, own)); }),
                       ErrorCode::invalid_argument,
                       "tensor 1 of 1 is on device cuda:0, which the device map cuda:0=cuda:9 puts "
                       "on device cuda:9 of worker \"a\" (id 0)"));
}

TEST(DevicePlacement, AMapMustBeOneToOneAndOfKnownDevices) {
  const auto text_of = [](const std::map<std::string, std::string>& map) {
    return std::string(error_of([&] { static_cast<void>(DeviceMap(map)); }).what());
  };
  EXPECT_NE(text_of({{"cuda:0", "cuda:1"}, {"cuda:1", "cuda:1"}}).find("must be one-to-one"),
            std::string::npos);
  EXPECT_NE(text_of({{"cuda:0", "gpu1"}}).find("\"gpu1\" is no device"), std::string::npos);
  EXPECT_NE(text_of({{"cuda:-1", "cpu"}}).find("\"cuda:-1\" is no device"), std::string::npos);
  EXPECT_NE(text_of({{"cuda", "cpu"}, {"cuda:0", "cuda:1"}}).find("names cuda:0 twice"),
            std::string::npos);
}

TEST(DevicePlacement, WithoutAMapOnlyDevicesThatBothWorkersHaveAreMapped) {
  const DeviceMap map = DeviceMap::same_index(3, 2);
  EXPECT_EQ(map.text(), "cuda:0=cuda:0, cuda:1=cuda:1");
  EXPECT_FALSE(map.destination(at::Device(at::kCUDA, 2)).has_value());
  EXPECT_EQ(*map.destination(at::Device(at::kCPU)), at::Device(at::kCPU));
}

TEST(DevicePlacement, TheVariableNamesMapsOfSeveralWorkers) {
  setenv("STITCH_DEVICE_MAPS", "ps0:cuda:0=cuda:1,a:b:cuda:1=cpu,ps0:cpu=cuda:0", 1);
  Options options;
  options.rank = 0;
  options.world_size = 1;
  const auto maps = stitch::resolve_options(options).device_maps;
  setenv("STITCH_DEVICE_MAPS", "ps0=cuda:1", 1);
  const auto error = error_of([&] { static_cast<void>(stitch::resolve_options(options)); });
  unsetenv("STITCH_DEVICE_MAPS");
  const std::map<std::string, std::map<std::string, std::string>> expected{
      {"ps0", {{"cuda:0", "cuda:1"}, {"cpu", "cuda:0"}}}, {"a:b", {{"cuda:1", "cpu"}}}};
  EXPECT_EQ(maps, expected);
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "worker:device=device"));
}

TEST(DevicePlacement, ShapesStridesAndFlagsOfDeviceTensorsAreKept) {
  Cluster cluster(2);
  const at::Tensor base = at::arange(24, at::kFloat).reshape({4, 6}).to(at::Device(at::kCUDA, 1));
  const std::vector<at::Tensor> tensors{
      base.t(),           base.slice(1, 0, 6, 2), base.narrow(0, 1, 1).expand({3, 6}),
      cuda(1, 0, {0, 3}), base.to(at::kLong),     cuda(1, 1).requires_grad_(),
      base.select(0, 2)};
  for (const auto& tensor : tensors) {
    const at::Tensor result = rpc_sync<same>("worker1", tensor);
    EXPECT_EQ(result.device().str(), "cuda:1");
    EXPECT_EQ(result.scalar_type(), tensor.scalar_type());
    EXPECT_EQ(result.requires_grad(), tensor.requires_grad());
    EXPECT_EQ(result.sizes(), tensor.sizes());
    EXPECT_TRUE(at::equal(result.detach().cpu(), tensor.detach().cpu()));
  }
  EXPECT_EQ(rpc_sync<same>("worker1", base.t()).strides(), base.t().strides());
  // Gaps are not sent, the dimensions stay in their order.
  EXPECT_EQ(rpc_sync<same>("worker1", base.t().narrow(0, 1, 3)).strides(), at::IntArrayRef({1, 3}));
}

TEST(DevicePlacement, LargeTensorsAreMovedAndCountedByPath) {
  Cluster cluster(2);
  const at::Tensor large = at::rand({512, 700}).to(at::Device(at::kCUDA, 2));
  EXPECT_TRUE(at::equal(rpc_sync<same>("worker1", large).cpu(), large.cpu()));
  static_cast<void>(rpc_sync<device_of>("worker1", cuda(2, 1, {10})));
  const auto numbers = cluster[0].debug_info();
  EXPECT_EQ(numbers.at("gpu.sent_bytes.host.worker1.cuda:2"), 512 * 700 * 4);
  EXPECT_EQ(numbers.at("gpu.received_bytes.host.worker1.cuda:2"), 512 * 700 * 4);
  EXPECT_EQ(numbers.at("gpu.sent_messages.inline.worker1.cuda:2"), 1);
  EXPECT_EQ(cluster[1].debug_info().at("gpu.received_bytes.inline.worker0.cuda:2"), 40);
}

TEST(DevicePlacement, ThatLargeTensorsTakeTheLongerWayIsSaidOnceByEachWorker) {
  ::testing::internal::CaptureStderr();
  {
    Cluster cluster(2);
    const at::Tensor large = at::ones({512, 700}).to(at::Device(at::kCUDA, 2));
    for (int i = 0; i < 3; ++i) static_cast<void>(rpc_sync<same>("worker1", large));
    static_cast<void>(rpc_sync<same>("worker1", cuda(2, 1)));
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  for (const char* const worker : {"worker0", "worker1"}) {
    const std::string line = std::string("stitch: worker \"") + worker +
                             "\": tensors go from device to device through the message and host "
                             "memory: the program does "
                             "not link stitch::torch_cuda";
    const auto first = said.find(line);
    EXPECT_NE(first, std::string::npos) << said;
    EXPECT_EQ(said.find(line, first + 1), std::string::npos) << said;
  }
}

at::Tensor relayed(const at::Tensor& tensor) { return rpc_sync<twice>("worker2", tensor) + 1; }
Future<at::Tensor> relayed_by_coroutine(at::Tensor tensor) {
  const at::Tensor first = co_await rpc_async<twice>("worker2", tensor);
  const at::Tensor second = co_await rpc_async<twice>("worker0", first);
  co_return second + tensor;
}

TEST(DevicePlacement, NestedCallsAndCoroutinesMoveDeviceTensors) {
  Cluster cluster(3, worker0_swaps);
  EXPECT_TRUE(holds(rpc_sync<relayed>("worker1", cuda(0, 3)), "cuda:0", 7));
  EXPECT_TRUE(holds(rpc_sync<relayed_by_coroutine>("worker1", cuda(1, 3)), "cuda:1", 15));
  const auto then = rpc_async<twice>("worker1", cuda(1, 3)).then([](const at::Tensor& result) {
    return result + 1;
  });
  EXPECT_TRUE(holds(then.get(), "cuda:1", 7));
  EXPECT_TRUE(holds(rpc_sync<twice>("worker0", cuda(2, 3)), "cuda:2", 6));
}

struct Model {
  at::Tensor weight;
  Model() = default;
  explicit Model(at::Tensor initial) : weight(std::move(initial)) {}
  at::Tensor forward(const at::Tensor& input) { return weight * input; }
  void scale(double factor) { weight.mul_(factor); }
};

TEST(DevicePlacement, ReferencesReachObjectsWithStateOnDevices) {
  Cluster cluster(2, worker0_swaps);
  const auto tensor = stitch::remote<twice>("worker1", cuda(0, 4));
  EXPECT_TRUE(holds(tensor.to_here(), "cuda:0", 8));
  const auto placed = stitch::remote<back_to_device>("worker1", at::ones(2));
  EXPECT_EQ(placed.to_here().device().str(), "cpu");  // it was kept where it was made
  const auto model = stitch::remote<Model>("worker1", cuda(0, 2));
  EXPECT_TRUE(holds(model.rpc_sync<&Model::forward>(cuda(0, 5)), "cuda:0", 10));
  model.rpc_sync<&Model::scale>(3.0);
  EXPECT_TRUE(holds(model.rpc_sync<&Model::forward>(cuda(0, 5)), "cuda:0", 30));
}

TEST(DevicePlacement, ARemoteModuleLivesOnADeviceOfItsWorker) {
  Cluster cluster(2, worker0_swaps);
  const stitch::RemoteModule<torch::nn::Linear> linear(
      {.to = "worker1", .device = at::Device("cuda:1")}, 3, 2);
  // As the map says: cuda:0 here is cuda:1 there.
  const at::Tensor result = linear.forward(cuda(0, 1));
  EXPECT_EQ(result.device().str(), "cuda:0");
  for (const auto& parameter : linear.parameters())
    EXPECT_EQ(rpc_sync<device_of>("worker1", parameter), "cuda:1");
  linear.load_state_dict({{"weight", cuda(0, 2, {2, 3})}, {"bias", cuda(0, 1, {2})}});
  EXPECT_TRUE(holds(linear.forward(cuda(0, 1)), "cuda:0", 7));
  const auto error = error_of([] {
    const stitch::RemoteModule<torch::nn::Linear> none(
        {.to = "worker1", .device = at::Device("cuda:7")}, 3, 2);
  });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                       "a remote module cannot be made on device cuda:7 of worker \"worker1\" (id "
                       "1), which has the CPU and 4 CUDA devices"));
}

TEST(DevicePlacement, GradientsReturnToTheDevicesThatTheirTensorsCameFrom) {
  Cluster cluster(2, worker0_swaps);
  const at::Tensor from_cpu = at::full({2}, 3.0).requires_grad_();
  const at::Tensor from_device = cuda(0, 4, {2}).requires_grad_();
  const stitch::dist_autograd::Context context;
  const at::Tensor first = rpc_sync<twice>("worker1", on("cuda:1", from_cpu));
  EXPECT_EQ(first.device().str(), "cuda:0");
  const at::Tensor second = rpc_sync<twice>("worker1", on(at::kCPU, from_device));
  const at::Tensor third = rpc_sync<twice>("worker1", from_device);
  EXPECT_EQ(third.device().str(), "cuda:0");
  context.backward({first.sum(), second.sum(), third.sum()});
  const auto gradients = context.gradients();
  EXPECT_TRUE(holds(gradients.at(from_cpu), "cpu", 2));
  EXPECT_TRUE(holds(gradients.at(from_device), "cuda:0", 4));
}

}  // namespace
}  // namespace placement_test
