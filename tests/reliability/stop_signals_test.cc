// SIGTERM as a request to stop: what the program sees, and what ends.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "tests/support/forked_world.h"
#include "tests/support/world_test.h"

namespace stop_signals_test {
namespace {

using namespace stitch::testing;

int one() { return 1; }

// The folder of the world, where the processes leave files for the test.
std::filesystem::path folder_of(const Options& options) {
  return std::filesystem::path(options.init_method.substr(7)).parent_path();
}

TEST(StopSignals, AllFinishTheirStepAndLeaveGracefully) {
  ForkedWorld world(2, [](Options options) {
    options.stop_on_signals = true;
    const auto folder = folder_of(options);
    Worker self = stitch::init(std::move(options));
    std::ofstream(folder / self.name());
    if (self.rank() == 0) return 0;  // serves in ~Worker
    while (!stitch::stop_requested()) {
      if (self.rpc_sync<one>("worker0") != 1) return 2;
    }
    std::fputs("saved\n", stderr);
    return 0;
  });
  for (const char* name : {"worker0", "worker1"})
    ASSERT_TRUE(eventually([&] { return std::filesystem::exists(world.folder() / name); }));
  for (const int rank : {0, 1}) world.signal(rank, SIGTERM);
  EXPECT_EQ(world.wait(1).said, "saved\n");
  const auto server = world.wait(0);
  EXPECT_EQ(server.status, 0);
  EXPECT_EQ(server.said, "");
}

TEST(StopSignals, AServerThatIsStoppedAloneWaitsNoLongerThanTheLimit) {
  ForkedWorld world(2, [](Options options) {
    options.stop_on_signals = true;
    options.shutdown_timeout = 300ms;
    Worker self = stitch::init(std::move(options));
    if (self.rank() == 0) {
      ::kill(::getpid(), SIGTERM);
      return 0;
    }
    return eventually([&] {
      try {
        return self.rpc_sync<one>("worker0") != 1;
      } catch (const Error&) {
        return true;
      }
    })
               ? 0
               : 1;
  });
  const auto server = world.wait(0);
  EXPECT_EQ(server.status, 0);
  EXPECT_TRUE(
      contains(server.said, "no shutdown was called within the time limit on worker \"worker1\""))
      << server.said;
  EXPECT_EQ(world.wait(1).status, 0);
}

TEST(StopSignals, AServerOfAnElasticWorldWaitsForOne) {
  ForkedWorld world(1, [](Options options) {
    options.world_size = "1:2";
    options.stop_on_signals = true;
    const Worker self = stitch::init(std::move(options));
    std::thread([] { ::kill(::getpid(), SIGINT); }).detach();
    stitch::wait_for_stop();
    stitch::wait_for_stop();  // it has been requested
    return stitch::stop_requested() ? 0 : 1;
  });
  const auto outcome = world.wait(0);
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.said, "");
}

TEST(StopSignals, ASecondOneEndsTheProcess) {
  ForkedWorld world(1, [](Options options) {
    options.stop_on_signals = true;
    const Worker self = stitch::init(std::move(options));
    ::raise(SIGTERM);
    if (stitch::stop_requested()) ::raise(SIGTERM);
    return 1;
  });
  EXPECT_EQ(world.wait(0).signal, SIGTERM);
}

TEST(StopSignals, AreRefusedWhereTheProgramHandlesThemOrWasNotAsked) {
  ForkedWorld world(1, [](Options options) {
    ::signal(SIGTERM, [](int) {});
    const auto refused = error_of([&] {
      Options own = options;
      own.stop_on_signals = true;
      static_cast<void>(stitch::init(std::move(own)));
    });
    std::fprintf(stderr, "%s\n", refused.what());
    return 0;
  });
  EXPECT_EQ(world.wait(0).said, "stop_on_signals: this program has its own handler of SIGTERM\n");
  const auto without = error_of([] { stitch::wait_for_stop(); });
  EXPECT_EQ(without.code(), ErrorCode::invalid_argument);
  EXPECT_FALSE(stitch::stop_requested());
}

}  // namespace
}  // namespace stop_signals_test
