#include "examples/support/loss_plot.h"

#include <limits>

#include "tests/support/plain_test.h"

namespace loss_plot_test {
namespace {

std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size()))
    ++count;
  return count;
}

TEST(LossPlot, DrawsAxesWithRoundTicksAndALegend) {
  LossPlot plot("loss of <two> workers");
  for (int step = 0; step <= 400; ++step) {
    plot.add("worker1", step, 2.3 / (1 + 0.01 * step));
    plot.add("worker2", step, 2.2 / (1 + 0.01 * step));
  }
  const std::string svg = plot.svg();
  EXPECT_TRUE(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  for (const char* text : {">0<", ">50<", ">400<", ">0.5<", ">2.5<", ">step<", ">loss<",
                           ">worker1<", ">worker2<", ">loss of &lt;two&gt; workers<"}) {
    EXPECT_NE(svg.find(text), std::string::npos) << text;
  }
  // Two axes in one line, and for each curve its values and their mean.
  EXPECT_EQ(occurrences(svg, "<polyline"), 5u);
}

TEST(LossPlot, StaysSmallWithManyPoints) {
  LossPlot plot("long");
  for (int step = 0; step < 100000; ++step) plot.add("loss", step, 1.0);
  EXPECT_LT(plot.svg().size(), 60000u);
}

TEST(LossPlot, LeavesOutValuesThatAreNotFinite) {
  LossPlot plot("broken");
  plot.add("loss", 0, 1);
  plot.add("loss", 1, std::numeric_limits<double>::quiet_NaN());
  plot.add("loss", 2, std::numeric_limits<double>::infinity());
  const std::string svg = plot.svg();
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

TEST(LossPlot, IsAnEmptyFrameWithoutPoints) {
  EXPECT_TRUE(LossPlot("nothing").svg().ends_with("</svg>\n"));
}

TEST(LossPlot, NamesAFileItCannotWrite) {
  try {
    LossPlot("nowhere").write("/nonexistent/loss.svg");
    FAIL() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "cannot write \"/nonexistent/loss.svg\": No such file or directory");
  }
}

}  // namespace
}  // namespace loss_plot_test
