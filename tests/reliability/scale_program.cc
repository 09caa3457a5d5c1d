// A world of many processes forked from this one, for scale_test.cc: `scale_program 128 [busy]`.
// They start together, meet in a barrier, gather, call the next one; rank 0 and ten others are
// killed, which all others notice; the rest leaves. Prints how long each step takes until the last
// worker has done it. `busy`: two further processes take all the time that they get.
#include <netinet/in.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/stitch.h"

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr const char* kSteps[] = {"init", "barrier", "all_gather", "call", "deaths", "leave"};
constexpr int kDeaths = 11;  // rank 0, and ten others

// In memory that all share.
struct Shared {
  // Of each step: counts the workers that may begin it, and have not.
  int go[6] = {event(), event(), event(), event(), event(), event()};
  static int event() { return ::eventfd(0, EFD_SEMAPHORE); }
  std::atomic<int> through[6]{};  // workers that have done a step
  std::atomic<bool> failed{false};
};

int add_one(int value) { return value + 1; }

bool is_killed(int rank, int size) {
  return rank % (size / kDeaths) == 0 && rank / (size / kDeaths) < kDeaths;
}

// Sleeps: hundreds of processes that look now and then would be the load that is measured.
void await_step(const Shared& shared, int step) {
  std::uint64_t one = 0;
  if (::read(shared.go[step], &one, sizeof(one)) != sizeof(one))
    throw std::runtime_error("no next step");
}

void run(int rank, int size, const std::string& store, Shared& shared) {
  const auto expect = [&](bool holds, const char* what) {
    if (!holds) throw std::runtime_error(what);
  };
  stitch::Options options;
  options.rank = rank;
  options.world_size = size;
  options.init_method = store;
  options.num_threads = 1;
  await_step(shared, 0);
  auto self = stitch::init(std::move(options));
  std::atomic<int> dead{0};
  const auto watch = self.on_leave([&](const stitch::WorkerInfo&, stitch::LeaveReason reason) {
    if (reason != stitch::LeaveReason::dead) return;
    ++dead;
    dead.notify_one();
  });
  ++shared.through[0];
  await_step(shared, 1);
  self.barrier();
  ++shared.through[1];
  await_step(shared, 2);
  const auto all = self.all_gather(rank);
  expect(static_cast<int>(all.size()) == size, "all_gather has not all values");
  for (const auto& [name, value] : all)
    expect(name == "worker" + std::to_string(value), "all_gather has another's value");
  ++shared.through[2];
  await_step(shared, 3);
  const auto& next = self.worker(stitch::WorkerId(static_cast<std::uint32_t>((rank + 1) % size)));
  expect(self.rpc_sync<add_one>(next, rank) == rank + 1, "wrong answer");
  ++shared.through[3];
  await_step(shared, 4);
  for (int count = dead; count < kDeaths; count = dead) dead.wait(count);
  ++shared.through[4];
  await_step(shared, 5);
  self.shutdown();
  ++shared.through[5];
}

[[noreturn]] void child(int rank, int size, const std::string& store, Shared& shared) {
  ::alarm(600);
  int status = 0;
  try {
    run(rank, size, store, shared);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%d: %s\n", rank, error.what());
    shared.failed = true;
    status = 1;
  }
  std::fflush(nullptr);
  ::_exit(status);
}

// A port that is free now.
int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (::bind(socket, reinterpret_cast<sockaddr*>(&address), length) != 0) std::exit(2);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  ::close(socket);
  return ntohs(address.sin_port);
}

}  // namespace

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 64;
  const bool busy = argc > 2 && std::string_view(argv[2]) == "busy";
  if (size < 2 * kDeaths) return 2;
  auto* const shared = new (::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared;
  const std::string store = "tcp://127.0.0.1:" + std::to_string(free_port());
  std::vector<pid_t> others;
  for (int i = 0; busy && i < 2; ++i) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::alarm(600);
      for (volatile unsigned spins = 0;; spins = spins + 1) {
      }
    }
    others.push_back(pid);
  }
  std::vector<pid_t> workers;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) child(rank, size, store, *shared);
    workers.push_back(pid);
  }
  bool good = true;
  for (int step = 0; step < 6 && good; ++step) {
    const auto began = Clock::now();
    int expected = size;
    if (step >= 4) expected -= kDeaths;
    for (int rank = 0; step == 4 && rank < size; ++rank) {
      if (!is_killed(rank, size)) continue;
      pid_t& pid = workers[static_cast<std::size_t>(rank)];
      ::kill(pid, SIGKILL);
      // Until it is gone it may take what lets another one begin.
      ::waitpid(std::exchange(pid, 0), nullptr, 0);
    }
    const auto may_begin = static_cast<std::uint64_t>(expected);
    if (::write(shared->go[step], &may_begin, sizeof(may_begin)) != sizeof(may_begin)) return 2;
    while (shared->through[step] < expected && !shared->failed && Clock::now() - began < 300s)
      std::this_thread::sleep_for(1ms);
    good = shared->through[step] == expected;
    std::printf("%s %.2f s\n", kSteps[step],
                std::chrono::duration<double>(Clock::now() - began).count());
    std::fflush(stdout);
  }
  if (!good) std::printf("failed\n");
  for (const pid_t pid : workers) {
    if (pid == 0) continue;
    if (!good) ::kill(pid, SIGKILL);
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (status != 0) good = false;
  }
  for (const pid_t pid : others) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  return good ? 0 : 1;
}
