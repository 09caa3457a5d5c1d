#include "stitch/dist_autograd/worker_colours.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <numbers>

namespace stitch::dist_autograd {

namespace {

struct Chosen {
  const char* strong;
  const char* middle;
  const char* light;
};
constexpr std::array<Chosen, 8> kChosen{{{"#1f5fa8", "#b9d3f0", "#f2f7fd"},
                                         {"#b3541e", "#f4cbb0", "#fdf5f0"},
                                         {"#2c7a3f", "#bfe3c6", "#f2faf4"},
                                         {"#7b3fa0", "#dfc6ee", "#f9f4fc"},
                                         {"#a3152f", "#f2bcc6", "#fdf2f4"},
                                         {"#0f7c80", "#b5e2e3", "#f0fafa"},
                                         {"#8a6d00", "#eddf9f", "#fcfaee"},
                                         {"#4d5968", "#ccd3db", "#f5f7f9"}}};

// In turn, so that workers whose hues are close differ in these. They and the first hue were found
// by trying, for a large distance between the first 48 and a contrast of 3 to white.
struct Shade {
  double saturation;
  double lightness;
  double middle_lightness;
};
constexpr std::array<Shade, 5> kShades{{{0.93, 0.21, 0.78},
                                        {0.60, 0.35, 0.82},
                                        {0.94, 0.31, 0.80},
                                        {0.52, 0.40, 0.84},
                                        {0.39, 0.38, 0.76}}};
constexpr double kFirstHue = 0.12;

// A colour by hue (in turns), saturation and lightness, each from 0 to 1.
std::string colour(double hue, double saturation, double lightness) {
  const double reach = saturation * std::min(lightness, 1 - lightness);
  const auto channel = [&](double offset) {
    const double at = std::fmod(offset + 12 * hue, 12);
    const double value = lightness - reach * std::max(-1.0, std::min({at - 3, 9 - at, 1.0}));
    return static_cast<std::uint8_t>(std::lround(255 * value));
  };
  std::array<char, 8> text;
  std::snprintf(text.data(), text.size(), "#%02x%02x%02x", channel(0), channel(8), channel(4));
  return text.data();
}

}  // namespace

WorkerColours colours_of(WorkerId worker) {
  const std::size_t number = worker.value();
  if (number < kChosen.size()) {
    const Chosen& chosen = kChosen[number];
    return {chosen.strong, chosen.middle, chosen.light};
  }
  // Steps of the golden ratio: each hue falls into the largest gap that those before it have left.
  const std::size_t computed = number - kChosen.size();
  const double turns = kFirstHue + static_cast<double>(computed) * (std::numbers::phi - 1);
  const double hue = turns - std::floor(turns);
  const Shade& shade = kShades[computed % kShades.size()];
  return {colour(hue, shade.saturation, shade.lightness), colour(hue, 0.6, shade.middle_lightness),
          colour(hue, 0.5, 0.965)};
}

}  // namespace stitch::dist_autograd
