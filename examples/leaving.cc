// How a world ends: what is in flight is finished first, and every worker leaves within a limit.
//   stitch-run -n 2 leaving
#include <stitch/stitch.h>

#include <atomic>
#include <iostream>
#include <string>

using namespace std::chrono_literals;

std::atomic<int> notes{0};

// Counts a note here and sends the next one back: one-way calls, which no worker waits for.
void pass_note(int left, std::string here, std::string other) {
  ++notes;
  if (left > 1) stitch::notify<pass_note>(other, left - 1, other, here);
}

int main() {
  auto self = stitch::init();
  if (self.rank() == 0) stitch::notify<pass_note>("worker1", 200, "worker1", "worker0");

  // [tutorial: shutdown]
  try {
    // Waits until all workers leave (10 s at most), and until nothing is in flight.
    self.shutdown({.wait = 10s});
  } catch (const stitch::Error& error) {
    std::cerr << error.what() << std::endl;  // names the workers that did not leave in time
    return 1;
  }
  std::cout << "notes received: " << notes << std::endl;  // 100 on each worker
  // [tutorial: end]

  // [tutorial: after]
  try {
    stitch::notify<pass_note>("worker1", 1, "worker1", "worker0");
  } catch (const stitch::Error& error) {
    std::cout << stitch::to_string(error.code()) << ": " << error.what() << std::endl;
  }
  // [tutorial: end]
}
