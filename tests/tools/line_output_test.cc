#include <unistd.h>

#include "tests/support/plain_test.h"
#include "tools/line_output.h"

namespace line_output_test {
namespace {

// The output of a LineSplitter, read back from a pipe.
class LineOutput : public ::testing::Test {
 protected:
  LineOutput() { EXPECT_EQ(::pipe(pipe_.data()), 0); }
  ~LineOutput() override {
    for (int fd : pipe_) ::close(fd);
  }

  int fd() const { return pipe_[1]; }
  std::string printed() {
    std::array<char, 65536> buffer;
    const ssize_t got = ::read(pipe_[0], buffer.data(), buffer.size());
    return {buffer.data(), static_cast<std::size_t>(got > 0 ? got : 0)};
  }

 private:
  std::array<int, 2> pipe_{};
};

TEST_F(LineOutput, PrintsALineOnlyWhenItIsComplete) {
  stitch_run::LineSink sink(fd());
  stitch_run::LineSplitter a(sink, "[a] ");
  stitch_run::LineSplitter b(sink, "[b] ");
  a.feed("half ");
  b.feed("whole\n");
  a.feed("line\n");
  EXPECT_EQ(printed(), "[b] whole\n[a] half line\n");
}

TEST_F(LineOutput, PrintsCarriageReturnUpdatesAsLinesWithoutATerminal) {
  stitch_run::LineSink sink(fd());
  stitch_run::LineSplitter lines(sink, "[w] ");
  lines.feed("\r10%\r20%");
  lines.feed("\r30%\ndone\r\n");
  EXPECT_EQ(printed(), "[w] 10%\n[w] 20%\n[w] 30%\n[w] done\n");
}

}  // namespace
}  // namespace line_output_test
