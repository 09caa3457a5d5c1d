#include "stitch/base/alternate_stack.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <thread>
#include <vector>

namespace stitch::base {
namespace {

stack_t current() {
  stack_t now{};
  EXPECT_EQ(::sigaltstack(nullptr, &now), 0);
  return now;
}

TEST(AlternateStack, IsThereUntilTheThreadEnds) {
  std::thread([] {
    use_alternate_stack();
    const stack_t first = current();
    EXPECT_EQ(first.ss_flags & SS_DISABLE, 0);
    EXPECT_GE(first.ss_size, 64U << 10);
    use_alternate_stack();
    EXPECT_EQ(current().ss_sp, first.ss_sp);
  }).join();
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
}  // namespace stitch::base
