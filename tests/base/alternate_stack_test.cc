#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "stitch/base/alternate_stack.h"
#include "tests/support/plain_test.h"

namespace stitch::base::alternate_stack_test {
namespace {

constexpr bool kSanitized = testing::kAddressSanitizer || testing::kThreadSanitizer;

// Whether there is memory at that address, whatever may be done with it.
bool is_mapped(const void* at) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  unsigned char resident = 0;
  auto* const begin = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(at) / page * page);
  return ::mincore(begin, page, &resident) == 0;
}

stack_t current() {
  stack_t now{};
  EXPECT_EQ(::sigaltstack(nullptr, &now), 0);
  return now;
}

TEST(AlternateStack, IsThereUntilTheThreadEnds) {
  stack_t first{};
  std::thread([&] {
    use_alternate_stack();
    first = current();
    EXPECT_EQ(first.ss_flags & SS_DISABLE, 0);
    EXPECT_GE(first.ss_size, 64U << 10);
    use_alternate_stack();
    EXPECT_EQ(current().ss_sp, first.ss_sp);
    EXPECT_TRUE(is_mapped(first.ss_sp));
  }).join();
  if (kSanitized) return;  // these keep one of their own
  EXPECT_FALSE(is_mapped(first.ss_sp));
}

TEST(AlternateStack, HasAPageBelowItThatNothingMayTouch) {
  if (kSanitized) GTEST_SKIP() << "the stack is the sanitizer's";
  std::thread([] {
    use_alternate_stack();
    const char* const below = static_cast<const char*>(current().ss_sp) - 1;
    EXPECT_TRUE(is_mapped(below)) << "no other mapping may be there";
    std::array<int, 2> ends{};
    ASSERT_EQ(::pipe(ends.data()), 0);
    EXPECT_EQ(::write(ends[1], below + 1, 1), 1);
    EXPECT_EQ(::write(ends[1], below, 1), -1);
    EXPECT_EQ(errno, EFAULT);
    for (const int end : ends) ::close(end);
  }).join();
}

void exit_with_7(int) { std::exit(7); }

// What a program may do: SIGTERM ends it in order, on whichever stack.
TEST(AlternateStackDeathTest, AHandlerThatRunsOnItMayExit) {
  const auto die = [] {
    use_alternate_stack();
    struct sigaction action {};
    action.sa_handler = &exit_with_7;
    action.sa_flags = SA_ONSTACK;
    ::sigaction(SIGTERM, &action, nullptr);
    ::raise(SIGTERM);
  };
  EXPECT_EXIT(std::thread(die).join(), ::testing::ExitedWithCode(7), "");
  EXPECT_EXIT(die(), ::testing::ExitedWithCode(7), "");
}

TEST(AlternateStackDeathTest, OfTheMainThreadIsThereUntilTheProcessEnds) {
  const auto end = [] {
    use_alternate_stack();
    std::atexit([] { ::_exit((current().ss_flags & SS_DISABLE) == 0 ? 7 : 8); });
    std::exit(9);
  };
  EXPECT_EXIT(end(), ::testing::ExitedWithCode(7), "");
}

TEST(AlternateStack, TheProgramsOwnIsKept) {
  std::thread([] {
    std::vector<char> memory(256 << 10);
    stack_t own{};
    own.ss_sp = memory.data();
    own.ss_size = memory.size();
    ASSERT_EQ(::sigaltstack(&own, nullptr), 0);
    use_alternate_stack();
    EXPECT_EQ(current().ss_sp, memory.data());
    own.ss_flags = SS_DISABLE;
    EXPECT_EQ(::sigaltstack(&own, nullptr), 0);
  }).join();
}

}  // namespace
}  // namespace stitch::base::alternate_stack_test
