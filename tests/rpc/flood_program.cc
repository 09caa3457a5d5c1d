// A fast caller and a slow callee, for flood_test.cc: each watches its own memory. Arguments: what
// travels ("calls", "tensors", "tensors without a pool", "tensors of all sizes", "notify"), and for
// how many seconds. "replies" and "replies of coroutines": small calls whose results are large, and
// a caller that reads slowly.
#include <ATen/ATen.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/worker.h"

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Anonymous and shared memory of this process without what malloc keeps of freed memory, which is
// malloc's to return. Not the pages of files: code that a thread runs for the first time is several
// MiB of libtorch's, and the kernel's to drop.
std::size_t used_bytes() {
  std::ifstream file("/proc/self/status");
  std::size_t sum = 0;
  for (std::string name; file >> name;) {
    std::size_t kib = 0;
    if ((name == "RssAnon:" || name == "RssShmem:") && file >> kib) sum += kib << 10;
  }
  return sum - std::min(sum, ::mallinfo2().fordblks);
}

// The most memory that this process takes beyond what it took at first, until the end.
class Watch {
 public:
  Watch() = default;
  ~Watch() { finish(); }
  std::size_t finish() {
    done_ = true;
    if (thread_.joinable()) thread_.join();
    return most_;
  }

 private:
  const std::size_t first_ = used_bytes();
  std::atomic<bool> done_{false};
  std::atomic<std::size_t> most_{0};
  std::thread thread_{[this] {
    while (!done_) {
      const std::size_t now = used_bytes();
      most_ = std::max<std::size_t>(most_, now - std::min(now, first_));
      std::this_thread::sleep_for(10ms);
    }
  }};
};

std::atomic<bool> begun{false};
void begin() { begun = true; }
void take_text(const std::string&) { std::this_thread::sleep_for(1ms); }
void take_tensor(const at::Tensor&) { std::this_thread::sleep_for(20ms); }

at::Tensor make_tensor(std::int64_t bytes) { return at::ones({bytes}, at::kByte); }
// Those that wait here end together.
stitch::base::Mutex together_mutex;
std::vector<stitch::Promise<void>> together STITCH_GUARDED_BY(together_mutex);
stitch::Future<at::Tensor> make_tensor_later(std::int64_t bytes) {
  const stitch::Promise<void> promise;
  {
    const stitch::base::MutexLock lock(together_mutex);
    together.push_back(promise);
  }
  co_await promise.future();
  co_return make_tensor(bytes);
}
void end_together() {
  for (;; std::this_thread::sleep_for(200ms)) {
    std::vector<stitch::Promise<void>> ended;
    {
      const stitch::base::MutexLock lock(together_mutex);
      ended.swap(together);
    }
    for (const auto& each : ended) each.set_value();
  }
}

void report(const char* who, Watch& watch, std::chrono::seconds duration) {
  std::this_thread::sleep_for(duration);
  std::printf("%s %zu KiB\n", who, watch.finish() >> 10);
  std::fflush(stdout);
}

void flood(const std::string& what, std::chrono::seconds duration) {
  const std::string text(1024, 'x');
  // The sizes of a tensor in turn: all of 1 MiB, or from 20 KiB to 2 MiB, between those of blocks.
  std::vector<std::int64_t> sizes{1 << 20};
  if (what == "tensors of all sizes") {
    for (std::int64_t size = 20 << 10; size < 2 << 20; size += size / 3) sizes.push_back(size);
  }
  const auto tensor = at::ones({2 << 20}, at::kByte);
  stitch::rpc_sync<take_text>("worker1", text);
  stitch::rpc_sync<take_tensor>("worker1", tensor);
  stitch::rpc_sync<begin>("worker1");
  Watch watch;
  static std::atomic<int> failed{0}, made{0}, answered{0};
  std::thread([&what, text, tensor, sizes] {
    const auto count_failure = [](const auto& future) {
      future.on_ready([future] { failed += future.has_error() ? 1 : 0; });
    };
    for (;; ++made) {
      if (what == "notify") {
        stitch::notify<take_text>({.to = "worker1", .timeout = 300s}, text);
      } else if (what == "calls") {
        count_failure(stitch::rpc_async<take_text>({.to = "worker1", .timeout = 300s}, text));
      } else if (what.starts_with("replies")) {
        const stitch::TargetOptions to{.to = "worker1", .timeout = 300s};
        const auto reply = what == "replies" ? stitch::rpc_async<make_tensor>(to, 1 << 20)
                                             : stitch::rpc_async<make_tensor_later>(to, 1 << 20);
        // On the thread that reads.
        reply.on_ready([reply] {
          failed += reply.has_error() ? 1 : 0;
          std::this_thread::sleep_for(5ms);
          ++answered;
        });
        // So that waiting calls take little of the caller's own memory.
        while (made - answered > 300) std::this_thread::sleep_for(1ms);
      } else {
        const auto size = sizes[static_cast<std::size_t>(made * 7) % sizes.size()];
        count_failure(stitch::rpc_async<take_tensor>({.to = "worker1", .timeout = 300s},
                                                     tensor.narrow(0, 0, size).clone()));
      }
    }
  }).detach();
  std::this_thread::sleep_for(duration);
  std::printf("made %d, failed %d\n", made.load(), failed.load());
  report("caller", watch, 0s);
  _exit(0);  // what is queued at the slow one would take minutes
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) return 2;
  stitch::Options options;
  options.max_inflight_bytes = std::size_t{64} << 20;
  options.num_threads = 2;
  options.shutdown_timeout = std::chrono::seconds(1);
  const std::string what = argv[1];
  if (what == "tensors without a pool") options.receive_pool_bytes = 1;
  if (what == "replies of coroutines") options.max_inflight_calls = 16;  // of 1 MiB
  const auto self = stitch::init(options);
  const std::chrono::seconds duration(std::stoi(argv[2]));
  std::thread(&end_together).detach();
  if (self.rank() == 0) flood(what, duration);
  while (!begun) std::this_thread::sleep_for(1ms);
  Watch watch;
  report("callee", watch, duration - 1s);
  std::this_thread::sleep_for(3s);
  _exit(0);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
