// What a caller sees when a function throws, a deadline passes or a call is cancelled.
//   stitch-run -n 2 errors_and_deadlines
#include <stitch/stitch.h>

#include <cmath>
#include <iostream>
#include <stdexcept>
#include <thread>

using namespace std::chrono_literals;

double square_root(double x) {
  if (x < 0) throw std::domain_error("square root of a negative number");
  return std::sqrt(x);
}

// [tutorial: stop]
// Works until its caller has given up: at the deadline of the call, or when it is cancelled.
void work() {
  const std::stop_token stop = stitch::current_stop_token();
  while (!stop.stop_requested()) std::this_thread::sleep_for(1ms);
}
// [tutorial: end]

// The deadline of the nested call is what is left of the deadline of this one.
void ask_to_work(std::string worker) { stitch::rpc_sync<work>(worker); }

void print(const stitch::Error& error) {
  std::cout << stitch::to_string(error.code()) << ": " << error.what() << std::endl;
}

int main() {
  auto self = stitch::init();
  if (self.rank() != 0) return 0;  // worker1 serves until all workers leave

  // [tutorial: error]
  try {
    stitch::rpc_sync<square_root>("worker1", -1);
  } catch (const stitch::Error& error) {
    if (error.code() != stitch::ErrorCode::remote_exception) throw;  // the code says what to do
    print(error);                                                    // the text is for people
  }
  // [tutorial: end]

  // [tutorial: deadline]
  try {
    stitch::rpc_sync<ask_to_work>({.to = "worker1", .timeout = 100ms}, "worker0");
  } catch (const stitch::Error& error) {
    print(error);  // "timeout: call ask_to_work() to worker "worker1" (id 1) timed out ..."
  }
  // [tutorial: end]

  // [tutorial: cancel]
  const stitch::Future<void> working = stitch::rpc_async<work>("worker1");
  working.cancel();        // completes the future, and asks the function to stop
  print(working.error());  // "cancelled: future was cancelled by its holder"
  // [tutorial: end]
}
