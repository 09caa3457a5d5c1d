#include "tests/support/plain_test.h"

namespace stitch::error_test {
namespace {

struct Verbose : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::optional<std::string> first_line(const std::exception& exception) {
  if (dynamic_cast<const Verbose*>(&exception) == nullptr) return std::nullopt;
  const std::string text = exception.what();
  return text.substr(0, text.find('\n'));
}

TEST(Error, TakesTheReasonFromTheReaderOfALibrarysExceptions) {
  const auto verbose = std::make_exception_ptr(Verbose("no such row\nstack: 1, 2, 3"));
  EXPECT_NE(describe(verbose).find("stack: 1, 2, 3"), std::string::npos);
  set_reason_reader(&first_line);
  EXPECT_TRUE(describe(verbose).ends_with("Verbose: no such row")) << describe(verbose);
  EXPECT_TRUE(std::string(to_error(verbose).what()).ends_with("Verbose: no such row"));
  // Other exceptions keep their whole text.
  EXPECT_EQ(describe(std::make_exception_ptr(std::runtime_error("a\nb"))),
            "std::runtime_error: a\nb");
  set_reason_reader(nullptr);
}

TEST(Error, CopiesSayMoreAndLeaveTheOriginalAlone) {
  const Error error(ErrorCode::timeout, "it took 5 s");
  const Error more =
      error.with_worker("ps0").with_function("f").with_remote(true).with_prefix("call");
  EXPECT_EQ(more.code(), ErrorCode::timeout);
  EXPECT_STREQ(more.what(), "call: it took 5 s");
  EXPECT_EQ(more.worker(), "ps0");
  EXPECT_EQ(more.function(), "f");
  EXPECT_TRUE(more.remote());
  EXPECT_STREQ(error.what(), "it took 5 s");
  EXPECT_TRUE(error.worker().empty());
  EXPECT_FALSE(error.remote());
}

}  // namespace
}  // namespace stitch::error_test
