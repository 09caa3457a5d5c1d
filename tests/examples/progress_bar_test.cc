#include "examples/support/progress_bar.h"

#include <cstdio>

#include "tests/support/plain_test.h"

namespace progress_bar_test {
namespace {

// The lines printed to a file, which is not a terminal.
std::vector<std::string> lines_of(std::FILE* file) {
  std::rewind(file);
  std::vector<std::string> lines;
  std::array<char, 256> buffer;
  while (std::fgets(buffer.data(), buffer.size(), file) != nullptr)
    lines.emplace_back(buffer.data());
  return lines;
}

TEST(ProgressBar, PrintsALineEveryFewPercentWithoutATerminal) {
  std::FILE* file = std::tmpfile();
  ProgressBar bar(10000, file);
  for (int i = 1; i <= 10000; ++i) bar.update(i, 0.5);
  bar.finish();
  const auto lines = lines_of(file);
  std::fclose(file);
  ASSERT_EQ(lines.size(), 21u);
  EXPECT_EQ(lines.front().find("\r"), std::string::npos);
  EXPECT_TRUE(lines[10].starts_with(" 50% [###############...............] loss 0.5000"))
      << lines[10];
  EXPECT_NE(lines[10].find("images/s"), std::string::npos);
  EXPECT_NE(lines[10].find(" left"), std::string::npos);
  EXPECT_TRUE(lines.back().starts_with("100% [##############################] loss 0.5000"))
      << lines.back();
  EXPECT_NE(lines.back().find(" in all"), std::string::npos);
}

TEST(ProgressBar, EndsWithTheLastState) {
  std::FILE* file = std::tmpfile();
  ProgressBar bar(1000, file);
  bar.update(1, 2);
  bar.update(11, 1.25);
  bar.finish();
  const auto lines = lines_of(file);
  std::fclose(file);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_TRUE(lines[1].starts_with("  1% ")) << lines[1];
  EXPECT_NE(lines[1].find("loss 1.2500"), std::string::npos) << lines[1];
}

}  // namespace
}  // namespace progress_bar_test
