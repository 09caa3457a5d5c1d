// What calls and replies record, and under which grad mode they run.
#include "stitch/dist_autograd/protocol/carried_autocast.h"
#include "stitch/dist_autograd/protocol/messages.h"
#include "stitch/rpc/future/autocast.h"
#include "stitch/rpc/message/message.h"
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/oracle.h"
#include "tests/support/world_test.h"

namespace stitch::testing::recording_test {
namespace {

using dist_autograd::Context;

bool grad_mode() { return at::GradMode::is_enabled(); }
bool grad_mode_of(std::string next) { return rpc_sync<grad_mode>(next); }
Future<bool> grad_mode_in_a_coroutine(std::string next) {
  const bool there = co_await rpc_async<grad_mode>(next);
  co_return there || at::GradMode::is_enabled();
}
Future<bool> grad_mode_in_a_continuation(std::string next) {
  return rpc_async<grad_mode>(next).then([](bool there) { return there || grad_mode(); });
}
// The dtype that a product of matrices has here, and the settings of autocast.
struct Casts {
  std::int8_t product = 0, cpu = -1, cuda = -1;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(product, cpu, cuda);
  }
  friend bool operator==(const Casts&, const Casts&) = default;
};
Casts casts() {
  const at::Tensor matrix = at::ones({2, 2});
  const rpc::Autocast autocast = rpc::Autocast::current();
  const auto number = [](const std::optional<at::ScalarType>& dtype) {
    return static_cast<std::int8_t>(dtype ? static_cast<int>(*dtype) : -1);
  };
  return {number(at::mm(matrix, matrix).scalar_type()), number(autocast.cpu),
          number(autocast.cuda)};
}
Casts casts_of(std::string next) { return rpc_sync<casts>(next); }
Future<bool> casts_alike_in_a_coroutine(std::string next) {
  const Casts before = casts();
  const Casts there = co_await rpc_async<casts>(next);
  co_return before == there&& casts() == before;
}
Future<Casts> casts_in_a_continuation(std::string next) {
  return rpc_async<grad_mode>(next).then([](bool) { return casts(); });
}
// Has values, and gradients, that autocast to bfloat16 rounds.
at::Tensor product_with(const at::Tensor& x, const at::Tensor& parameter) {
  return at::mm(x, (parameter / 7).to(at::kFloat).reshape({3, 1})).to(at::kDouble);
}
at::Tensor product_with_parameter(at::Tensor x) { return product_with(x, own_parameter()); }

at::Tensor the_parameter() { return own_parameter(); }
bool result_requires_grad(at::Tensor x) { return (x * own_parameter()).requires_grad(); }

TEST(GradMode, TravelsWithCallsAndTheirNestedCalls) {
  Cluster cluster(2);
  for (const bool on : {true, false, true}) {
    const at::AutoGradMode mode(on);
    EXPECT_EQ(rpc_sync<grad_mode>("worker1"), on);
    EXPECT_EQ(rpc_sync<grad_mode_of>("worker1", "worker0"), on);
    EXPECT_EQ(rpc_sync<grad_mode_in_a_coroutine>("worker1", "worker0"), on);
    EXPECT_EQ(rpc_sync<grad_mode_in_a_continuation>("worker1", "worker0"), on);
    EXPECT_EQ(remote<grad_mode>("worker1").to_here(), on);
    EXPECT_EQ(rpc_sync<result_requires_grad>("worker1", ones()), on);
    EXPECT_EQ(at::GradMode::is_enabled(), on);
  }
}

TEST(Autocast, TravelsWithCallsAndTheirNestedCalls) {
  Cluster cluster(2);
  const std::vector<rpc::Autocast> settings{{},
                                            {at::kBFloat16, std::nullopt},
                                            {},
                                            {at::kBFloat16, at::kHalf},
                                            {std::nullopt, at::kBFloat16},
                                            {at::kBFloat16, std::nullopt}};
  for (const rpc::Autocast& setting : settings) {
    const rpc::AutocastScope scope(setting);
    const Casts here = casts();
    EXPECT_EQ(rpc::Autocast::is_on(), setting.on());
    EXPECT_EQ(here.product, static_cast<std::int8_t>(setting.cpu ? at::kBFloat16 : at::kFloat));
    EXPECT_EQ(rpc_sync<casts>("worker1"), here);
    EXPECT_EQ(rpc_sync<casts>("worker0"), here) << "also to itself";
    EXPECT_EQ(rpc_sync<casts_of>("worker1", "worker0"), here);
    EXPECT_TRUE(rpc_sync<casts_alike_in_a_coroutine>("worker1", "worker0"));
    EXPECT_EQ(rpc_sync<casts_in_a_continuation>("worker1", "worker0"), here);
    EXPECT_EQ(remote<casts>("worker1").to_here(), here);
    EXPECT_EQ(casts(), here);
  }
  const Casts off = casts();
  EXPECT_EQ(off.product, static_cast<std::int8_t>(at::kFloat));
  EXPECT_EQ(rpc_sync<casts>("worker1"), off);
}

TEST(Autocast, OfACallGivesTheGradientsOfOneProcess) {
  Cluster cluster(2);
  const auto x = at::linspace(0, 1, 6).reshape({2, 3}).requires_grad_();
  const auto gradient_here = [&] {
    const auto loss = product_with(x, parameter_of(cluster[1])).sum();
    return torch::autograd::grad({loss}, {x}).front();
  };
  const at::Tensor without = gradient_here();
  at::Tensor expected;
  Context context;
  at::Tensor loss;
  {
    const rpc::AutocastScope scope({at::kBFloat16, std::nullopt});
    expected = gradient_here();
    loss = rpc_sync<product_with_parameter>("worker1", x).sum();
  }
  ASSERT_FALSE(torch::equal(expected, without)) << "else this test shows nothing";
  context.backward({loss});
  EXPECT_TRUE(torch::equal(context.gradient(x), expected));
}

TEST(Autocast, ToADtypeWithoutACodeIsRefused) {
  Cluster cluster(2);
  const rpc::AutocastScope scope({std::nullopt, at::kComplexFloat});
  const auto error = error_of([] { rpc_sync<grad_mode>("worker1"); });
  EXPECT_TRUE(
      has_text(error, ErrorCode::invalid_argument, "autocast to ComplexFloat cannot travel"));
}

// A request with these bytes in its autocast section.
rpc::InMessage request_under(const std::vector<int>& codes) {
  rpc::OutMessage message(rpc::wire::kRequest);
  message.frame.end_body();
  std::vector<std::byte> bytes;
  for (const int code : codes) bytes.push_back(static_cast<std::byte>(code));
  message.frame.add_section(dist_autograd::wire::kAutocastSection, bytes);
  return rpc::InMessage(std::move(message.frame).finish(), WorkerInfo{});
}

TEST(Autocast, OfADamagedSectionIsRefused) {
  for (const std::vector<int>& codes :
       {std::vector<int>{}, {1}, {0, 2, 0}, {5, 0}, {0, 5}, {255, 255}}) {
    const auto request = request_under(codes);
    const auto error = error_of([&] { static_cast<void>(dist_autograd::autocast_of(request)); });
    EXPECT_EQ(error.code(), ErrorCode::protocol) << error.what();
  }
}

TEST(GradMode, OffGivesTheCallerResultsThatDoNotRequireGrad) {
  Cluster cluster(2);
  const auto x = ones().requires_grad_();
  const auto rref = remote<the_parameter>("worker1");
  for (const bool in_a_context : {false, true}) {
    std::optional<Context> context;
    if (in_a_context) context.emplace();
    const at::NoGradGuard off;
    const auto y = rpc_sync<times_parameter>("worker1", x);
    EXPECT_FALSE(y.requires_grad());
    EXPECT_TRUE(equal_gradients(y, parameter_of(cluster[1])));
    EXPECT_FALSE(rpc_sync<the_parameter>("worker1").requires_grad());
    EXPECT_FALSE(rref.to_here().requires_grad());
    EXPECT_EQ(count_on(cluster[0], "links") + count_on(cluster[1], "links"), 0);
  }
  EXPECT_TRUE(rpc_sync<the_parameter>("worker1").requires_grad());
}

// The reply comes from the thread that completes it.
struct Later {
  Promise<at::Tensor> promise;
  at::Tensor value;
};
std::optional<Later>& later() {
  static std::optional<Later> one;
  return one;
}
std::atomic<bool> asked{false};
Future<at::Tensor> times_parameter_later(at::Tensor x) {
  later().emplace(Later{{}, x * own_parameter()});
  asked = true;
  return later()->promise.future();
}

TEST(Recording, OfAReplyDoesNotDependOnTheThreadThatCompletesIt) {
  Cluster cluster(2);
  asked = false;
  Context context;
  const auto x = ones().requires_grad_();
  const auto future = rpc_async<times_parameter_later>("worker1", x);
  ASSERT_TRUE(eventually([] { return asked.load(); }));
  std::thread([] {
    const at::NoGradGuard off;
    later()->promise.set_value(later()->value);
  }).join();
  context.backward({future.get().sum()});
  EXPECT_TRUE(equal_gradients(context.gradient(x), parameter_of(cluster[1])));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), ones()));
  later().reset();
}

// Backward over what came without a context says so.
void expect_unrecorded(const Error& error) {
  EXPECT_TRUE(contains(error.what(),
                       "backward reached a tensor from worker \"worker1\" received without a "
                       "context: make the Context before the forward pass"))
      << error.what();
}

TEST(Unrecorded, ResultsWithHistoryFailTheBackwardThatReachesThem) {
  Cluster cluster(2);
  const auto x = ones().requires_grad_();
  const auto before = rpc_sync<times_parameter>("worker1", x);
  EXPECT_TRUE(before.requires_grad());
  EXPECT_FALSE(before.is_leaf());
  const auto fetched = remote<times_parameter>("worker1", x).to_here();
  Context context;
  at::Tensor in_a_thread;
  std::thread([&] {
    const WorkerScope scope(cluster[0]);
    in_a_thread = rpc_sync<times_parameter>("worker1", x);
  }).join();
  for (const at::Tensor& result : {before, in_a_thread, fetched}) {
    Context own;
    const auto recorded = rpc_sync<times_parameter>("worker1", x);
    expect_unrecorded(error_of([&] { own.backward({(recorded * result).sum()}); }));
    EXPECT_ANY_THROW((result * 2).sum().backward()) << "so does libtorch's own engine";
  }
  // As data it may be used, and where the loss does not lead to it.
  context.backward({(rpc_sync<times_parameter>("worker1", x) * before.detach()).sum()});
  EXPECT_TRUE(context.gradient(x).defined());
}

at::Tensor leads_to_a_leaf_here(at::Tensor y) {
  try {
    y.sum().backward();
  } catch (const std::exception& error) {
    return at::zeros({1}).fill_(
        std::string(error.what()).find("received without a context") != std::string::npos ? 1 : 2);
  }
  return at::zeros({1});
}

TEST(Unrecorded, ArgumentsWithHistoryDoTooAndLeavesStayLeaves) {
  Cluster cluster(2);
  const auto x = ones().requires_grad_();
  EXPECT_EQ(rpc_sync<leads_to_a_leaf_here>("worker1", x).item<double>(), 0) << "a leaf";
  EXPECT_EQ(rpc_sync<leads_to_a_leaf_here>("worker1", x * 2).item<double>(), 1);
  const auto parameter = rpc_sync<the_parameter>("worker1");
  EXPECT_TRUE(parameter.is_leaf());
  EXPECT_TRUE(parameter.requires_grad());
  {
    const at::NoGradGuard off;
    EXPECT_FALSE(rpc_sync<times_parameter>("worker1", x).requires_grad());
  }
  Context context;
  context.backward({(parameter * 2).sum()});
  EXPECT_TRUE(equal_gradients(context.gradient(parameter), 2 * ones()));
}

}  // namespace
}  // namespace stitch::testing::recording_test
