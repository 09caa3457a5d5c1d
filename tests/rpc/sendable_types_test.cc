#include <torch/nn/modules/linear.h>

#include <cmath>
#include <filesystem>

#include "stitch/rpc/message/message.h"
#include "tests/support/world_test.h"

// Values that need no serialize function: plain structs, and types of libtorch that are no tensors.
namespace sendable_types_test {
namespace {

using namespace stitch::testing;
using stitch::Sendable;

template <class T>
T echo(T value) {
  return value;
}
template <class T>
T sent(const T& value) {
  return rpc_sync<echo<T>>("worker1", value);
}

// --- plain structs

struct Point {
  float x = 0;
  double y;
  friend bool operator==(const Point&, const Point&) = default;
};
enum class Colour : std::uint8_t { red, green };
struct Shape {
  std::string name;
  Colour colour;
  std::vector<Point> corners;
  std::map<std::string, Point> marks;
  std::optional<Point> centre;
  char tag[4];
  int counts[2][3];
  std::array<short, 2> pair;
  std::variant<int, std::string> either;
  std::tuple<int> one;
  bool flag;
  Point origin;
  friend bool operator==(const Shape&, const Shape&) = default;
};
struct Sixteen {
  int a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p;
  friend bool operator==(const Sixteen&, const Sixteen&) = default;
};
struct Seventeen {
  int a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q;
};
struct Derived : Point {
  int more;
};
struct Tree {
  int value = 0;
  std::vector<Tree> children;
  std::unique_ptr<Tree> next;
};
struct Batch {
  at::Tensor data;
  std::vector<at::Tensor> masks;
  c10::optional<at::Tensor> labels;
  at::Scalar scale;
  at::Half half;
};
// The same fields, with a function that says so.
struct Described {
  int number = 0;
  std::string text;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(text, number);
  }
};
struct Plain {
  std::string text;
  int number;
};

TEST(PlainStructs, TravelAsTheirFields) {
  Cluster cluster(2);
  EXPECT_EQ(sent(Point{1.5f, 2.5}), (Point{1.5f, 2.5}));
  const Shape shape{"box",
                    Colour::green,
                    {{1, 2}, {3, 4}},
                    {{"m", {5, 6}}},
                    Point{7, 8},
                    "abc",
                    {{1, 2, 3}, {4, 5, 6}},
                    {9, 10},
                    "text",
                    {11},
                    true,
                    {12, 13}};
  EXPECT_EQ(sent(shape), shape);
  EXPECT_EQ(sent(std::vector<Shape>{shape, shape}).back(), shape);
  const Sixteen all{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  EXPECT_EQ(sent(all), all);
}

int sum(Tree tree) {
  int all = tree.value;
  for (Tree& child : tree.children) all += sum(std::move(child));
  return tree.next ? all + sum(std::move(*tree.next)) : all;
}

TEST(PlainStructs, MayContainThemselves) {
  Cluster cluster(2);
  Tree tree{1, {}, std::make_unique<Tree>(Tree{10, {}, nullptr})};
  tree.children.push_back(Tree{100, {}, nullptr});
  EXPECT_EQ(rpc_sync<sum>("worker1", std::move(tree)), 111);
}

TEST(PlainStructs, HaveTensorsInside) {
  Cluster cluster(2);
  const Batch back = sent(Batch{at::arange(4), {at::ones(2)}, at::zeros(3), 2.5, at::Half(0.5f)});
  EXPECT_TRUE(at::equal(back.data, at::arange(4)));
  EXPECT_TRUE(at::equal(back.masks.at(0), at::ones(2)));
  EXPECT_TRUE(at::equal(*back.labels, at::zeros(3)));
  EXPECT_EQ(back.scale.toDouble(), 2.5);
  EXPECT_EQ(static_cast<float>(back.half), 0.5f);
}

// What a callee whose parameter is a To reads from the bytes of a From.
template <class To, class From>
To read_as(const From& from) {
  stitch::rpc::OutMessage message(stitch::rpc::wire::kRequest);
  stitch::rpc::OutArchive out(message);
  out(from);
  out.seal();
  message.frame.end_body();
  stitch::rpc::InMessage in(std::move(message.frame).finish(), {});
  stitch::rpc::InArchive archive(in, in.view.body());
  To to = stitch::rpc::blank<To>();
  archive(to);
  archive.check_seal();
  archive.expect_end();
  return to;
}

TEST(PlainStructs, HaveTheBytesOfOnesThatDescribeThemselves) {
  const auto described = read_as<Described>(Plain{"seven", 7});
  EXPECT_EQ(described.text, "seven");
  EXPECT_EQ(described.number, 7);
  EXPECT_EQ(read_as<Plain>(described).text, "seven");
}

TEST(PlainStructs, AreCheckedAsOtherValues) {
  EXPECT_TRUE(has_text(error_of([] {
                         read_as<Point>(Plain{"abcd", 7});
                       }),
                       ErrorCode::invalid_argument, "its fields are of other types"));
  EXPECT_TRUE(has_text(error_of([] {
                         read_as<Sixteen>(Point{1, 2});
                       }),
                       ErrorCode::invalid_argument, "are left"));
  Tree deep;
  for (int i = 0; i < 300; ++i) deep = Tree{0, {}, std::make_unique<Tree>(std::move(deep))};
  EXPECT_TRUE(has_text(error_of([&] { read_as<Tree>(deep); }), ErrorCode::invalid_argument,
                       "inside one another"));
}

// --- structs that are none

struct Pointer {
  int a;
  int* b;
};
struct Union {
  union {
    int a;
    float b;
  };
  int c;
};
struct Bits {
  int a : 3;
  int b : 4;
};
struct Reference {
  int& a;
};
struct Constant {
  const int a = 1;
  int b = 2;
};
struct Outer {
  std::vector<std::optional<Pointer>> inside;
};
static_assert(!Sendable<Pointer> && !Sendable<Union> && !Sendable<Reference> &&
              !Sendable<Constant> && !Sendable<Outer> && !Sendable<Seventeen> &&
              !Sendable<Derived>);
static_assert(!Sendable<std::array<char, 2 << 20>> &&
              !Sendable<std::optional<std::array<char, 70000>>>);
static_assert(Sendable<std::vector<std::array<char, 2 << 20>>>);

Union make_union() { return {{5}, 6}; }
Bits make_bits() { return {1, 2}; }

TEST(PlainStructs, ThatCannotBeSentCanBeKept) {
  Cluster cluster(2);
  const auto kept = remote<make_union>("worker1");
  kept.when_created().get();
  remote<make_bits>("worker1").when_created().get();
}

// --- large values

using Large = std::array<char, 2 << 20>;
template <class T>
std::size_t size_of(const std::vector<T>& values) {
  return values.size() * sizeof(T);
}
std::size_t size_of_map(const std::map<int, Large>& values) { return values.size(); }
std::size_t size_of_pointer(std::unique_ptr<Large> value) { return value->size(); }
std::size_t size_of_either(const std::vector<std::variant<int, Large>>& values) {
  return std::get<Large>(values.front()).size();
}

TEST(LargeValues, InsideOthersDoNotLieOnTheStack) {
  Cluster cluster(2);
  EXPECT_EQ(rpc_sync<size_of<Large>>("worker1", std::vector<Large>(3)), 3 * sizeof(Large));
  std::map<int, Large> map;
  for (int i = 0; i < 4; ++i) map[i];
  EXPECT_EQ(rpc_sync<size_of_map>("worker1", map), 4u);
  EXPECT_EQ(rpc_sync<size_of_pointer>("worker1", std::make_unique<Large>()), sizeof(Large));
  std::vector<std::variant<int, Large>> either(1);
  either.front().emplace<Large>();
  EXPECT_EQ(rpc_sync<size_of_either>("worker1", either), sizeof(Large));
}

// --- libtorch's

template <class T>
void expect_sent(const T& value) {
  EXPECT_EQ(sent(value), value);
}

TEST(TorchTypes, OfNumbersTravel) {
  Cluster cluster(2);
  expect_sent(at::Half(1.5f));
  expect_sent(at::BFloat16(1.5f));
  expect_sent(std::vector<at::Half>{at::Half(1.f), at::Half(2.f)});
  expect_sent(c10::complex<float>(1, 2));
  expect_sent(c10::complex<double>(1, 2));
  EXPECT_EQ(static_cast<float>(sent(c10::complex<at::Half>(c10::complex<float>(1, 2))).imag()), 2);
  EXPECT_EQ(read_as<std::complex<float>>(c10::complex<float>(1, 2)), std::complex<float>(1, 2));
  EXPECT_TRUE(has_text(error_of([] { read_as<at::BFloat16>(at::Half(1.f)); }),
                       ErrorCode::invalid_argument, "its fields are of other types"));
}

TEST(TorchTypes, ScalarsKeepTheirKind) {
  Cluster cluster(2);
  EXPECT_TRUE(sent(at::Scalar(true)).isBoolean());
  EXPECT_EQ(sent(at::Scalar(std::int64_t{1} << 60)).toLong(), std::int64_t{1} << 60);
  const at::Scalar real = sent(at::Scalar(0.1));
  EXPECT_TRUE(real.isFloatingPoint());
  EXPECT_EQ(real.toDouble(), 0.1);
  const at::Scalar complex = sent(at::Scalar(c10::complex<double>(1, 2)));
  EXPECT_TRUE(complex.isComplex());
  EXPECT_EQ(complex.toComplexDouble(), c10::complex<double>(1, 2));
  EXPECT_EQ(sent(std::vector<at::Scalar>{1, 2.5}).at(1).toDouble(), 2.5);
}

struct Place {
  at::Device device;
  int slot;
};

TEST(TorchTypes, DevicesTravelThoughTheyHaveNoDefault) {
  Cluster cluster(2);
  const at::Device cuda(at::kCUDA, 3);
  expect_sent(cuda);
  expect_sent(at::Device(at::kMeta));
  expect_sent(std::vector<at::Device>{cuda, at::kCPU});
  expect_sent(std::map<std::string, at::Device>{{"a", cuda}});
  expect_sent(std::optional<at::Device>(cuda));
  expect_sent(std::pair<int, at::Device>(1, cuda));
  expect_sent(std::tuple<at::Device, at::Device>(cuda, at::kCPU));
  expect_sent(std::variant<at::Device, int>(cuda));
  const Place place = sent(Place{cuda, 4});
  EXPECT_EQ(place.device, cuda);
  EXPECT_EQ(place.slot, 4);
  for (const auto& [type, index] :
       std::vector<std::pair<std::uint8_t, std::int8_t>>{{200, 0}, {1, -2}, {0, 5}}) {
    stitch::rpc::OutMessage message(stitch::rpc::wire::kRequest);
    stitch::rpc::OutArchive out(message);
    out(type, index);
    message.frame.end_body();
    stitch::rpc::InMessage in(std::move(message.frame).finish(), {});
    stitch::rpc::InArchive archive(in, in.view.body());
    at::Device device(at::kCPU);
    EXPECT_TRUE(has_text(error_of([&] { archive(device); }), ErrorCode::invalid_argument,
                         "no device is of type " + std::to_string(type)));
  }
}

TEST(TorchTypes, OptionalsAreThoseOfTheStandardLibrary) {
  Cluster cluster(2);
  EXPECT_FALSE(sent(c10::optional<int>()).has_value());
  EXPECT_EQ(*sent(c10::optional<int>(4)), 4);
  EXPECT_TRUE(at::equal(*sent(c10::optional<at::Tensor>(at::ones(2))), at::ones(2)));
  EXPECT_EQ(*sent(c10::optional<at::Device>(at::kCPU)), at::Device(at::kCPU));
  EXPECT_EQ(read_as<std::optional<int>>(c10::optional<int>(4)), 4);
}

using Parameters = torch::OrderedDict<std::string, at::Tensor>;
struct Named {
  Parameters parameters;
  int number;
};

TEST(TorchTypes, NamedParametersTravelInTheirOrder) {
  Cluster cluster(2);
  const torch::nn::Linear module(3, 2);
  const Parameters back = sent(module->named_parameters());
  ASSERT_EQ(back.size(), 2u);
  EXPECT_EQ(back[0].key(), "weight");
  EXPECT_TRUE(at::equal(back["weight"], module->weight));
  EXPECT_TRUE(at::equal(back["bias"], module->bias));
  EXPECT_EQ(sent(Parameters("Module")).key_description(), "Module");
  EXPECT_EQ(sent(std::vector<std::optional<Parameters>>{back}).at(0)->size(), 2u);
  EXPECT_EQ(sent(Named{back, 3}).parameters.size(), 2u);
  EXPECT_EQ(sent(std::pair<int, Parameters>(1, back)).second.size(), 2u);
  EXPECT_EQ(std::get<0>(sent(std::tuple<Parameters>(back))).size(), 2u);
  EXPECT_EQ(std::get<1>(sent(std::variant<int, Parameters>(back))).size(), 2u);
}

TEST(TorchTypes, PathsOfFilesTravel) {
  Cluster cluster(2);
  expect_sent(std::filesystem::path("/tmp/a b"));
  expect_sent(std::vector<std::filesystem::path>{"a", ""});
}

// --- member functions with qualifiers

struct Counter {
  int value = 0;
  int add(int by) & noexcept { return value += by; }
  int get() const& noexcept { return value; }
};

TEST(MemberFunctions, QualifiedByLvalueAndNoexceptCanBeCalled) {
  Cluster cluster(2);
  const auto counter = remote<Counter>("worker1");
  EXPECT_EQ(counter.rpc_sync<&Counter::add>(3), 3);
  EXPECT_EQ(counter.rpc_sync<&Counter::get>(), 3);
}

}  // namespace
}  // namespace sendable_types_test
