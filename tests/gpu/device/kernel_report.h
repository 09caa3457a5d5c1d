#pragma once

#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace stitch::transport::gpu {

// What a run found: printed line by line as it comes, and as JSON.
class KernelReport {
 public:
  // From now on the file has all that was found so far, whole at any time: a run may be cut off.
  // Throws std::invalid_argument when it cannot be written.
  void keep_in(std::string file) {
    file_ = std::move(file);
    save();
  }
  void set(std::string_view name, const std::string& value) {
    add(facts_, name, "\"" + value + "\"");
    std::printf("%.*s: %s\n", static_cast<int>(name.size()), name.data(), value.c_str());
  }
  // `why` is empty where the check passed.
  void check(std::string_view name, const std::string& why) {
    if (!why.empty()) ++failures_;
    add(checks_, name, why.empty() ? "\"pass\"" : "\"fail: " + why + "\"");
    std::printf("%-4s %.*s%s%s\n", why.empty() ? "pass" : "FAIL", static_cast<int>(name.size()),
                name.data(), why.empty() ? "" : ": ", why.c_str());
    (void)std::fflush(stdout);
    save();
  }
  // `bytes`: read and written. The first figure is the copy that others are compared with.
  void figure(std::string_view name, double bytes, double seconds) {
    const double rate = bytes / seconds / 1e9;
    if (copy_rate_ == 0) copy_rate_ = rate;
    char text[160];
    (void)std::snprintf(text, sizeof text,
                        "{\"gb_per_s\": %.1f, \"microseconds\": %.1f, \"share_of_copy\": %.3f}",
                        rate, seconds * 1e6, rate / copy_rate_);
    add(figures_, name, text);
    std::printf("%-44.*s %9.1f GB/s  %10.1f us  %5.1f %% of a copy\n",
                static_cast<int>(name.size()), name.data(), rate, seconds * 1e6,
                100 * rate / copy_rate_);
    (void)std::fflush(stdout);
    save();
  }

  [[nodiscard]] int failures() const { return failures_; }
  [[nodiscard]] std::string json() const {
    return "{\n" + object("facts", facts_) + ",\n" + object("checks", checks_) + ",\n" +
           object("figures", figures_) + "\n}\n";
  }

 private:
  void save() const {
    if (file_.empty()) return;
    const std::string fresh = file_ + ".new";
    {
      std::ofstream out(fresh);
      out << json();
      if (!out.flush()) throw std::invalid_argument("cannot write " + fresh);
    }
    if (std::rename(fresh.c_str(), file_.c_str()) != 0)
      throw std::invalid_argument("cannot write " + file_);
  }
  using Lines = std::vector<std::string>;
  static void add(Lines& lines, std::string_view name, const std::string& value) {
    lines.push_back("    \"" + std::string(name) + "\": " + value);
  }
  static std::string object(const char* name, const Lines& lines) {
    std::string text = "  \"" + std::string(name) + "\": {";
    for (std::size_t i = 0; i < lines.size(); ++i) text += (i == 0 ? "\n" : ",\n") + lines[i];
    return text + "\n  }";
  }

  std::string file_;
  Lines facts_;
  Lines checks_;
  Lines figures_;
  double copy_rate_ = 0;
  int failures_ = 0;
};

}  // namespace stitch::transport::gpu
