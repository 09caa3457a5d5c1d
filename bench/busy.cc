#include "busy.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <stop_token>
#include <thread>

#include "cores.h"

namespace stitch_bench {

bool is_busy_kind(const std::string& kind) {
  const bool number =
      !kind.empty() && kind.size() < 4 &&
      std::all_of(kind.begin(), kind.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  return kind == "idle" || kind == "torch" || kind == "pinned" || number;
}

int competitors_of(const std::string& kind) {
  return std::isdigit(static_cast<unsigned char>(kind.front())) != 0 ? std::stoi(kind) : 0;
}

std::shared_ptr<void> begin_busy(const std::string& kind) {
  if (kind == "pinned") pin_to_core(0);
  if (kind != "torch") return nullptr;
  return std::make_shared<std::jthread>([](const std::stop_token& stop) {
    // OpenMP's number, which is this thread's own.
    at::set_num_threads(static_cast<int>(std::max(1U, std::thread::hardware_concurrency())));
    const auto values = at::ones({1 << 20});
    while (!stop.stop_requested()) static_cast<void>(at::sigmoid(values));
  });
}

void compete() {
  volatile std::uint64_t count = 0;
  for (;;) count = count + 1;
}

}  // namespace stitch_bench
