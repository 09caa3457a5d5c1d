// Shutdown in every state that a world may be in, fixed or elastic: it returns within its limit and
// a second, without a word on stderr. Each state is repeated five times, in
// elastic worlds twice.
#include <signal.h>
#include <unistd.h>

#include <iostream>

#include "tests/support/forked_world.h"
#include "tests/support/world_test.h"

namespace shutdown_states_test {
namespace {

using namespace stitch::testing;
using Clock = std::chrono::steady_clock;

constexpr int kWorkers = 3;
constexpr auto kLimit = 5s;

constexpr int kRounds = 5, kElasticRounds = 2;

// Whether this process is a worker of an elastic world, which leaves alone.
bool g_elastic = false;

int one() { return 1; }
int sleep_a_little() {
  std::this_thread::sleep_for(10ms);
  return 1;
}
at::Tensor scale(at::Tensor x) { return x * 2; }
at::Tensor scale_slowly(at::Tensor x) {
  auto y = x * 2;
  if (y.requires_grad()) {
    y.register_hook([](const at::Tensor& gradient) {
      std::this_thread::sleep_for(20ms);
      return gradient;
    });
  }
  return y;
}
struct Counter {
  int value = 0;
  int add(int more) { return value += more; }
};

std::string next(const Worker& self) {
  return "worker" + std::to_string((self.rank() + 1) % kWorkers);
}

// All have come to this point: of an elastic world one might have left already.
void meet(Worker& self) {
  if (g_elastic) self.barrier({"worker0", "worker1", "worker2"});
}

// What a call, or a pass, may fail with when the worker that it is for leaves.
bool is_end_of_a_worker(const Error& error) {
  return error.code() == ErrorCode::shutting_down ||
         (g_elastic && error.code() == ErrorCode::disconnected);
}
bool ended_well(const Future<int>& call) {
  if (!call.ready()) return false;
  if (!call.has_error()) return true;
  return g_elastic && is_end_of_a_worker(error_of([&] { call.get(); }));
}

// Shuts down and returns whether that took no longer than it may.
bool in_time(Worker& self, std::chrono::nanoseconds limit = kLimit) {
  const auto start = Clock::now();
  self.shutdown({.graceful = true, .wait = limit, .timeout = limit});
  const auto took = Clock::now() - start;
  return took <= limit + 1s;
}

// The first `count` processes end well and silently.
void expect_good_ends(ForkedWorld& world, int count) {
  for (int rank = 0; rank < count; ++rank) {
    const auto outcome = world.wait(rank);
    EXPECT_EQ(outcome.status, 0) << "rank " << rank << ", signal " << outcome.signal;
    EXPECT_EQ(outcome.said, "") << "rank " << rank;
  }
}

struct State {
  const char* name;
  // On each worker, after init; returns whether all was well.
  bool (*run)(Worker& self);
};

bool idle(Worker& self) { return in_time(self); }

bool calls_in_flight(Worker& self) {
  std::vector<Future<int>> calls;
  for (int i = 0; i < 20; ++i) calls.push_back(self.rpc_async<sleep_a_little>(next(self)));
  const bool quick = in_time(self);
  return quick && std::all_of(calls.begin(), calls.end(), ended_well);
}

bool references_held(Worker& self) {
  std::vector<RRef<Counter>> held;
  for (int i = 0; i < 10; ++i) held.push_back(self.remote<Counter>(next(self)));
  held[0].rpc_sync<&Counter::add>(1);
  meet(self);
  return in_time(self);
}

bool open_context(Worker& self) {
  stitch::dist_autograd::Context context;
  auto x = torch::ones({4}, torch::requires_grad());
  auto loss = self.rpc_sync<scale>(next(self), x).sum();
  context.backward({loss});
  meet(self);
  return in_time(self);
}

bool pass_running(Worker& self) {
  std::atomic<bool> begun{false};
  std::atomic<bool> failed_well{true};
  std::thread thread([&] {
    const WorkerScope in(self);
    try {
      stitch::dist_autograd::Context context;
      auto x = torch::ones({4}, torch::requires_grad());
      auto loss = rpc_sync<scale_slowly>(next(self), x).sum();
      begun = true;
      context.backward({loss});
    } catch (const Error& error) {
      failed_well = is_end_of_a_worker(error);
      begun = true;
    }
  });
  while (!begun) std::this_thread::yield();
  meet(self);
  const bool quick = in_time(self);
  thread.join();
  return quick && failed_well;
}

bool called_twice(Worker& self) { return in_time(self) && in_time(self); }

bool called_by_two_threads(Worker& self) {
  bool other = false;
  std::thread thread([&] { other = in_time(self); });
  const bool quick = in_time(self);
  thread.join();
  return quick && other;
}

// The others shut down while worker 2 is gone.
bool a_peer_is_killed(Worker& self) {
  auto call = self.rpc_async<sleep_a_little>(next(self));
  if (self.rank() == 2) ::kill(::getpid(), SIGKILL);
  return in_time(self);
}

// On worker 1: worker 0 needs nothing of worker 2 any more, not even for meet().
std::atomic<bool> may_exit{false};
void let_it_exit() { may_exit = true; }
void exit_now() { std::_Exit(0); }
bool a_peer_exits(Worker& self) {
  static_cast<void>(self.rpc_sync<one>(next(self)));
  meet(self);
  if (self.rank() == 0) self.rpc_sync<let_it_exit>("worker1");
  if (self.rank() == 1) {
    if (!eventually([] { return may_exit.load(); })) return false;
    self.notify<exit_now>("worker2");  // which has answered its call
  }
  if (self.rank() == 2) {
    std::this_thread::sleep_for(30s);
    return false;
  }
  return in_time(self);
}

// On worker 0: worker 2 has answered its caller.
std::atomic<bool> may_stop{false};
void let_it_stop() { may_stop = true; }
void stop_now() { ::kill(::getpid(), SIGSTOP); }
bool a_peer_is_stopped(Worker& self) {
  static_cast<void>(self.rpc_sync<one>(next(self)));
  meet(self);
  if (self.rank() == 1) self.rpc_sync<let_it_stop>("worker0");
  if (self.rank() == 0) {
    if (!eventually([] { return may_stop.load(); })) return false;
    self.notify<stop_now>("worker2");
  }
  if (self.rank() == 2) {
    std::this_thread::sleep_for(30s);
    return false;  // the test kills it
  }
  return in_time(self);
}

// Nothing is delivered between worker 2 and the others from some moment on.
constexpr auto kPartitionAfter = 2s;
Clock::time_point partition_begins;
bool a_peer_is_partitioned(Worker& self) {
  static_cast<void>(self.rpc_sync<one>(next(self)));
  std::this_thread::sleep_until(partition_begins + 100ms);
  auto call = self.rpc_async<one>(next(self));
  return in_time(self) && call.ready();
}

class ShutdownStates : public ::testing::Test, public ::testing::WithParamInterface<State> {
 protected:
  static void run_rounds(State state, bool elastic);
};
class ElasticShutdownStates : public ShutdownStates {};

void ShutdownStates::run_rounds(State state, bool elastic) {
  const bool loses_one =
      state.run == a_peer_is_killed || state.run == a_peer_exits || state.run == a_peer_is_stopped;
  for (int round = 0; round < (elastic ? kElasticRounds : kRounds); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    ForkedWorld world(kWorkers, [state, elastic](Options options) {
      options.heartbeat_timeout = 1500ms;  // one that is stopped, or partitioned, is lost in time
      options.reconnect_timeout = 1s;
      options.num_threads = 2;
      g_elastic = elastic;
      if (elastic) options.world_size = stitch::WorldSize::range(kWorkers, kWorkers);
      if (state.run == a_peer_is_partitioned) {
        options.fault = "partition=worker2|worker0+worker1@2s";
        partition_begins = Clock::now() + kPartitionAfter;
      }
      auto self = stitch::init(std::move(options));
      return state.run(self) ? 0 : 1;
    });
    expect_good_ends(world, loses_one ? 2 : kWorkers);
    if (state.run == a_peer_is_stopped) world.signal(2, SIGKILL);
    if (loses_one) static_cast<void>(world.wait(2));
  }
}

TEST_P(ShutdownStates, ReturnsInTimeAndSilently) { run_rounds(GetParam(), false); }
TEST_P(ElasticShutdownStates, ReturnsInTimeAndSilently) { run_rounds(GetParam(), true); }

const auto kStates = ::testing::Values(
    State{"Idle", idle}, State{"CallsInFlight", calls_in_flight},
    State{"ReferencesHeld", references_held}, State{"OpenContext", open_context},
    State{"PassRunning", pass_running}, State{"CalledTwice", called_twice},
    State{"CalledByTwoThreads", called_by_two_threads}, State{"APeerIsKilled", a_peer_is_killed},
    State{"APeerExits", a_peer_exits}, State{"APeerIsStopped", a_peer_is_stopped},
    State{"APeerIsPartitioned", a_peer_is_partitioned});
const auto name_of = [](const auto& info) { return std::string(info.param.name); };
INSTANTIATE_TEST_SUITE_P(Each, ShutdownStates, kStates, name_of);
INSTANTIATE_TEST_SUITE_P(Each, ElasticShutdownStates, kStates, name_of);

// Workers that wait for one that never comes: init() fails in time, and what it has begun ends.
TEST(ShutdownStates, InitHalfDone) {
  for (int round = 0; round < kRounds; ++round) {
    ForkedWorld world(kWorkers, [](Options options) {
      if (options.rank == 2) return 0;
      options.init_timeout = 500ms;
      const auto start = Clock::now();
      try {
        const auto self = stitch::init(std::move(options));
        return 1;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::timeout) std::cerr << error.what();
        return Clock::now() - start < 2s ? 0 : 2;
      }
    });
    expect_good_ends(world, kWorkers);
  }
}

// Each worker calls the next one; returns on worker 2 when the calls to it are answered, too.
std::atomic<bool> may_leave{false};
void let_it_leave() { may_leave = true; }
void call_each_other(Worker& self) {
  static_cast<void>(self.rpc_sync<one>(next(self)));
  if (self.rank() == 1) self.notify<let_it_leave>("worker2");
  if (self.rank() == 2 && !eventually([] { return may_leave.load(); }))
    throw std::runtime_error("worker1 has not said that its call is answered");
}

// A worker whose process ends without shutdown(): the others end in time and silently.
TEST(ShutdownStates, ProcessExitWithoutIt) {
  for (int round = 0; round < kRounds; ++round) {
    ForkedWorld world(kWorkers, [](Options options) {
      const bool leaves = options.rank == 2;
      auto* self = new Worker(stitch::init(std::move(options)));
      call_each_other(*self);
      if (leaves) return 0;  // *self is never destroyed
      return in_time(*self) ? 0 : 1;
    });
    expect_good_ends(world, kWorkers);
  }
}

// Ends the process slowly, after its static objects are destroyed: as the libraries do when their
// destructors get little of a processor.
bool g_ends_slowly = false;
[[gnu::destructor]] void end_slowly() {
  if (g_ends_slowly) std::this_thread::sleep_for(kLimit + 2s);
}

TEST(ShutdownStates, ProcessExitThatTakesLongerThanTheLimit) {
  ForkedWorld world(kWorkers, [](Options options) {
    g_ends_slowly = options.rank == 2;
    auto* self = new Worker(stitch::init(std::move(options)));
    call_each_other(*self);
    if (g_ends_slowly) std::exit(0);  // *self is never destroyed
    return in_time(*self) ? 0 : 1;
  });
  expect_good_ends(world, kWorkers);
}

// A worker that is a static object leaves in order: the sockets end after it.
std::optional<Worker> g_static_worker;

TEST(ShutdownStates, AStaticWorkerLeavesInOrder) {
  ForkedWorld world(kWorkers, [](Options options) {
    g_static_worker.emplace(stitch::init(std::move(options)));
    call_each_other(*g_static_worker);
    return 0;
  });
  expect_good_ends(world, kWorkers);
}

TEST(ShutdownStates, AnExceptionLeavesMain) {
  for (int round = 0; round < kRounds; ++round) {
    ForkedWorld world(kWorkers, [](Options options) {
      const bool throws = options.rank == 2;
      auto self = stitch::init(std::move(options));
      call_each_other(self);
      if (throws) throw std::runtime_error("the program's own");
      return in_time(self) ? 0 : 1;
    });
    expect_good_ends(world, 2);
    const auto outcome = world.wait(2);
    EXPECT_EQ(outcome.signal, SIGABRT);
    EXPECT_TRUE(contains(outcome.said, "the program's own")) << outcome.said;
  }
}

}  // namespace
}  // namespace shutdown_states_test
