#include <variant>

#include "stitch/rpc/message/tensor_codec.h"
#include "tests/support/world_test.h"

namespace serialization_test {
namespace {

using stitch::testing::Cluster;

static_assert(stitch::Sendable<std::vector<std::optional<at::Tensor>>>);
static_assert(!stitch::Sendable<stitch::Future<int>>, "a future belongs to its process");
static_assert(!stitch::Sendable<std::vector<stitch::Future<int>>>);
static_assert(!stitch::Sendable<std::shared_ptr<int>> && !stitch::Sendable<int*>);

enum class Colour : std::uint8_t { red, green };
struct Inner {
  int a = 0;
  at::Tensor weights;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(a, weights);
  }
};
struct Outer {
  std::string name;
  std::vector<Inner> inner;
  std::map<std::string, at::Tensor> table;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(name, inner, table);
  }
};
template <class T>
T echo(T value) {
  return value;
}
std::unique_ptr<int> next(std::unique_ptr<int> value) { return std::make_unique<int>(*value + 1); }

template <class T>
void expect_echo(const T& value) {
  EXPECT_EQ(stitch::rpc_sync<echo<T>>("worker1", value), value);
}

TEST(Serialization, CarriesStandardTypes) {
  Cluster cluster(2);
  expect_echo(true);
  expect_echo<std::int8_t>(-3);
  expect_echo<std::uint64_t>(~std::uint64_t{0});
  expect_echo(1.5f);
  expect_echo(-2.25);
  expect_echo(Colour::green);
  expect_echo(std::string("a\0b", 3));
  expect_echo(std::optional<int>());
  expect_echo(std::optional<int>(4));
  expect_echo(std::variant<int, std::string>("x"));
  expect_echo(std::tuple<int, std::string, double>(1, "b", 2.5));
  expect_echo(std::pair<int, bool>(1, true));
  expect_echo(std::vector<double>{1, 2, 3});
  expect_echo(std::vector<std::string>{"", "x"});
  expect_echo(std::vector<bool>{true, false, true});
  expect_echo(std::array<int, 3>{1, 2, 3});
  expect_echo(std::map<std::string, std::vector<int>>{{"a", {1}}, {"b", {}}});
  expect_echo(std::set<int>{3, 1});
  expect_echo(std::chrono::milliseconds(250));
  expect_echo(stitch::WorkerInfo{"x", stitch::WorkerId(3), 9});
  EXPECT_EQ(*stitch::rpc_sync<next>("worker1", std::make_unique<int>(4)), 5);
}

TEST(Serialization, CarriesStructsWithTensorsInside) {
  Cluster cluster(2);
  const Outer outer{"net", {{1, at::arange(3)}, {2, at::Tensor()}}, {{"w", at::ones({2, 2})}}};
  const Outer back = stitch::rpc_sync<echo<Outer>>("worker1", outer);
  EXPECT_EQ(back.name, "net");
  ASSERT_EQ(back.inner.size(), 2u);
  EXPECT_TRUE(at::equal(back.inner[0].weights, at::arange(3)));
  EXPECT_FALSE(back.inner[1].weights.defined());
  EXPECT_TRUE(at::equal(back.table.at("w"), at::ones({2, 2})));
}

void expect_tensor_echo(const at::Tensor& tensor) {
  const at::Tensor back = stitch::rpc_sync<echo<at::Tensor>>("worker1", tensor);
  ASSERT_EQ(back.defined(), tensor.defined());
  if (!tensor.defined()) return;
  EXPECT_EQ(back.scalar_type(), tensor.scalar_type());
  EXPECT_EQ(back.sizes(), tensor.sizes());
  EXPECT_EQ(back.layout(), tensor.layout());
  EXPECT_EQ(back.requires_grad(), tensor.requires_grad());
  if (tensor.layout() == at::kSparse) {
    EXPECT_EQ(back.is_coalesced(), tensor.is_coalesced());
    EXPECT_TRUE(at::equal(back.to_dense(), tensor.to_dense()));
    return;
  }
  if (tensor.is_non_overlapping_and_dense()) {
    EXPECT_EQ(back.strides(), tensor.strides());
  }
  EXPECT_TRUE(at::equal(back, tensor));
}

TEST(Serialization, CarriesTensorsOfEveryKind) {
  Cluster cluster(2);
  for (const auto dtype :
       {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kFloat, at::kDouble,
        at::kComplexFloat, at::kComplexDouble, at::kBool, at::kBFloat16}) {
    expect_tensor_echo(at::arange(6).reshape({2, 3}).to(dtype));
  }
  expect_tensor_echo(at::Tensor());
  expect_tensor_echo(at::empty({0}));
  expect_tensor_echo(at::empty({3, 0, 2}));
  expect_tensor_echo(at::scalar_tensor(3.5));
  expect_tensor_echo(at::arange(12).reshape({3, 4}).t());
  expect_tensor_echo(at::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast));
  expect_tensor_echo(at::arange(20).slice(0, 3, 19, 4));
  expect_tensor_echo(at::arange(3).reshape({3, 1}).expand({3, 5}));
  expect_tensor_echo(at::ones({1}).expand({1000, 1000}));
  expect_tensor_echo(at::ones({2, 2}).set_requires_grad(true));
  expect_tensor_echo(at::complex(at::ones(3), at::ones(3)).conj());
  expect_tensor_echo(at::rand({300, 300}));  // beside the frame
  expect_tensor_echo(at::rand({100, 100}));  // a snapshot beside the frame
  const auto indices = at::tensor({0, 2, 0, 1}, at::kLong).reshape({2, 2});
  expect_tensor_echo(at::sparse_coo_tensor(indices, at::tensor({1.0, 2.0}), {3, 4}));
  expect_tensor_echo(at::sparse_coo_tensor(indices, at::tensor({1.0, 2.0}), {3, 4}).coalesce());
  expect_tensor_echo(
      at::sparse_coo_tensor(at::zeros({1, 0}, at::kLong), at::zeros({0, 4}), {3, 4}));
}

TEST(Serialization, SendsOnlyTheBytesAViewCovers) {
  const auto big = at::zeros({1 << 20});
  stitch::rpc::OutMessage message(stitch::rpc::wire::kRequest);
  message.tensors.push_back(big.slice(0, 5, 6));
  message.tensors.push_back(at::ones({1}).expand({1 << 20}));
  message.frame.end_body();
  stitch::rpc::encode_tensors(message);
  const auto bytes = std::move(message.frame).finish();
  EXPECT_TRUE(bytes.buffers.empty());
  EXPECT_LT(bytes.frame.size(), 1024u);
}

TEST(Serialization, RefusesTensorsItCannotSend) {
  Cluster cluster(2);
  for (const at::Tensor& tensor :
       {at::eye(3).to_sparse_csr(), at::quantize_per_tensor(at::ones(3), 0.5, 0, at::kQInt8)}) {
    auto future = stitch::rpc_async<echo<at::Tensor>>("worker1", tensor);
    ASSERT_TRUE(future.wait_for(std::chrono::seconds(10)));
    EXPECT_EQ(future.error().code(), stitch::ErrorCode::invalid_argument);
    EXPECT_NE(std::string(future.error().what()).find("cannot be sent"), std::string::npos)
        << future.error().what();
    expect_echo(1);
  }
}

bool share_memory(at::Tensor a, at::Tensor b) { return a.storage().data() == b.storage().data(); }

TEST(Serialization, DoesNotKeepAliasing) {
  Cluster cluster(2);
  for (const std::int64_t size : {4, 100'000}) {
    const auto tensor = at::zeros({size});
    EXPECT_TRUE(share_memory(tensor, tensor.view({2, -1})));
    EXPECT_FALSE(stitch::rpc_sync<share_memory>("worker1", tensor, tensor.view({2, -1}))) << size;
  }
}

TEST(Serialization, SmallArgumentsMayBeChangedAfterTheCallReturns) {
  Cluster cluster(2);
  for (const std::int64_t size : {8, 6000}) {  // inside the frame, and a snapshot beside it
    auto tensor = at::zeros({size}, at::kDouble);
    auto future = stitch::rpc_async<echo<at::Tensor>>("worker1", tensor);
    tensor.fill_(1);
    EXPECT_TRUE(at::equal(future.get(), at::zeros({size}, at::kDouble)));
  }
}

// A valid request with arguments of several kinds, as the bytes that would travel.
stitch::transport::Message sample_message() {
  stitch::rpc::OutMessage message(stitch::rpc::wire::kRequest);
  stitch::rpc::OutArchive archive(message);
  archive(std::string("name"), std::vector<int>{1, 2, 3},
          std::map<std::string, at::Tensor>{{"w", at::arange(4)}}, std::optional<double>(1.0));
  archive.seal();
  message.tensors.push_back(
      at::sparse_coo_tensor(at::zeros({1, 2}, at::kLong), at::ones({2}), {5}));
  message.tensors.push_back(at::rand({40, 40}).t());
  message.frame.end_body();
  stitch::rpc::encode_tensors(message);
  return std::move(message.frame).finish();
}

TEST(Serialization, SurvivesDamagedMessages) {
  std::mt19937 random(1);
  const auto original = sample_message();
  int refused = 0;
  for (int round = 0; round < 4000; ++round) {
    stitch::transport::Message damaged;
    damaged.frame.append(original.frame.data(), original.frame.size());
    damaged.buffers = original.buffers;
    for (int i = 0; i < 1 + round % 3; ++i)
      damaged.frame.data()[random() % damaged.frame.size()] = static_cast<std::byte>(random());
    try {
      stitch::rpc::InMessage message(std::move(damaged), {});
      stitch::rpc::decode_tensors(message);
      stitch::rpc::InArchive archive(message, message.view.body());
      std::string name;
      std::vector<int> numbers;
      std::map<std::string, at::Tensor> table;
      std::optional<double> maybe;
      archive(name, numbers, table, maybe);
      archive.check_seal();
    } catch (const std::exception&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace serialization_test
