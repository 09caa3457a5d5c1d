// One worker of a world of processes, for process_test.cc. The first argument says what it does.
#include <ATen/ATen.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <clocale>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <locale>
#include <string>
#include <thread>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/calls.h"
#include "stitch/rpc/worker.h"

namespace {

using namespace std::chrono_literals;

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
int unity() { return 1; }
void die() { kill(getpid(), SIGKILL); }
void sleep_until_stopped() {
  const auto token = stitch::current_stop_token();
  for (int i = 0; i < 3000 && !token.stop_requested(); ++i)
    std::this_thread::sleep_for(10ms);  // a handler that takes its time
}

// Every worker calls every other, with tensors inside and beside the frame.
int all_call(const stitch::Worker& self) {
  for (const auto& peer : self.workers()) {
    for (const std::int64_t size : {1, 5'000, 3'000'000}) {
      const auto sum = stitch::rpc_sync<add>(peer, at::ones({size}), at::ones({size}));
      if (!at::equal(sum, at::full({size}, 2.0))) return 1;
    }
  }
  if (self.rank() == 0) std::printf("all workers have called\n");
  return 0;
}

// A child that neither execs nor ends holds what it has inherited for longer than any time limit.
void die_and_leave_a_child() {
  if (fork() == 0) {
    for (const int fd : {0, 1, 2}) close(fd);  // what reads our output must not wait for it
    sleep(10);
    _exit(0);
  }
  die();
}

// Worker 1 dies in the middle of a call; everything else goes on.
template <auto Die>
int survive_a_death(const stitch::Worker& self) {
  if (self.rank() != 0) {
    if (self.rank() == 1) std::this_thread::sleep_for(20s);  // killed long before
    return 0;
  }
  auto pending = stitch::rpc_async<sleep_until_stopped>("worker1");
  stitch::rpc_sync<unity>("worker1");
  const auto start = std::chrono::steady_clock::now();
  stitch::notify<Die>("worker1");
  try {
    pending.get();
    return 1;
  } catch (const stitch::Error& error) {
    std::printf("%s after %s: %s\n", std::string(to_string(error.code())).c_str(),
                std::chrono::steady_clock::now() - start < 2s ? "less than 2 s" : "too long",
                error.what());
  }
  std::printf("worker2 answers %d\n", stitch::rpc_sync<unity>("worker2"));
  return 0;
}

// Whether this worker still counts worker 1 as a member, for up to 10 s.
bool hears_that_worker1_is_dead() {
  const auto agent = stitch::rpc::current_agent();
  const auto end = std::chrono::steady_clock::now() + 10s;
  while (std::chrono::steady_clock::now() < end) {
    bool member = false;
    for (const auto& info : agent->live_members()) member = member || info.id.value() == 1;
    if (!member) return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

// Worker 1 finds out what has become of it: prints why its calls fail.
int be_stopped() {
  const auto end = std::chrono::steady_clock::now() + 30s;
  std::string last;
  while (std::chrono::steady_clock::now() < end) {
    try {
      stitch::rpc_sync<unity>("worker0");
    } catch (const stitch::Error& error) {
      last = error.what();
      if (last.find("was declared dead") != std::string::npos) {
        std::printf("its call fails: %s\n", last.c_str());
        return 0;
      }
    }
    std::this_thread::sleep_for(50ms);
  }
  std::printf("it was told nothing: %s\n", last.c_str());
  return 1;
}

int process_id() { return getpid(); }

// Whether a process has not ended yet.
bool runs(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  const std::string stat{std::istreambuf_iterator<char>(file), {}};
  const auto name_end = stat.rfind(')');
  return name_end != std::string::npos && stat.compare(name_end, 3, ") Z") != 0;
}

// Worker 1 is stopped in the middle of a call, and goes on when all others have heard its verdict.
int survive_a_stop(const stitch::Worker& self) {
  if (self.rank() == 1) return be_stopped();
  if (self.rank() == 2) return hears_that_worker1_is_dead() ? 0 : 1;
  const pid_t process = stitch::rpc_sync<process_id>("worker1");
  stitch::rpc_sync<unity>("worker2");
  auto pending = stitch::rpc_async<sleep_until_stopped>("worker1");
  std::this_thread::sleep_for(100ms);
  const auto start = std::chrono::steady_clock::now();
  kill(process, SIGSTOP);
  try {
    pending.get();
    return 1;
  } catch (const stitch::Error& error) {
    const auto after = std::chrono::steady_clock::now() - start;
    std::printf("%s after %s: %s\n", std::string(to_string(error.code())).c_str(),
                after < 2500ms ? "less than 2.5 s" : "too long", error.what());
    std::printf("noticed after %d ms\n", static_cast<int>(after / 1ms));
  }
  std::printf("worker2 answers %d\n", stitch::rpc_sync<unity>("worker2"));
  const bool heard = hears_that_worker1_is_dead();
  std::printf("verdict after %d ms\n",
              static_cast<int>((std::chrono::steady_clock::now() - start) / 1ms));
  kill(process, SIGCONT);
  // It is to find this worker, which tells it.
  const auto end = std::chrono::steady_clock::now() + 30s;
  while (runs(process) && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(20ms);
  return heard ? 0 : 1;
}

int throughput(const stitch::Worker& self) {
  if (self.rank() != 0) return 0;
  std::vector<stitch::Future<int>> futures;
  for (int i = 0; i < 5'000; ++i) futures.push_back(stitch::rpc_async<unity>("worker1"));
  for (auto& future : futures) future.get();
  std::printf("5000 calls answered\n");
  return 0;
}

// Children of a process that was a worker once are workers of their own, told apart though they
// were forked.
int forked_children_call_each_other(const std::string& file) {
  { const auto alone = stitch::init({.rank = 0, .world_size = 1}); }
  pid_t children[2] = {};
  for (int rank = 0; rank < 2; ++rank) {
    children[rank] = fork();
    if (children[rank] != 0) continue;
    int status = 1;
    try {
      const auto self = stitch::init({.rank = rank,
                                      .world_size = 2,
                                      .init_method = "file://" + file,
                                      .rpc_timeout = 10s,
                                      .shutdown_timeout = 10s});
      const auto other = stitch::rpc_sync<process_id>(stitch::WorkerId(rank == 0 ? 1 : 0));
      status = other != getpid() && other != getppid() ? 0 : 1;
      if (status != 0) std::fprintf(stderr, "a forked worker called itself\n");
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    _exit(status);
  }
  bool good = true;
  for (const pid_t child : children) {
    int status = -1;
    good = waitpid(child, &status, 0) == child && status == 0 && good;
  }
  if (good) std::printf("the children have called each other\n");
  return good ? 0 : 1;
}

std::int64_t elements(at::Tensor tensor) { return tensor.numel(); }
at::Tensor zeros(std::int64_t count) { return at::zeros({count}, at::kByte); }
// This process may map so many bytes more.
bool limit_memory(std::int64_t more) {
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const auto bytes = static_cast<rlim_t>(pages * 4096 + more);
  const rlimit limit{bytes, bytes};
  return ::setrlimit(RLIMIT_AS, &limit) == 0;
}
// Worker 1 asks for what it cannot hold.
bool fetch_too_much(std::int64_t count) {
  try {
    static_cast<void>(stitch::rpc_sync<zeros>("worker0", count));
    return false;
  } catch (const stitch::Error& error) {
    std::printf("fetching: %s\n", error.what());
    return error.code() == stitch::ErrorCode::overloaded;
  }
}

// A message that its receiver cannot hold fails its own call and no other.
int outgrow_the_memory(const stitch::Worker& self) {
  constexpr std::int64_t kSome = std::int64_t{1} << 20, kMuch = std::int64_t{400} << 20;
  if (self.rank() == 1) return 0;  // serves
  if (!stitch::rpc_sync<limit_memory>("worker1", kMuch / 2)) return 1;
  int right = 0;
  for (int round = 0; round < 3; ++round) {
    right += stitch::rpc_sync<elements>("worker1", zeros(kSome)) == kSome ? 1 : 0;
    try {
      static_cast<void>(stitch::rpc_sync<elements>("worker1", zeros(kMuch)));
    } catch (const stitch::Error& error) {
      std::printf("sending: %s\n", error.what());
      right += error.code() == stitch::ErrorCode::overloaded ? 1 : 0;
    }
    right += stitch::rpc_sync<fetch_too_much>("worker1", kMuch) ? 1 : 0;
    right += stitch::rpc_sync<elements>("worker1", zeros(kSome)) == kSome ? 1 : 0;
  }
  const auto reconnects = self.debug_info().at("rpc.reconnects");
  std::printf("%d of 12, %d connections made again\n", right, static_cast<int>(reconnects));
  return 0;
}

}  // namespace

namespace {

// 1.234,5: as in many countries.
class Punctuation : public std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

// Until it is asked to stop; the file says that it serves.
int serve_until_stopped(const stitch::Worker& self, const std::string& file) {
  std::ofstream(file + std::to_string(self.rank())) << "ready\n";
  stitch::wait_for_stop();
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "another locale") {
    std::setlocale(LC_ALL, "");
    std::locale::global(std::locale(std::locale(), new Punctuation));
  }
  if (what == "forks") return forked_children_call_each_other(argv[2]);
  const auto self = stitch::init();
  if (what == "calls") return all_call(self);
  if (what == "another locale") {
    static_cast<void>(self.dump(argv[2]));
    return all_call(self);
  }
  if (what == "serves") return serve_until_stopped(self, argv[2]);
  if (what == "death") return survive_a_death<die>(self);
  if (what == "death with a child") return survive_a_death<die_and_leave_a_child>(self);
  if (what == "stop") return survive_a_stop(self);
  if (what == "memory") return outgrow_the_memory(self);
  if (what == "throughput") return throughput(self);
  if (what == "nothing") return 0;
  std::fprintf(stderr, "unknown: %s\n", what.c_str());
  return 2;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
