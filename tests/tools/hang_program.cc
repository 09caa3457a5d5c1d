// One worker of a world that hangs on purpose, for diagnose_test.cc. The first argument says how.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>

#include "stitch/rpc/calls.h"
#include "stitch/rpc/worker.h"

using namespace std::chrono_literals;

std::mutex user_lock;

void sleep_long() { std::this_thread::sleep_for(120s); }

// What peers call. Their names are what the diagnosis has to say.
int quick() { return 1; }
void sleepy() { sleep_long(); }
void hold() { sleep_long(); }
void stop_itself() { raise(SIGSTOP); }
void locker() { const std::lock_guard lock(user_lock); }
bool lock_is_taken() {
  const std::unique_lock lock(user_lock, std::try_to_lock);
  return !lock.owns_lock();
}
void calls_back_and_locks() { stitch::rpc_sync<locker>("worker0"); }
stitch::Future<int> never() {
  static stitch::Promise<int> promise;
  return promise.future();
}
void step() { stitch::fault_step(); }

namespace {

// Both threads of worker1 are held by hold().
void hold_the_pool(std::vector<stitch::Future<void>>& held) {
  for (int i = 0; i < 2; ++i) held.push_back(stitch::rpc_async<hold>("worker1"));
  std::this_thread::sleep_for(300ms);  // they begin before what follows
}

// Calls worker1 until that fails; says how many calls were answered, and why the last was not.
int call_until_it_fails(const std::string& how, stitch::Worker& self) {
  if (self.rank() != 0) sleep_long();
  int answered = 0;
  try {
    for (; answered < 3'000; ++answered) {
      if (how == "steps") {
        stitch::rpc_sync<step>({.to = "worker1", .timeout = 5s});
      } else {
        stitch::rpc_sync<quick>({.to = "worker1", .timeout = 5s});
      }
    }
  } catch (const stitch::Error& error) {
    std::printf("%d answered, then %s\n", answered, std::string(to_string(error.code())).c_str());
    std::fflush(stdout);
    _exit(0);
  }
  std::printf("all answered\n");
  std::fflush(stdout);
  _exit(0);
}

// Has worker1 do 30 steps, those that fail again: it is started again meanwhile.
int step_over_a_restart(stitch::Worker& self) {
  if (self.rank() != 0) return 0;  // it serves until worker0 leaves
  bool failed = false;
  for (int steps = 0; steps < 30;) {
    try {
      stitch::rpc_sync<step>({.to = "worker1", .timeout = 5s});
      ++steps;
    } catch (const stitch::Error&) {
      failed = true;
      std::this_thread::sleep_for(10ms);
    }
  }
  std::printf("30 steps %s a restart\n", failed ? "over" : "without");
  return 0;
}

void hang(const std::string& how, stitch::Worker& self) {
  const int rank = self.rank();
  std::vector<stitch::Future<void>> held;
  if (how == "barrier") {
    if (rank == 2) sleep_long();
    self.barrier();
  }
  if (how == "shutdown" || how == "shutdown that times out") {
    if (rank == 0) held.push_back(stitch::rpc_async<hold>("worker1"));
    if (rank == 0) stitch::rpc_sync<quick>("worker1");
    if (how == "shutdown") self.shutdown();
    if (rank == 1) sleep_long();
    try {
      self.shutdown({.wait = 1s});
    } catch (const stitch::Error&) {
      sleep_long();  // it is looked at from outside
    }
  }
  if (how == "lock" && rank == 1) {
    const std::lock_guard lock(user_lock);
    sleep_long();
  }
  if (rank != 0) sleep_long();
  const std::unique_lock lock(user_lock);
  if (how == "circle of two") stitch::rpc_sync<calls_back_and_locks>("worker1");
  if (how == "sleeping handler") stitch::rpc_sync<sleepy>("worker1");
  if (how == "lock") {
    while (!stitch::rpc_sync<lock_is_taken>("worker1")) std::this_thread::sleep_for(10ms);
    stitch::rpc_sync<locker>("worker1");
  }
  if (how == "promise") stitch::rpc_sync<never>("worker1");
  if (how == "pool") {
    hold_the_pool(held);
    stitch::rpc_sync<quick>("worker1");
  }
  if (how == "stopped process") {
    stitch::rpc_sync<quick>("worker1");
    stitch::notify<stop_itself>("worker1");
    std::this_thread::sleep_for(300ms);
    stitch::rpc_sync<quick>("worker1");
  }
  if (how == "timeout") {
    try {
      stitch::rpc_sync<sleepy>({.to = "worker1", .timeout = 500ms});
    } catch (const stitch::Error&) {
      sleep_long();
    }
  }
  sleep_long();
}

}  // namespace

int main(int argc, char** argv) try {
  auto self = stitch::init();
  // From here on SIGUSR1 is taken.
  if (const char* dumps = std::getenv("STITCH_DUMP_DIR"))
    std::ofstream(std::string(dumps) + "/" + self.name() + ".started");
  const std::string how = argc > 1 ? argv[1] : "";
  if (how == "calls" || how == "steps") return call_until_it_fails(how, self);
  if (how == "steps over a restart") return step_over_a_restart(self);
  hang(how, self);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
