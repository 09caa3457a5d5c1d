#include "support/loss_plot.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string_view>

namespace {

constexpr double kWidth = 800;
constexpr double kHeight = 480;
constexpr double kLeft = 70;
constexpr double kRight = 20;
constexpr double kTop = 46;
constexpr double kBottom = 54;
// More points than pixels draw nothing new.
constexpr std::size_t kMaxPoints = 800;
constexpr std::array<const char*, 6> kColors{"#1f77b4", "#d62728", "#2ca02c",
                                             "#9467bd", "#ff7f0e", "#17becf"};

std::string number(double value, const char* format = "%.6g") {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

std::string pixels(double value) { return number(value, "%.1f"); }

std::string escaped(std::string_view text) {
  std::string result;
  for (char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

// One axis: from values to pixels, with round numbers as ticks.
struct Axis {
  double low = 0;
  double high = 1;
  double step = 1;
  double first_pixel = 0;
  double last_pixel = 1;

  // Covers `low` to `high` with about `ticks` steps of 1, 2 or 5 times a power of ten.
  static Axis around(double low, double high, int ticks, double first_pixel, double last_pixel) {
    if (!(high > low)) high = low + (low != 0 ? std::abs(low) : 1);
    const double rough = (high - low) / ticks;
    const double power = std::pow(10, std::floor(std::log10(rough)));
    double step = 10 * power;
    for (double factor : {1., 2., 5.}) {
      if (factor * power >= rough) {
        step = factor * power;
        break;
      }
    }
    return {std::floor(low / step) * step, std::ceil(high / step) * step, step, first_pixel,
            last_pixel};
  }

  [[nodiscard]] double pixel(double value) const {
    return first_pixel + (value - low) / (high - low) * (last_pixel - first_pixel);
  }
  [[nodiscard]] int tick_count() const {
    return static_cast<int>(std::lround((high - low) / step)) + 1;
  }
  [[nodiscard]] double tick(int i) const {
    const double value = low + i * step;
    return std::abs(value) < step * 1e-9 ? 0 : value;
  }
};

// Averages neighbours until few enough points are left.
template <class Points>
Points thinned(const Points& points) {
  const std::size_t group = (points.size() + kMaxPoints - 1) / kMaxPoints;
  if (group <= 1) return points;
  Points result;
  for (std::size_t i = 0; i < points.size(); i += group) {
    const std::size_t end = std::min(i + group, points.size());
    double sum = 0;
    for (std::size_t j = i; j < end; ++j) sum += points[j].second;
    result.emplace_back(points[(i + end - 1) / 2].first, sum / static_cast<double>(end - i));
  }
  return result;
}

template <class Points>
Points smoothed(const Points& points) {
  // A mean over the last 2 % of the curve.
  const std::size_t window = std::max<std::size_t>(1, points.size() / 50);
  Points result;
  double sum = 0;
  for (std::size_t i = 0; i < points.size(); ++i) {
    sum += points[i].second;
    if (i >= window) sum -= points[i - window].second;
    result.emplace_back(points[i].first, sum / static_cast<double>(std::min(i + 1, window)));
  }
  return result;
}

template <class Points>
std::string polyline(const Points& points, const Axis& x, const Axis& y, const std::string& color,
                     const std::string& style) {
  std::string text = "<polyline fill=\"none\" stroke=\"" + color + "\" " + style + " points=\"";
  for (const auto& [step, loss] : points)
    text += pixels(x.pixel(step)) + "," + pixels(y.pixel(loss)) + " ";
  return text + "\"/>\n";
}

std::string label(double x, double y, const std::string& attributes, std::string_view text) {
  return "<text x=\"" + pixels(x) + "\" y=\"" + pixels(y) + "\" " + attributes + ">" +
         escaped(text) + "</text>\n";
}

}  // namespace

LossPlot::LossPlot(std::string title) : title_(std::move(title)) {}

void LossPlot::add(const std::string& curve, double step, double loss) {
  if (std::isfinite(loss)) curves_[curve].emplace_back(step, loss);
}

std::string LossPlot::svg() const {
  double last_step = 0;
  double highest = 0;
  double lowest = 0;
  for (const auto& [name, points] : curves_) {
    for (const auto& [step, loss] : points) {
      last_step = std::max(last_step, step);
      highest = std::max(highest, loss);
      lowest = std::min(lowest, loss);
    }
  }
  const Axis x = Axis::around(0, last_step, 8, kLeft, kWidth - kRight);
  const Axis y = Axis::around(lowest, highest, 6, kHeight - kBottom, kTop);

  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + number(kWidth) +
                    " " + number(kHeight) + "\" width=\"" + number(kWidth) + "\" height=\"" +
                    number(kHeight) + "\" font-family=\"sans-serif\" font-size=\"13\">\n";
  svg += "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  svg += label(kWidth / 2, 26, "text-anchor=\"middle\" font-size=\"17\"", title_);
  for (int i = 0; i < x.tick_count(); ++i) {
    const double at = x.pixel(x.tick(i));
    svg += "<line x1=\"" + pixels(at) + "\" y1=\"" + pixels(kTop) + "\" x2=\"" + pixels(at) +
           "\" y2=\"" + pixels(kHeight - kBottom) + "\" stroke=\"#e5e5e5\"/>\n";
    svg += label(at, kHeight - kBottom + 18, "text-anchor=\"middle\"", number(x.tick(i)));
  }
  for (int i = 0; i < y.tick_count(); ++i) {
    const double at = y.pixel(y.tick(i));
    svg += "<line x1=\"" + pixels(kLeft) + "\" y1=\"" + pixels(at) + "\" x2=\"" +
           pixels(kWidth - kRight) + "\" y2=\"" + pixels(at) + "\" stroke=\"#e5e5e5\"/>\n";
    svg += label(kLeft - 8, at + 4, "text-anchor=\"end\"", number(y.tick(i)));
  }
  svg += "<polyline fill=\"none\" stroke=\"black\" points=\"" + pixels(kLeft) + "," + pixels(kTop) +
         " " + pixels(kLeft) + "," + pixels(kHeight - kBottom) + " " + pixels(kWidth - kRight) +
         "," + pixels(kHeight - kBottom) + "\"/>\n";
  svg += label((kLeft + kWidth - kRight) / 2, kHeight - 12, "text-anchor=\"middle\"", "step");
  const double middle = (kTop + kHeight - kBottom) / 2;
  svg +=
      label(18, middle,
            "text-anchor=\"middle\" transform=\"rotate(-90 18 " + pixels(middle) + ")\"", "loss");

  std::size_t index = 0;
  for (const auto& [name, points] : curves_) {
    const std::string color = kColors[index % kColors.size()];
    svg += polyline(thinned(points), x, y, color, "stroke-width=\"1\" stroke-opacity=\"0.3\"");
    svg += polyline(thinned(smoothed(points)), x, y, color, "stroke-width=\"2\"");
    const double at = kTop + 16 + 20 * static_cast<double>(index);
    svg += "<line x1=\"" + pixels(kWidth - kRight - 170) + "\" y1=\"" + pixels(at) + "\" x2=\"" +
           pixels(kWidth - kRight - 145) + "\" y2=\"" + pixels(at) + "\" stroke=\"" + color +
           "\" stroke-width=\"2\"/>\n";
    svg += label(kWidth - kRight - 138, at + 4, "", name);
    ++index;
  }
  return svg + "</svg>\n";
}

void LossPlot::write(const std::filesystem::path& path) const {
  errno = 0;
  std::ofstream file(path);
  file << svg();
  file.close();
  if (!file)
    throw std::runtime_error("cannot write \"" + path.string() +
                             "\": " + std::strerror(errno != 0 ? errno : EIO));
}
