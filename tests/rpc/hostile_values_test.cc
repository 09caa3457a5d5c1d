#include <bitset>
#include <complex>
#include <cstring>
#include <deque>
#include <list>
#include <unordered_map>
#include <unordered_set>
#include <variant>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/tensor_codec.h"
#include "tests/support/world_test.h"

// What a peer may put into a message that no worker of ours would write: frames made by hand.
// Bounds are those on counts and sizes, never on time.
namespace hostile_values_test {
namespace {

using namespace stitch::testing;
using stitch::base::Bytes;
using stitch::base::ByteWriter;
using stitch::rpc::InArchive;
using stitch::rpc::InMessage;
using stitch::rpc::OutArchive;
using stitch::rpc::OutMessage;

// --- tables of tensors

constexpr std::uint8_t kDense = 1;
constexpr std::uint8_t kCoo = 2;
constexpr std::uint8_t kCoalesced = 2;
constexpr std::uint8_t kHasStrides = 4;
constexpr std::uint8_t kLong = 5;
constexpr std::uint8_t kDouble = 8;
constexpr std::uint8_t kBool = 12;

// A message with tensors described by hand.
class TensorTable {
 public:
  explicit TensorTable(std::uint32_t count) : out_(table_) { out_.write(count); }
  void header(std::uint8_t layout, std::uint8_t dtype, std::uint8_t flags,
              const std::vector<std::int64_t>& sizes) {
    out_.write(layout);
    out_.write(dtype);
    out_.write(flags);
    out_.write(static_cast<std::uint8_t>(sizes.size()));
    for (const auto size : sizes) out_.write(size);
  }
  void dense(std::uint8_t dtype, const std::vector<std::int64_t>& sizes, std::uint32_t buffer) {
    header(kDense, dtype, 0, sizes);
    out_.write(buffer);
  }
  void expanded(std::uint8_t dtype, const std::vector<std::int64_t>& sizes, std::uint32_t buffer) {
    strided(dtype, sizes, std::vector<std::int64_t>(sizes.size()), buffer);
  }
  void strided(std::uint8_t dtype, const std::vector<std::int64_t>& sizes,
               const std::vector<std::int64_t>& strides, std::uint32_t buffer) {
    header(kDense, dtype, kHasStrides, sizes);
    for (const auto stride : strides) out_.write(stride);
    out_.write(buffer);
  }
  template <class T>
  void buffer(const std::vector<T>& values) {
    buffers_.emplace_back(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
  // What a receiver makes of it.
  [[nodiscard]] std::vector<at::Tensor> decode() {
    OutMessage message(stitch::rpc::wire::kRequest);
    message.frame.end_body();
    message.frame.add_section(stitch::rpc::wire::kTensors, table_.span());
    for (auto& bytes : buffers_)
      message.frame.add_buffer({{}, bytes.data(), bytes.size(), std::make_shared<int>()});
    InMessage received(std::move(message.frame).finish(), {});
    stitch::rpc::decode_tensors(received);
    return received.tensors;
  }

 private:
  Bytes table_;
  ByteWriter out_;
  std::vector<std::string> buffers_;
};

TEST(HostileTensors, ABufferIsUsedOnceAndInOrder) {
  TensorTable twice(2);
  twice.buffer(std::vector<double>(1000));
  twice.dense(kDouble, {1000}, 0);
  twice.dense(kDouble, {1000}, 0);
  EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(twice.decode()); }), ErrorCode::protocol,
                       "names buffer 0, the next one is 1"));
  TensorTable swapped(2);
  swapped.buffer(std::vector<double>(10));
  swapped.buffer(std::vector<double>(10));
  swapped.dense(kDouble, {10}, 1);
  swapped.dense(kDouble, {10}, 0);
  EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(swapped.decode()); }), ErrorCode::protocol,
                       "names buffer 1, the next one is 0"));
}

constexpr std::int64_t kHuge = std::int64_t{1} << 60;

TEST(HostileTensors, PartsOfSparseTensorsHaveAllTheirElementsInTheMessage) {
  TensorTable expanded(1);
  expanded.buffer(std::vector<std::int64_t>{0});
  expanded.buffer(std::vector<double>{1});
  expanded.header(kCoo, kDouble, 0, {5});
  expanded.expanded(kLong, {1, kHuge}, 0);
  expanded.expanded(kDouble, {kHuge}, 1);
  EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(expanded.decode()); }), ErrorCode::protocol,
                       "its buffer has 8"));
  TensorTable values(1);
  values.buffer(std::vector<std::int64_t>{0, 1});
  values.buffer(std::vector<double>{1});
  values.header(kCoo, kDouble, 0, {5});
  values.dense(kLong, {1, 2}, 0);
  values.expanded(kDouble, {2}, 1);
  EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(values.decode()); }), ErrorCode::protocol,
                       "its buffer has 8"));
  // A dense one may be expanded: nothing looks at its elements.
  TensorTable dense(1);
  dense.buffer(std::vector<double>{1});
  dense.expanded(kDouble, {kHuge}, 0);
  EXPECT_EQ(dense.decode().at(0).numel(), kHuge);
}

// An operation on one of 29 such dimensions would take 2^29 elements for the 30 that have arrived.
TEST(HostileTensors, TensorsAreNotLargerThanTheirMemory) {
  const auto decode = [](const std::vector<std::int64_t>& sizes,
                         const std::vector<std::int64_t>& strides) {
    TensorTable table(1);
    table.buffer(std::vector<double>(30));
    table.strided(kDouble, sizes, strides, 0);
    return table.decode().at(0);
  };
  using Dims = std::vector<std::int64_t>;
  const std::pair<Dims, Dims> larger[] = {
      {Dims(29, 2), Dims(29, 1)}, {Dims{3, 2}, Dims{1, 1}}, {Dims{5, 1, 3, 4}, Dims{0, 9, 1, 1}}};
  for (const auto& each : larger) {
    EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(decode(each.first, each.second)); }),
                         ErrorCode::protocol, "has elements that overlap in memory"));
  }
  // Other orders, gaps, dimensions of one element, and expanded ones are as they were sent.
  EXPECT_EQ(decode({3, 2, 1, 4}, {2, 1, 1, 7}).sizes(), at::IntArrayRef({3, 2, 1, 4}));
  EXPECT_EQ(decode({9, 3}, {0, 10}).sizes(), at::IntArrayRef({9, 3}));
}

TEST(HostileTensors, SparseTensorsThatMakeNoSenseAreRefused) {
  const auto decode = [](std::uint8_t indices_type, const std::vector<std::int64_t>& sizes,
                         std::int64_t index) {
    TensorTable table(1);
    table.buffer(std::vector<std::int64_t>{index});
    table.buffer(std::vector<double>{1});
    table.header(kCoo, kDouble, 0, sizes);
    table.dense(indices_type, {1, 1}, 0);
    table.dense(kDouble, {1}, 1);
    static_cast<void>(table.decode());
  };
  EXPECT_NO_THROW(decode(kLong, {5}, 4));
  EXPECT_EQ(error_of([&] { decode(kLong, {5}, 5); }).code(), ErrorCode::protocol);
  EXPECT_EQ(error_of([&] { decode(kLong, {5}, -1); }).code(), ErrorCode::protocol);
  EXPECT_EQ(error_of([&] { decode(kDouble, {5}, 0); }).code(), ErrorCode::protocol);
  EXPECT_EQ(error_of([&] { decode(kLong, {kHuge, kHuge}, 0); }).code(), ErrorCode::protocol);
}

TEST(HostileTensors, CoalescedIsNotBelieved) {
  const auto coalesced = [](const std::vector<std::int64_t>& indices) {
    TensorTable table(1);
    table.buffer(indices);
    table.buffer(std::vector<double>(indices.size() / 2, 1.0));
    table.header(kCoo, kDouble, kCoalesced, {3, 3});
    table.dense(kLong, {2, static_cast<std::int64_t>(indices.size() / 2)}, 0);
    table.dense(kDouble, {static_cast<std::int64_t>(indices.size() / 2)}, 1);
    return table.decode().at(0).is_coalesced();
  };
  EXPECT_TRUE(coalesced({0, 1, 2, 0}));
  EXPECT_TRUE(coalesced({0, 0, 1, 2}));
  EXPECT_FALSE(coalesced({1, 1, 2, 2}));
  EXPECT_FALSE(coalesced({0, 0, 2, 1}));
  EXPECT_FALSE(coalesced({1, 0, 0, 0}));
}

TEST(HostileTensors, BoolsAreZeroOrOne) {
  for (const std::size_t size : {std::size_t{4}, stitch::transport::kInlineBytes + 4}) {
    std::vector<std::uint8_t> bytes(size, 1);
    bytes[0] = 0;
    bytes[1] = 2;
    bytes.back() = 255;
    TensorTable table(1);
    table.buffer(bytes);
    table.dense(kBool, {static_cast<std::int64_t>(size)}, 0);
    const at::Tensor tensor = table.decode().at(0);
    const auto* const at = static_cast<const std::uint8_t*>(tensor.data_ptr());
    for (std::size_t i = 0; i < size; ++i) EXPECT_EQ(at[i], i == 0 ? 0 : 1) << i;
  }
}

at::Tensor echo_tensor(at::Tensor tensor) { return tensor; }

TEST(HostileTensors, ExpandedValuesOfASparseTensorAreSentInFull) {
  Cluster cluster(2);
  const auto sparse = at::sparse_coo_tensor(at::tensor({0, 2}, at::kLong).reshape({1, 2}),
                                            at::ones({1, 1}).expand({2, 3}), {4, 3});
  EXPECT_TRUE(at::equal(rpc_sync<echo_tensor>("worker1", sparse).to_dense(), sparse.to_dense()));
}

// --- bodies

// Reads a T from a body made by hand.
template <class T>
void read_into(T& value, const std::string& body, std::size_t tensors = 0) {
  OutMessage out(stitch::rpc::wire::kRequest);
  out.frame.body().append(body.data(), body.size());
  out.frame.end_body();
  InMessage message(std::move(out.frame).finish(), {});
  message.tensors.assign(tensors, at::ones(1));
  InArchive archive(message, message.view.body());
  archive(value);
}
std::string number(std::uint64_t value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

struct Large {
  std::array<char, 8192> room{};
  std::uint8_t tag = 0;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(tag);
  }
};

TEST(HostileBytes, ContainersGrowAsTheirElementsArrive) {
  constexpr std::size_t kBytes = 1 << 20;
  const std::string zeros(kBytes, '\0');
  const std::string body = number(kBytes) + zeros;  // one byte for each element
  std::vector<double> doubles;
  EXPECT_TRUE(has_text(error_of([&] { read_into(doubles, body); }), ErrorCode::invalid_argument,
                       "a container announces 1048576 elements of 8 bytes, but only 1048576"));
  EXPECT_EQ(doubles.capacity(), 0U);
  std::u32string text;
  EXPECT_EQ(error_of([&] { read_into(text, body); }).code(), ErrorCode::invalid_argument);
  EXPECT_LT(text.capacity(), 100U);

  // Eight bytes were there for each, all zero: an empty string.
  std::vector<std::string> strings;
  EXPECT_EQ(error_of([&] { read_into(strings, body); }).code(), ErrorCode::invalid_argument);
  EXPECT_LE(strings.capacity(), kBytes / 8 * 2);
  std::deque<std::string> deque;
  EXPECT_EQ(error_of([&] { read_into(deque, body); }).code(), ErrorCode::invalid_argument);
  EXPECT_LE(deque.size(), kBytes / 8 + 1);
  std::list<std::string> list;
  EXPECT_EQ(error_of([&] { read_into(list, body); }).code(), ErrorCode::invalid_argument);
  EXPECT_LE(list.size(), kBytes / 8 + 1);
  std::unordered_set<std::string> set;
  EXPECT_EQ(error_of([&] { read_into(set, body); }).code(), ErrorCode::invalid_argument);
  EXPECT_LE(set.bucket_count(), 16U);
  std::unordered_map<std::string, int> map;
  EXPECT_EQ(error_of([&] { read_into(map, body); }).code(), ErrorCode::invalid_argument);
  EXPECT_LE(map.bucket_count(), 16U);

  std::vector<Large> large;
  EXPECT_EQ(error_of([&] { read_into(large, number(50'000) + std::string(10, '\0')); }).code(),
            ErrorCode::invalid_argument);
  EXPECT_LE(large.capacity(), 32U);
}

// Takes no bytes.
struct Nothing {
  template <class Archive>
  void serialize(Archive&) {}
  auto operator<=>(const Nothing&) const = default;
};

template <class T>
T echo(T value) {
  return value;
}
template <class T>
std::size_t size_of(T value) {
  return value.size();
}

TEST(HostileBytes, ElementsThatTakeNoBytesAreCountedInAll) {
  const std::string most = number(stitch::rpc::kMaxElementsWithoutBytes);
  std::vector<Nothing> once;
  read_into(once, most);
  EXPECT_EQ(once.size(), stitch::rpc::kMaxElementsWithoutBytes);
  const char* const text = "more than 65536 elements that take no bytes";
  std::vector<std::vector<Nothing>> vectors;
  EXPECT_TRUE(has_text(error_of([&] { read_into(vectors, number(2) + most + number(1) + "x"); }),
                       ErrorCode::invalid_argument, text));
  std::vector<std::set<Nothing>> sets;
  EXPECT_TRUE(has_text(error_of([&] { read_into(sets, number(2) + most + number(1) + "x"); }),
                       ErrorCode::invalid_argument, text));
  std::list<std::map<Nothing, Nothing>> maps;
  EXPECT_TRUE(has_text(error_of([&] { read_into(maps, number(2) + most + number(1) + "x"); }),
                       ErrorCode::invalid_argument, text));

  Cluster cluster(2);
  EXPECT_EQ(rpc_sync<size_of<std::vector<Nothing>>>("worker1", std::vector<Nothing>(1000)), 1000U);
  EXPECT_TRUE(
      has_text(error_of([&] {
                 rpc_sync<size_of<std::vector<Nothing>>>("worker1", std::vector<Nothing>(70'000));
               }),
               ErrorCode::invalid_argument, std::string("was not made: containers have ") + text));
}

// One byte each, that there is none.
using Slot = std::optional<std::array<double, 1024>>;

TEST(HostileBytes, BytesThatArriveDoNotMakeAnyAmountOfMemory) {
  constexpr std::size_t kCount = 100'000;
  const std::string body = number(kCount) + std::string(kCount, '\1');
  const std::size_t most = stitch::rpc::kMaxElementMemoryForEachByte * body.size() +
                           stitch::rpc::kMaxElementMemoryInAnyCase;
  const std::string text = "elements of containers take more than " + std::to_string(most) +
                           " bytes of memory, for a message of 100008 bytes";
  std::vector<Slot> vector;
  EXPECT_TRUE(has_text(error_of([&] { read_into(vector, body); }), ErrorCode::protocol, text));
  EXPECT_LE(vector.capacity() * sizeof(Slot), 2 * most);
  std::list<Slot> list;
  EXPECT_TRUE(has_text(error_of([&] { read_into(list, body); }), ErrorCode::protocol, text));
  EXPECT_LE(list.size() * sizeof(Slot), most);

  // An honest sender gets the error before anything is sent.
  Cluster cluster(2);
  EXPECT_TRUE(has_text(
      error_of([] { rpc_sync<size_of<std::vector<Slot>>>("worker1", std::vector<Slot>(10'000)); }),
      ErrorCode::invalid_argument, "was not made: elements of containers take"));
  EXPECT_EQ(rpc_sync<size_of<std::vector<Slot>>>("worker1", std::vector<Slot>(4'000)), 4'000U);
  // Large ones of the usual types are far from it.
  EXPECT_EQ(
      rpc_sync<size_of<std::vector<std::string>>>("worker1", std::vector<std::string>(1 << 20)),
      1U << 20);
  EXPECT_EQ(rpc_sync<size_of<std::set<int>>>("worker1", std::set<int>{1, 2, 3}), 3U);
}

// A list by its own pointers, and a tree.
struct Chain {
  std::unique_ptr<Chain> next;
  Chain() = default;
  Chain(Chain&&) = default;
  Chain& operator=(Chain&&) = default;
  ~Chain() {
    for (auto each = std::move(next); each != nullptr;) each = std::move(each->next);
  }
  template <class Archive>
  void serialize(Archive& archive) {
    archive(next);
  }
};
Chain chain_of(int length) {
  Chain first;
  for (int i = 1; i < length; ++i) {
    auto next = std::make_unique<Chain>(std::move(first));
    first.next = std::move(next);
  }
  return first;
}
int length_of(const Chain& chain) {
  int length = 1;
  for (const Chain* at = chain.next.get(); at != nullptr; at = at->next.get()) ++length;
  return length;
}
struct Tree {
  std::vector<Tree> children;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(children);
  }
};

TEST(HostileBytes, WhatIsNestedTooDeeplyIsRefused) {
  const char* const text = "more than 256 structs, containers and pointers inside one another";
  Chain chain;
  EXPECT_TRUE(has_text(error_of([&] { read_into(chain, std::string(1 << 20, '\1')); }),
                       ErrorCode::invalid_argument, text));
  std::string ones;
  for (int i = 0; i < 100'000; ++i) ones += number(1);
  Tree tree;
  EXPECT_TRUE(
      has_text(error_of([&] { read_into(tree, ones); }), ErrorCode::invalid_argument, text));
  std::map<int, Tree> map;
  EXPECT_TRUE(has_text(error_of([&] { read_into(map, number(1) + "four" + ones); }),
                       ErrorCode::invalid_argument, text));
}

TEST(HostileBytes, WhatIsNestedTooDeeplyIsNotSent) {
  Cluster cluster(2);
  EXPECT_EQ(rpc_sync<length_of>("worker1", chain_of(100)), 100);
  EXPECT_EQ(length_of(rpc_sync<chain_of>("worker1", 100)), 100);
  const char* const text = "more than 256 structs, containers and pointers inside one another";
  Error error = error_of([] { rpc_sync<length_of>("worker1", chain_of(1'000'000)); });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, text));
  EXPECT_FALSE(error.remote());
  error = error_of([] { rpc_sync<chain_of>("worker1", 1'000'000); });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, text));
  EXPECT_TRUE(error.remote());
}

TEST(HostileBytes, BoolsAreZeroOrOne) {
  std::array<bool, 4> array{};
  read_into(array, std::string("\2\0\xff\1", 4));
  constexpr std::array<std::uint8_t, 4> kBytes{1, 0, 1, 1};
  EXPECT_EQ(std::memcmp(array.data(), kBytes.data(), 4), 0);
  std::vector<bool> vector;
  read_into(vector, number(2) + "\2\1");
  EXPECT_EQ(vector, (std::vector<bool>{true, true}));
}

TEST(HostileBytes, ATensorIsHandedOutOnce) {
  const auto index = [](std::uint32_t value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  std::pair<at::Tensor, at::Tensor> tensors;
  EXPECT_NO_THROW(read_into(tensors, index(0) + index(1), 2));
  EXPECT_TRUE(has_text(error_of([&] { read_into(tensors, index(0) + index(0), 2); }),
                       ErrorCode::invalid_argument, "tensor 0 is wanted, the next one is 1"));
}

// --- what takes a reader's time

std::atomic<bool> reading{false};
std::atomic<bool> may_go_on{false};
// Takes as long to read as the test wants.
struct Slow {
  std::string text;
  void save(OutArchive& archive) const { archive(text); }
  void load(InArchive& archive) {
    archive(text);
    reading = true;
    const auto give_up = std::chrono::steady_clock::now() + 20s;
    while (!may_go_on && std::chrono::steady_clock::now() < give_up)
      std::this_thread::sleep_for(1ms);
  }
};
Slow slow_result() { return Slow{std::string(stitch::rpc::kQuicklyDecodedBytes, 'x')}; }

TEST(HostileBytes, ALargeResultIsDecodedWhileOthersArrive) {
  Cluster cluster(2);
  reading = false;
  may_go_on = false;
  auto slow = rpc_async<slow_result>("worker1");
  while (!reading) std::this_thread::sleep_for(1ms);
  // Each comes through the same reader.
  for (int i = 0; i < 10; ++i) {
    auto quick = rpc_async<echo<int>>("worker1", i);
    EXPECT_TRUE(quick.wait_for(10s));
  }
  EXPECT_FALSE(slow.ready());
  may_go_on = true;
  EXPECT_EQ(slow.get().text.size(), stitch::rpc::kQuicklyDecodedBytes);
}

}  // namespace
}  // namespace hostile_values_test
