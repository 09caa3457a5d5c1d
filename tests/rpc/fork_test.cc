// A worker in a forked child cannot be used, and does not affect the parent.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "stitch/base/descriptor.h"
#include "tests/support/forked_child.h"
#include "tests/support/world_test.h"

// Functions are registered under their full names; other files of this program have functions of
// the same names.
namespace fork_test {
namespace {

using namespace stitch::testing;
using stitch::base::Descriptor;

int one() { return 1; }

// The exit status of a forked child that runs `check`.
int in_a_child(const std::function<int()>& check) { return ForkedChild(check).wait(); }

// 0 when `call` throws that it belongs to the parent.
int refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    const bool says_why = std::string(error.what()).find("forked from") != std::string::npos;
    return error.code() == ErrorCode::invalid_argument && says_why ? 0 : 2;
  }
  return 1;
}

TEST(Fork, UsingAWorkerInAChildFailsAndDoesNotAffectTheParent) {
  for (const char* transport : {"loopback", "shm", "tcp"}) {
    SCOPED_TRACE(transport);
    Cluster cluster(2, {.transports = {transport}});
    EXPECT_EQ(rpc_sync<one>("worker1"), 1);
    EXPECT_EQ(cluster[1].rpc_sync<one>("worker0"), 1);
    EXPECT_EQ(in_a_child([&] { return refused([] { rpc_sync<one>("worker1"); }); }), 0);
    EXPECT_EQ(in_a_child([&] { return refused([&] { cluster[1].notify<one>("worker0"); }); }), 0);
    EXPECT_EQ(in_a_child([&] { return refused([&] { cluster[1].barrier(); }); }), 0);
    EXPECT_EQ(
        in_a_child([&] { return refused([&] { static_cast<void>(cluster[1].debug_info()); }); }),
        0);
    EXPECT_EQ(
        in_a_child([&] {
          return refused([&] { static_cast<void>(stitch::init({.rank = 0, .world_size = 1})); });
        }),
        0);
    EXPECT_EQ(in_a_child([&] {
                cluster[0].shutdown();
                cluster[1].shutdown({.graceful = false});
                const Worker ended(std::move(cluster[1]));
                return 0;
              }),
              0);
    EXPECT_EQ(rpc_sync<one>("worker1"), 1);
    EXPECT_EQ(cluster[1].rpc_sync<one>("worker0"), 1);
  }
}

int sleep_a_while() {
  std::this_thread::sleep_for(2s);
  return 1;
}
TEST(Fork, AFutureOfTheParentsCannotBeWaitedFor) {
  Cluster cluster(2);
  const auto pending = rpc_async<sleep_a_while>("worker1");
  EXPECT_EQ(in_a_child([&] { return refused([&] { pending.get(); }); }), 0);
  EXPECT_EQ(pending.get(), 1);
}

// A handler that forks runs in both processes; one of them answers.
int fork_in_a_handler() {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(1);
    return 2;
  }
  int status = 0;
  if (::waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) && WEXITSTATUS(status) == 1 ? 1 : status;  // docs/running.md
}
TEST(Fork, AHandlerThatReturnsInTheChildSendsNoAnswer) {
  for (const char* transport : {"shm", "tcp"}) {
    Cluster cluster(2, {.transports = {transport}});
    EXPECT_EQ(rpc_sync<fork_in_a_handler>("worker1"), 1) << "status of the child";
    for (int i = 0; i < 100; ++i) EXPECT_EQ(rpc_sync<one>("worker1"), 1);
  }
}

TEST(Fork, AChildForkedWithoutALivingWorkerMayStartOne) {
  if (kThreadSanitizer) GTEST_SKIP() << "it ends a process that starts threads after a fork";
  { const auto ended = stitch::init({.rank = 0, .world_size = 1}); }
  EXPECT_EQ(in_a_child([] {
              const auto self = stitch::init({.name = "child", .rank = 0, .world_size = 1});
              return rpc_sync<one>("child") == 1 ? 0 : 1;
            }),
            0);
}

TEST(Fork, ADescriptorIsClosedInTheChildAndItsNumberIsLeftAlone) {
  Descriptor descriptor(::fcntl(0, F_DUPFD_CLOEXEC, 100));
  ASSERT_TRUE(descriptor);
  const int number = descriptor.get();
  EXPECT_EQ(in_a_child([&] {
              if (::fcntl(number, F_GETFD) >= 0) return 1;
              if (descriptor || descriptor.get() != -1) return 2;
              if (::fcntl(0, F_DUPFD_CLOEXEC, number) != number) return 3;
              Descriptor(std::move(descriptor));  // closed here
              return ::fcntl(number, F_GETFD) >= 0 ? 0 : 4;
            }),
            0);
  EXPECT_GE(::fcntl(number, F_GETFD), 0);
}

TEST(Fork, ADescriptorThatWasGivenAwayOrClosedIsNotClosedInTheChild) {
  const int given = Descriptor(::fcntl(0, F_DUPFD_CLOEXEC, 100)).release();
  EXPECT_EQ(in_a_child([&] { return ::fcntl(given, F_GETFD) >= 0 ? 0 : 1; }), 0);
  { const Descriptor closed(given); }
  ASSERT_EQ(::fcntl(0, F_DUPFD_CLOEXEC, given), given);  // the program's own now
  EXPECT_EQ(in_a_child([&] { return ::fcntl(given, F_GETFD) >= 0 ? 0 : 1; }), 0);
  ::close(given);
}

}  // namespace
}  // namespace fork_test
