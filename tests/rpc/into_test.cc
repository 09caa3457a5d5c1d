// Results received into the caller's own tensors, and the limit between frame and buffer.
#include "tests/support/world_test.h"

namespace into_test {
namespace {

using namespace stitch::testing;
using stitch::Target;

at::Tensor counted_up(std::int64_t rows, std::int64_t from) {
  return at::arange(from, from + rows * 4, at::kFloat).reshape({rows, 4});
}
at::Tensor counted_up_transposed(std::int64_t rows) {
  return counted_up(rows, 0).t().contiguous().t();
}
at::Tensor counted_up_sparse(std::int64_t rows) { return counted_up(rows, 1).to_sparse(); }
at::Tensor into_fails() { throw std::runtime_error("no result today"); }
std::int64_t into_number() { return 7; }

class Into : public ::testing::TestWithParam<const char*> {
 protected:
  static std::unique_ptr<Cluster> cluster(std::size_t inline_bytes = Options{}.inline_bytes) {
    return std::make_unique<Cluster>(2, [=](Options& options) {
      options.transports = {GetParam()};
      options.inline_bytes = inline_bytes;
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Over, Into, ::testing::Values("loopback", "shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Into, ReceivesResultsOfEverySize) {
  const auto world = cluster();
  for (const std::int64_t rows : {0, 1, 100, 1024, 1025, 5000, 300'000}) {
    const at::Tensor out = at::full({rows, 4}, -1.0F);
    const void* const memory = out.data_ptr();
    const auto version = out.unsafeGetTensorImpl()->version_counter().current_version();
    const at::Tensor result = rpc_sync<counted_up>({.to = "worker1", .into = out}, rows, 3);
    EXPECT_TRUE(result.is_same(out)) << rows;
    EXPECT_EQ(out.data_ptr(), memory);
    EXPECT_TRUE(at::equal(out, counted_up(rows, 3))) << rows;
    EXPECT_GT(out.unsafeGetTensorImpl()->version_counter().current_version(), version)
        << "autograd must see that it has changed";
  }
}

TEST_P(Into, IsReadIntoWithoutOtherMemory) {
  if (std::string(GetParam()) == "loopback" || std::string(GetParam()) == "uv")
    GTEST_SKIP() << "it takes the memory before the frame has arrived, and copies the result";
  const auto world = cluster();
  const at::Tensor out = at::empty({300'000, 4});
  const auto fresh = [&] {
    const auto numbers = (*world)[0].debug_info();
    return numbers.at("rpc.receive_pool_fresh") + numbers.at("rpc.receive_pool_reused");
  };
  const auto before = fresh();
  for (int i = 0; i < 5; ++i) {
    static_cast<void>(rpc_sync<counted_up>(Target("worker1").into(out), 300'000, i));
    EXPECT_TRUE(at::equal(out, counted_up(300'000, i)));
  }
  EXPECT_EQ(fresh(), before);
  static_cast<void>(rpc_sync<counted_up>("worker1", 300'000, 0));
  EXPECT_EQ(fresh(), before + 1);
}

TEST_P(Into, ConcurrentResultsGoToTheirOwnTensors) {
  const auto world = cluster();
  std::vector<at::Tensor> out;
  std::vector<Future<at::Tensor>> results;
  for (std::int64_t i = 0; i < 40; ++i) {
    out.push_back(at::empty({i * 500, 4}));
    results.push_back(rpc_async<counted_up>({.to = "worker1", .into = out.back()}, i * 500, i));
  }
  for (std::int64_t i = 0; i < 40; ++i) {
    const auto at = static_cast<std::size_t>(i);
    EXPECT_TRUE(results[at].get().is_same(out[at]));
    EXPECT_TRUE(at::equal(out[at], counted_up(i * 500, i)));
  }
}

TEST_P(Into, CopesWithOtherLayouts) {
  const auto world = cluster();
  for (const std::int64_t rows : {3, 50'000}) {
    const at::Tensor expected = counted_up(rows, 0);
    const at::Tensor whole = at::zeros({rows, 8});
    const at::Tensor view = whole.slice(1, 2, 6);
    EXPECT_TRUE(rpc_sync<counted_up>({.to = "worker1", .into = view}, rows, 0).is_same(view));
    EXPECT_TRUE(at::equal(view, expected)) << "into a view";
    EXPECT_EQ(whole.slice(1, 0, 2).abs().sum().item<float>(), 0.0F) << "beside the view";
    const at::Tensor out = at::zeros({rows, 4});
    EXPECT_TRUE(rpc_sync<counted_up_transposed>({.to = "worker1", .into = out}, rows).is_same(out));
    EXPECT_TRUE(at::equal(out, expected)) << "from a transposed result";
    EXPECT_TRUE(out.is_contiguous());
  }
}

TEST_P(Into, NamesWhatDoesNotFit) {
  const auto world = cluster();
  const auto call = [](const at::Tensor& out, std::int64_t rows) {
    return error_of([&] { rpc_sync<counted_up>({.to = "worker1", .into = out}, rows, 0); });
  };
  for (const std::int64_t rows : {2, 50'000}) {
    const Error sizes = call(at::empty({rows, 5}), rows);
    EXPECT_EQ(sizes.code(), ErrorCode::invalid_argument);
    const std::string n = std::to_string(rows);
    EXPECT_TRUE(contains(sizes.what(), "the result is Float [" + n +
                                           ", 4], the tensor to receive it into is Float [" + n +
                                           ", 5]"))
        << sizes.what();
    // As many bytes, but another type.
    EXPECT_EQ(call(at::empty({rows, 4}, at::kInt), rows).code(), ErrorCode::invalid_argument);
    EXPECT_EQ(call(at::empty({4, rows}), rows).code(), ErrorCode::invalid_argument);
  }
  const at::Tensor out = at::empty({10, 4});
  EXPECT_EQ(
      error_of([&] { rpc_sync<counted_up_sparse>({.to = "worker1", .into = out}, 10); }).code(),
      ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([&] { rpc_sync<into_fails>({.to = "worker1", .into = out}); }).code(),
            ErrorCode::remote_exception);
  EXPECT_EQ(call(at::empty({10, 4}).requires_grad_(), 10).code(), ErrorCode::invalid_argument);
  EXPECT_EQ(call(counted_up_sparse(10), 10).code(), ErrorCode::invalid_argument);
  const Error no_tensor = error_of([&] { rpc_sync<into_number>({.to = "worker1", .into = out}); });
  EXPECT_TRUE(has_text(no_tensor, ErrorCode::invalid_argument, "the function does not return one"));
  EXPECT_EQ(error_of([&] { notify<into_number>({.to = "worker1", .into = out}); }).code(),
            ErrorCode::invalid_argument);
  // The worker is still usable.
  EXPECT_TRUE(
      at::equal(rpc_sync<counted_up>({.to = "worker1", .into = out}, 10, 5), counted_up(10, 5)));
}

TEST_P(Into, InlineBytesDecideWhatGoesInTheFrameAndNothingElse) {
  for (const std::size_t inline_bytes : {std::size_t{0}, std::size_t{100}, std::size_t{1} << 20}) {
    const auto world = cluster(inline_bytes);
    for (const std::int64_t rows : {0, 1, 6, 7, 1000, 70'000}) {
      EXPECT_TRUE(at::equal(rpc_sync<counted_up>("worker1", rows, 1), counted_up(rows, 1)))
          << inline_bytes << ' ' << rows;
      const at::Tensor out = at::empty({rows, 4});
      static_cast<void>(rpc_sync<counted_up>({.to = "worker1", .into = out}, rows, 1));
      EXPECT_TRUE(at::equal(out, counted_up(rows, 1))) << inline_bytes << ' ' << rows;
    }
  }
}

}  // namespace
}  // namespace into_test
