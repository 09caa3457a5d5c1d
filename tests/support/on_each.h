#pragma once

#include <thread>
#include <vector>

namespace stitch::testing {

// Runs `work` for 0 to `count` - 1, each on a thread of its own, until all have ended.
template <class Work>
void on_each(int count, const Work& work) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&work, i] { work(i); });
}

}  // namespace stitch::testing
