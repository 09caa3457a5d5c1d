// Deadlines of calls whose requests take long to arrive.
#include "stitch/rpc/world/member_record.h"
#include "stitch/rpc/world/reach.h"
#include "tests/support/world_test.h"

namespace requests_on_the_way_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing;
using stitch::rpc::MemberRecord;
using Clock = std::chrono::steady_clock;

constexpr auto kDelay = 300ms;
constexpr auto kShort = 100ms;  // a limit that passes on the way
constexpr auto kLong = 20s;     // one that does not, on the busiest machine

// Where they are read, so that calls run in the order in which they arrive.
std::atomic<int> runs{0};
int count_runs() { return ++runs; }
STITCH_INLINE(count_runs);

// The deadline of the call, by the steady clock, in ns.
std::int64_t deadline_here() {
  const std::chrono::nanoseconds deadline =
      stitch::rpc::ExecutionContext::current().deadline.time_since_epoch();
  return deadline.count();
}
STITCH_INLINE(deadline_here);

ErrorCode short_call(const std::string& worker) {
  return error_of(
             [&] { static_cast<void>(rpc_sync<count_runs>({.to = worker, .timeout = kShort})); })
      .code();
}

// Over transports that do not leave the host: what worker 0 sends takes kDelay. Its CANCEL comes
// after the request, too.
class RequestsOnTheWay : public ::testing::Test {
 protected:
  void SetUp() override {
    runs = 0;
    if (!stitch::base::has_kernel_clock()) GTEST_SKIP() << "a time namespace of its own";
  }
  ~RequestsOnTheWay() override {
    for (int rank = 0; rank < 2; ++rank) cluster[rank].shutdown({.graceful = false});
  }
  Cluster cluster{2, [](Options& options) {
                    if (options.rank == 0) options.fault = "delay=300ms";
                  }};
};

TEST_F(RequestsOnTheWay, DoNotRunWhenTheirDeadlinePassesThere) {
  EXPECT_EQ(rpc_sync<count_runs>("worker1"), 1);
  EXPECT_EQ(short_call("worker1"), ErrorCode::timeout);
  EXPECT_EQ(rpc_sync<count_runs>("worker1"), 2) << "sent after it";
  EXPECT_EQ(runs, 2);
}

TEST_F(RequestsOnTheWay, HaveTheDeadlineOfTheirCaller) {
  for (int i = 0; i < 2; ++i) {  // the first one waits for a connection
    const auto before = Clock::now();
    const auto future = rpc_async<deadline_here>({.to = "worker1", .timeout = kLong});
    const auto after = Clock::now();
    const Clock::time_point deadline{std::chrono::nanoseconds(future.get())};
    EXPECT_GE(Clock::now(), before + kDelay);
    EXPECT_GE(deadline, before + kLong);
    EXPECT_LE(deadline, after + kLong);
  }
}

TEST(OneHost, IsThatOfWorkersOfOneKernel) {
  Options options;
  options.name = "self";
  options.world_size = 1;
  const MemberRecord self = stitch::rpc::describe_this_worker(options, false);
  const auto one_host = [&](const MemberRecord& reader, const std::string& process,
                            const std::string& host) {
    MemberRecord other = self;
    other.process = process;
    other.host = host;
    return stitch::rpc::Reach(reader)
        .see({{"other", WorkerId(1), 1}, {}, other.encode()})
        .same_host;
  };
  EXPECT_TRUE(one_host(self, "other", self.host));
  EXPECT_FALSE(one_host(self, "other", self.host + "net:[1]"));
  EXPECT_FALSE(one_host(self, "other", ""));
  MemberRecord unknown = self;
  unknown.host = "name:a-host";
  EXPECT_FALSE(one_host(unknown, "other", "name:a-host")) << "a name that another host may have";
  EXPECT_TRUE(one_host(unknown, self.process, "")) << "within a process";
}

}  // namespace
}  // namespace requests_on_the_way_test
