#include "support/progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace {

constexpr int kBarWidth = 30;
constexpr std::int64_t kPercentBetweenLines = 5;
constexpr std::chrono::milliseconds kBetweenRedraws{100};

std::string clock_time(double seconds) {
  const auto whole = static_cast<long>(std::ceil(seconds));
  std::array<char, 32> text{};
  if (whole >= 3600) {
    std::snprintf(text.data(), text.size(), "%ld:%02ld:%02ld", whole / 3600, whole / 60 % 60,
                  whole % 60);
  } else {
    std::snprintf(text.data(), text.size(), "%ld:%02ld", whole / 60, whole % 60);
  }
  return text.data();
}

std::size_t columns(std::FILE* out) {
  winsize size{};
  return ::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

ProgressBar::ProgressBar(std::int64_t total, std::FILE* out)
    : total_(std::max<std::int64_t>(1, total)),
      out_(out),
      terminal_(::isatty(::fileno(out)) == 1),
      start_(Clock::now()) {}

void ProgressBar::update(std::int64_t done, double loss) {
  done_ = std::clamp<std::int64_t>(done, 0, total_);
  loss_ = loss;
  const auto now = Clock::now();
  if (terminal_ ? now - printed_at_ >= kBetweenRedraws
                : done_ * 100 / total_ / kPercentBetweenLines != printed_percent_)
    print(now);
}

void ProgressBar::finish() {
  if (done_ != printed_done_) print(Clock::now());
  if (terminal_) {
    std::fputc('\n', out_);
    std::fflush(out_);
  }
}

void ProgressBar::print(Clock::time_point now) {
  std::string line = text(now);
  if (terminal_) {
    // A wrapped line could not be drawn over.
    line.resize(std::min(line.size(), columns(out_) - 1));
    std::fprintf(out_, "\r%s\033[K", line.c_str());
  } else {
    std::fprintf(out_, "%s\n", line.c_str());
  }
  std::fflush(out_);
  printed_at_ = now;
  printed_done_ = done_;
  printed_percent_ = done_ * 100 / total_ / kPercentBetweenLines;
}

std::string ProgressBar::text(Clock::time_point now) const {
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double rate = elapsed > 0 ? static_cast<double>(done_) / elapsed : 0;
  const std::string left = done_ == total_ ? clock_time(elapsed) + " in all"
                           : rate > 0
                               ? clock_time(static_cast<double>(total_ - done_) / rate) + " left"
                               : "-:-- left";
  const auto filled = static_cast<std::size_t>(done_ * kBarWidth / total_);
  const std::string bar = std::string(filled, '#') + std::string(kBarWidth - filled, '.');
  std::array<char, 160> text{};
  std::snprintf(text.data(), text.size(), "%3ld%% [%s] loss %.4f  %.0f images/s  %s",
                static_cast<long>(done_ * 100 / total_), bar.c_str(), loss_, rate, left.c_str());
  return text.data();
}
