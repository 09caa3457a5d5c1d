#include <torch/csrc/autograd/forward_grad.h>

#include <variant>

#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/tensor_codec.h"
#include "tests/support/world_test.h"

namespace serialization_test {
namespace {

using namespace stitch::testing;

static_assert(stitch::Sendable<std::vector<std::optional<at::Tensor>>>);
static_assert(!stitch::Sendable<Future<int>>, "a future belongs to its process");
static_assert(!stitch::Sendable<std::vector<Future<int>>>);
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
  EXPECT_EQ(rpc_sync<echo<T>>("worker1", value), value);
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
  expect_echo(WorkerInfo{"x", WorkerId(3), 9});
  EXPECT_EQ(*rpc_sync<next>("worker1", std::make_unique<int>(4)), 5);
}

TEST(Serialization, CarriesStructsWithTensorsInside) {
  Cluster cluster(2);
  const Outer outer{"net", {{1, at::arange(3)}, {2, at::Tensor()}}, {{"w", at::ones({2, 2})}}};
  const Outer back = rpc_sync<echo<Outer>>("worker1", outer);
  EXPECT_EQ(back.name, "net");
  ASSERT_EQ(back.inner.size(), 2u);
  EXPECT_TRUE(at::equal(back.inner[0].weights, at::arange(3)));
  EXPECT_FALSE(back.inner[1].weights.defined());
  EXPECT_TRUE(at::equal(back.table.at("w"), at::ones({2, 2})));
}

void expect_tensor_echo(const at::Tensor& tensor) {
  const at::Tensor back = rpc_sync<echo<at::Tensor>>("worker1", tensor);
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

// The contract: "a dense tensor keeps the order of its dimensions in memory, gaps are not sent".
TEST(Serialization, DenseTensorsKeepTheOrderOfTheirDimensionsAndGapsAreNotSent) {
  Cluster cluster(2);
  const auto strides_of = [](const at::Tensor& tensor) {
    const at::Tensor back = rpc_sync<echo<at::Tensor>>("worker1", tensor);
    EXPECT_TRUE(at::equal(back, tensor));
    return back.strides().vec();
  };
  using Strides = std::vector<std::int64_t>;
  EXPECT_EQ(strides_of(at::rand({5, 5}).narrow(1, 2, 2)), (Strides{2, 1}));
  EXPECT_EQ(strides_of(at::rand({5, 5}).t().narrow(0, 2, 2)), (Strides{1, 2}));
  const auto image = at::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  EXPECT_EQ(strides_of(image), (Strides{60, 1, 15, 3}));
  EXPECT_EQ(strides_of(image.narrow(2, 1, 2)), (Strides{30, 1, 15, 3}));
  EXPECT_EQ(strides_of(image.slice(3, 0, 5, 2)), (Strides{36, 1, 9, 3}));
  EXPECT_EQ(strides_of(at::rand({300, 2, 300}).permute({2, 0, 1}).narrow(0, 1, 200)),
            (Strides{1, 400, 200}));
  EXPECT_EQ(strides_of(at::rand({4, 6}).slice(1, 0, 6, 2).unsqueeze(0).expand({7, 4, 3})),
            (Strides{0, 3, 1}));
  EXPECT_EQ(strides_of(at::arange(5).as_strided({3, 3}, {1, 1})), (Strides{3, 1}));
}

void expect_refused(const at::Tensor& tensor, const std::string& text) {
  EXPECT_TRUE(has_text(error_of([&] { rpc_sync<echo<at::Tensor>>("worker1", tensor); }),
                       ErrorCode::invalid_argument, text));
  EXPECT_TRUE(has_text(error_of([&] { notify<echo<at::Tensor>>("worker1", tensor); }),
                       ErrorCode::invalid_argument, text));
  expect_echo(1);
}

TEST(Serialization, RefusesTensorsItCannotSend) {
  Cluster cluster(2);
  expect_refused(at::eye(3).to_sparse_csr(), "cannot be sent: it is SparseCsr");
  expect_refused(at::quantize_per_tensor(at::ones(3), 0.5, 0, at::kQInt8),
                 "cannot be sent: it is quantized: send int_repr()");
  if (at::hasMKLDNN()) expect_refused(at::ones(3).to_mkldnn(), "cannot be sent: it is MkldnnCPU");
  expect_refused(at::empty({3}, at::TensorOptions().device(at::kMeta)), "device meta");
  const auto names = std::vector{at::Dimname::fromSymbol(at::Symbol::dimname("N")),
                                 at::Dimname::fromSymbol(at::Symbol::dimname("C"))};
  expect_refused(at::ones({2, 3}).refine_names(names), "cannot be sent: its dimensions have names");
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  expect_refused(at::_make_dual(at::ones(3), at::ones(3), static_cast<std::int64_t>(level)),
                 "cannot be sent: it has a tangent of forward-mode differentiation");
  torch::autograd::ForwardADLevel::release_idx(level);
}

TEST(Serialization, RefusesTensorsWithoutTheirMemory) {
  Cluster cluster(2);
  for (const std::int64_t size : {10, 1000}) {  // inside the frame, and beside it
    const std::string needed = std::to_string(size * size * 4);
    const auto freed = at::ones({size, size});
    freed.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr());
    expect_refused(freed, "its storage has 0 of " + needed + " bytes");
    const auto shorter = at::ones({size, size});
    const auto turned = shorter.t(), row = shorter.narrow(0, 1, 1);
    shorter.storage().unsafeGetStorageImpl()->set_nbytes(40);
    expect_refused(shorter, "its storage has 40 of " + needed + " bytes");
    expect_refused(turned, "its storage has 40 of " + needed + " bytes");
    expect_refused(row, "its storage has 40 of " + std::to_string(size * 8));
    // The result of a call has nowhere to go, either.
    EXPECT_TRUE(has_text(
        error_of([&] {
          rpc_sync<echo<at::Tensor>>(Target("worker1").into(shorter), at::ones({size, size}));
        }),
        ErrorCode::invalid_argument, "its storage has 40 of " + needed));
  }
  const auto values = at::ones(2);
  const auto sparse = at::sparse_coo_tensor(at::zeros({1, 2}, at::kLong), values, {5});
  values.storage().unsafeGetStorageImpl()->set_nbytes(4);
  expect_refused(sparse, "its storage has 4 of 8 bytes");
  expect_tensor_echo(at::ones({0, 3}));
}

bool is_wrapped(at::Tensor tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

TEST(Serialization, KeepsTheValuesBehindTheBitsOfATensor) {
  Cluster cluster(2);
  const auto complex = at::complex(at::ones(3), at::ones(3));
  expect_tensor_echo(at::imag(complex.conj()));  // the negative bit
  expect_tensor_echo(at::_efficientzerotensor({3}, at::TensorOptions()));
  at::Tensor number = at::scalar_tensor(2.5, at::kDouble);
  EXPECT_FALSE(rpc_sync<is_wrapped>("worker1", number));
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  EXPECT_TRUE(rpc_sync<is_wrapped>("worker1", number));
  const at::Tensor back = rpc_sync<echo<at::Tensor>>("worker1", number);
  EXPECT_EQ((at::ones(2, at::kFloat) + back).scalar_type(), at::kFloat);
}

bool share_memory(at::Tensor a, at::Tensor b) { return a.storage().data() == b.storage().data(); }

TEST(Serialization, DoesNotKeepAliasing) {
  Cluster cluster(2);
  for (const std::int64_t size : {4, 100'000}) {
    const auto tensor = at::zeros({size});
    EXPECT_TRUE(share_memory(tensor, tensor.view({2, -1})));
    EXPECT_FALSE(rpc_sync<share_memory>("worker1", tensor, tensor.view({2, -1}))) << size;
  }
}

TEST(Serialization, SmallArgumentsMayBeChangedAfterTheCallReturns) {
  Cluster cluster(2);
  for (const std::int64_t size : {8, 6000}) {  // inside the frame, and a snapshot beside it
    auto tensor = at::zeros({size}, at::kDouble);
    auto future = rpc_async<echo<at::Tensor>>("worker1", tensor);
    tensor.fill_(1);
    EXPECT_TRUE(at::equal(future.get(), at::zeros({size}, at::kDouble)));
  }
}

}  // namespace
}  // namespace serialization_test
