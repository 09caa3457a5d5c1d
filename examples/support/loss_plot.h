#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

// Draws losses over training steps as an SVG picture: the raw values faintly, a running mean on
// top, one colour for each curve. Not thread-safe.
class LossPlot {
 public:
  explicit LossPlot(std::string title);

  // Adds a point to the curve called `curve`. Steps of one curve come in rising order; a loss that
  // is not finite is left out.
  void add(const std::string& curve, double step, double loss);

  [[nodiscard]] std::string svg() const;
  // Throws std::runtime_error naming the file if it cannot be written.
  void write(const std::filesystem::path& path) const;

 private:
  using Points = std::vector<std::pair<double, double>>;

  std::string title_;
  std::map<std::string, Points> curves_;
};
