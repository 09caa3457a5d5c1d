#include "stitch/base/errno_text.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <string>

#include "tests/support/forked_child.h"

namespace stitch::base::errno_text_test {
namespace {

TEST(ErrnoText, SaysWhatTheSystemSays) { EXPECT_EQ(errno_text(EPIPE), "Broken pipe"); }

TEST(ErrnoText, NamesTheLimitThatIsReached) {
  const auto check = [] {
    const rlimit few{123, 456};
    if (::setrlimit(RLIMIT_NOFILE, &few) != 0) return 2;
    const std::string text = errno_text(EMFILE);
    return text.starts_with(
               "Too many open files: all 123 descriptors that this process may have "
               "are open (RLIMIT_NOFILE; the hard limit is 456); a worker takes ") &&
                   text.find("Raise it with `ulimit -n`") != std::string::npos
               ? 0
               : 3;
  };
  EXPECT_EQ(testing::ForkedChild(check).wait(), 0);
  EXPECT_NE(errno_text(ENFILE).find("fs.file-max"), std::string::npos);
  EXPECT_NE(errno_text(ENOMEM).find("vm.max_map_count"), std::string::npos);
}

}  // namespace
}  // namespace stitch::base::errno_text_test
