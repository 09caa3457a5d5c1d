// Whatever allocation fails: the call that it belongs to succeeds or fails with an error,
// nothing hangs or ends the process, what follows works, and nothing stays behind.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/dist_optim/backward_and_step.h"
#include "stitch/dist_optim/distributed_optimizer.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/worker.h"
#include "stitch/rref/rref.h"
#include "tests/support/cluster.h"
#include "tests/support/eventually.h"
#include "tests/support/failing_memory.h"

namespace stitch::testing {
namespace {

using namespace std::chrono_literals;

// The two workers. Their names do not fit into a std::string itself, so copies of them allocate.
constexpr const char* kHere = "worker0-on-host-a";
constexpr const char* kThere = "worker1-on-host-b";
Options& name_worker(Options& options) {
  options.name = options.rank == 0 ? kHere : kThere;
  return options;
}

// ---- what is called

int twice(int x) { return 2 * x; }
std::string repeat(const std::string& text) { return text + text; }
at::Tensor plus_one(at::Tensor x) { return x + 1; }
int twice_there(int x) { return 2 * rpc_sync<twice>(kHere, x); }
Future<int> twice_later(int x) { co_return co_await rpc_async<twice>(kHere, x) + 1; }
std::atomic<int> noted{0};
void note(int) { ++noted; }

int until_stopped(int milliseconds) {
  const auto stop = current_stop_token();
  for (int i = 0; i < milliseconds && !stop.stop_requested(); ++i) std::this_thread::sleep_for(1ms);
  return 0;
}

class Counter {
 public:
  explicit Counter(int start) : value_(start) {}
  int add(int by) { return value_ += by; }

 private:
  std::atomic<int> value_;
};
int make_number(int x) { return x; }
int no_such_row(int) { throw std::out_of_range("there is no row of that number in the table"); }
int use(RRef<Counter> counter) { return counter.rpc_sync<&Counter::add>(1); }
RRef<Counter> pass_back(RRef<Counter> counter) { return counter; }
int add_up(int a, int b) { return a + b; }
at::Tensor times(at::Tensor x) {
  static const at::Tensor parameter = at::full({3}, 2.0, at::kDouble).requires_grad_();
  return x * parameter;
}

class Layer {
 public:
  RRef<at::Tensor> weight() const { return make_rref(weight_); }
  at::Tensor times(const at::Tensor& x) { return weight_ * x; }

 private:
  const at::Tensor weight_ = at::full({3}, 2.0, at::kDouble).requires_grad_();
};

// ---- how it is looked at

void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

// What is under way on the workers, or was left there; empty if nothing.
std::string left_behind(Cluster& cluster) {
  static const char* const kNames[] = {"rpc.calls_made",
                                       "rpc.calls_served",
                                       "rpc.calls_waiting",
                                       "rpc.control_bytes",
                                       "rpc.incoming_bytes",
                                       "rpc.outgoing_bytes",
                                       "rpc.pool_queue",
                                       "rref.bytes_known",
                                       "rref.creditors",
                                       "rref.entries",
                                       "rref.entries_waiting_calls",
                                       "rref.holders",
                                       "rref.holds",
                                       "rref.ledger_unsent",
                                       "rref.pins",
                                       "rref.ordered_calls_waiting",
                                       "rref.ordered_handles",
                                       "dist_autograd.passes",
                                       "dist_autograd.contexts",
                                       "dist_autograd.links",
                                       "dist_autograd.gradients"};
  std::string left;
  std::int64_t under_way = 0;
  for (int rank = 0; rank < cluster.size(); ++rank) {
    const auto numbers = cluster[rank].debug_info();
    const auto add = [&](const std::string& name, std::int64_t number) {
      if (number != 0)
        left += " worker" + std::to_string(rank) + " " + name + "=" + std::to_string(number);
    };
    for (const char* name : kNames) add(name, numbers.at(name));
    for (const auto& [name, number] : numbers) {
      if (name.starts_with("rpc.peer.") && !name.ends_with(".calls_sent") &&
          !name.ends_with(".calls_sent_bytes"))
        add(name, number);
    }
    under_way += numbers.at("rpc.messages_sent") - numbers.at("rpc.messages_received");
  }
  if (under_way != 0) left += " messages=" + std::to_string(under_way);
  return left;
}

// Ends the test program when it is not told of the end of a step for long.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::seconds limit)
      : thread_([this, limit](const std::stop_token& stop) {
          std::uint64_t known = steps_;
          auto since = std::chrono::steady_clock::now();
          while (!stop.stop_requested()) {
            std::this_thread::sleep_for(50ms);
            const auto now = std::chrono::steady_clock::now();
            if (std::exchange(known, steps_.load()) != steps_.load()) since = now;
            if (now - since < limit) continue;
            std::fprintf(stderr, "no end after %lld s; this allocation had failed:\n",
                         static_cast<long long>(limit.count()));
            FailingMemory::print_where();
            std::abort();
          }
        }) {}
  void step() { ++steps_; }

 private:
  std::atomic<std::uint64_t> steps_{0};
  std::jthread thread_;
};

struct Case {
  const char* name;
  void (*run)();
  // Until everything is over. A ledger whose message found no memory is sent again after a second.
  std::chrono::milliseconds limit = 2s;
};
constexpr std::chrono::milliseconds kWithLedgers = 3500ms;
void PrintTo(const Case& each, std::ostream* out) { *out << each.name; }

class Memory : public ::testing::TestWithParam<Case> {
 protected:
  static std::unique_ptr<Cluster> make_cluster() {
    return std::make_unique<Cluster>(2, [](Options& options) {
      name_worker(options).rpc_timeout = 4s;  // what is lost ends then, and is found
    });
  }
  // That everything works; what fails is thrown.
  static void look(Cluster& cluster) {
    require(rpc_sync<twice>(kThere, 2) == 4, "wrong result there");
    require(cluster[1].rpc_sync<twice>(kHere, 3) == 6, "wrong result here");
    require(rpc_sync<twice>(kHere, 4) == 8, "wrong result of its own");
  }
  void run_with(std::int64_t failures) {
    const UnfailingMemory scaffold;
    std::set_terminate([] {
      std::fprintf(stderr, "the process ends; this allocation had failed:\n");
      FailingMemory::print_where();
      std::abort();
    });
    Watchdog watchdog(30s);
    auto cluster = make_cluster();
    GetParam().run();
    look(*cluster);
    int broken = 0;
    std::map<std::string, int> outcomes;
    for (std::int64_t first = 1; broken < 5; ++first) {
      watchdog.step();
      ASSERT_LT(first, 20'000);
      std::string problem;
      FailingMemory::begin(first, failures);
      std::thread([&] {
        const WorkerScope scope((*cluster)[0]);
        try {
          GetParam().run();
          ++outcomes["succeeded"];
        } catch (const std::logic_error& wrong) {
          problem = wrong.what();
        } catch (const std::exception& error) {
          const UnfailingMemory own;
          const std::string text = error.what();
          ++outcomes[text];
          if (dynamic_cast<const Error*>(&error) != nullptr &&
              (dynamic_cast<const Error&>(error).code() == ErrorCode::disconnected ||
               dynamic_cast<const Error&>(error).code() == ErrorCode::timeout))
            problem = text;
        }
      }).join();
      const bool over = eventually([&] { return left_behind(*cluster).empty(); }, GetParam().limit);
      const std::int64_t failed = FailingMemory::end();
      if (!over) problem += "left:" + left_behind(*cluster);
      try {
        look(*cluster);
      } catch (const std::exception& error) {
        problem += std::string("; afterwards: ") + error.what();
      }
      if (!problem.empty()) {
        ++broken;
        ADD_FAILURE() << "allocation " << first << ": " << problem;
        FailingMemory::print_where();
        static_cast<void>(cluster->shutdown());
        cluster = make_cluster();
        GetParam().run();
      }
      if (failed == 0) break;
    }
    for (const auto& [text, count] : outcomes) std::printf("%5d  %s\n", count, text.c_str());
    watchdog.step();
  }
};

void backward(dist_autograd::Mode mode) {
  dist_autograd::Context context;
  const at::Tensor x = at::ones({3}, at::kDouble).requires_grad_();
  const at::Tensor loss = rpc_sync<times>(kThere, x * 3).sum();
  context.backward({loss}, {.mode = mode});
  require(at::equal(context.gradient(x), at::full({3}, 6.0, at::kDouble)), "wrong gradient");
}

// A pass that is given up while it runs, or after it.
void backward_cancelled() {
  dist_autograd::Context context;
  const at::Tensor x = at::ones({3}, at::kDouble).requires_grad_();
  const auto future = context.backward_async({rpc_sync<times>(kThere, x).sum()});
  future.cancel();
  require(future.ready(), "it is not over");
}

// One on a thread whose guards must not reach the messages that it handles meanwhile.
void backward_under_guards() {
  dist_autograd::Context context;
  const at::Tensor x = at::ones({3}, at::kDouble).requires_grad_();
  const at::Tensor loss = rpc_sync<times>(kThere, x * 3).sum();
  const torch::NoGradGuard no_grad;
  context.backward({loss});
  require(at::equal(context.gradient(x), at::full({3}, 6.0, at::kDouble)), "wrong gradient");
}

// What a step of gradient 3 and rate 0.5 leaves of a weight of 2.
void require_stepped(const RRef<at::Tensor>& weight) {
  require(at::equal(weight.to_here().detach(), at::full({3}, 0.5, at::kDouble)), "wrong step");
}

void step(bool at_once) {
  const auto layer = remote<Layer>(kThere);
  const auto weight = layer.rpc_sync<&Layer::weight>();
  optim::DistributedOptimizer<torch::optim::SGD> optimizer({weight}, torch::optim::SGDOptions(0.5));
  dist_autograd::Context context;
  const at::Tensor x = at::full({3}, 3.0, at::kDouble);
  const at::Tensor loss = layer.rpc_sync<&Layer::times>(x).sum();
  if (at_once) {
    optim::backward_and_step(context, {loss}, optimizer);
  } else {
    context.backward({loss});
    require(optimizer.step(context) == 1, "not stepped");
  }
  require_stepped(weight);
}

const Case kCases[] = {
    {"Calls", [] { require(rpc_sync<twice>(kThere, 21) == 42, "wrong result"); }},
    {"NestedCalls", [] { require(rpc_sync<twice_there>(kThere, 21) == 84, "wrong result"); }},
    {"Texts",
     [] {
       const std::string text(100'000, 'x');
       require(rpc_sync<repeat>(kThere, text) == text + text, "wrong result");
     }},
    {"Tensors",
     [] {
       for (const std::int64_t size : {3, 100'000}) {
         const at::Tensor result = rpc_sync<plus_one>(kThere, at::zeros({size}));
         require(at::equal(result, at::ones({size})), "wrong result");
       }
     }},
    {"Continuations",
     [] {
       auto future = rpc_async<twice>(kThere, 1).then([](int x) { return x + 1; });
       require(future.get() == 3, "wrong result");
     }},
    {"Coroutines", [] { require(rpc_sync<twice_later>(kThere, 1) == 3, "wrong result"); }},
    {"ManyCalls",
     [] {
       std::vector<Future<int>> futures;
       for (int i = 0; i < 8; ++i) futures.push_back(rpc_async<twice>(kThere, i));
       const std::vector<int> all = when_all(std::move(futures)).get();
       for (int i = 0; i < 8; ++i) require(all[i] == 2 * i, "wrong result");
     }},
    {"FunctionsThatThrow",
     [] {
       try {
         rpc_sync<no_such_row>(kThere, 1);
       } catch (const Error& error) {
         if (error.code() != ErrorCode::remote_exception) throw;
       }
     }},
    {"OneWayCalls", [] { notify<note>(kThere, 1); }},
    {"CancelledCalls",
     [] {
       // Where it cannot be told, its deadline stops it.
       auto future = rpc_async<until_stopped>({.to = kThere, .timeout = 500ms}, 60'000);
       future.cancel();
       require(future.ready(), "it is not over");
     }},
    {"TimedOutCalls",
     [] {
       try {
         rpc_sync<until_stopped>({.to = kThere, .timeout = 20ms}, 60'000);
       } catch (const Error& error) {
         if (error.code() != ErrorCode::timeout) throw;
       }
     }},
    {"RemoteValues", [] { require(remote<make_number>(kThere, 5).to_here() == 5, "wrong result"); },
     kWithLedgers},
    {"RemoteObjects",
     [] {
       const auto counter = remote<Counter>(kThere, 1);
       const auto copy = counter;
       require(counter.rpc_sync<&Counter::add>(2) == 3, "wrong result");
       require(copy.remote<&Counter::add>(1).to_here() == 4, "wrong result");
     },
     kWithLedgers},
    {"OrderedCalls",
     [] {
       const auto counter = remote<Counter>(kThere, 0).ordered();
       const auto first = counter.rpc_async<&Counter::add>(1);
       const auto second = counter.rpc_async<&Counter::add>(2);
       const int sum = second.get();  // with whatever outcome of the first
       require(first.get() == 1 && sum == 3, "wrong result");
     },
     kWithLedgers},
    {"DroppedReferences", [] { static_cast<void>(remote<Counter>(kThere, 1)); }, kWithLedgers},
    {"OwnReferences",
     [] {
       const auto mine = make_rref(5);
       require(mine.to_here() == 5, "wrong result");
       require(rpc_sync<add_up>(kThere, mine, 2) == 7, "wrong result");
     },
     kWithLedgers},
    {"LentReferences",
     [] {
       const auto counter = remote<Counter>(kThere, 0);
       require(rpc_sync<use>(kThere, counter) == 1, "wrong result");
       const auto mine = remote<Counter>(kHere, 0);
       require(rpc_sync<use>(kThere, mine) == 1, "wrong result");
       require(rpc_sync<pass_back>(kThere, mine).rpc_sync<&Counter::add>(1) == 2, "wrong result");
     },
     kWithLedgers},
    {"ReferencesAsArguments",
     [] {
       const auto number = remote<make_number>(kHere, 5);
       require(rpc_sync<add_up>(kThere, number, 2) == 7, "wrong result");
     },
     kWithLedgers},
    {"ExactPasses", [] { backward(dist_autograd::Mode::exact); }},
    {"FastPasses", [] { backward(dist_autograd::Mode::fast); }},
    {"CancelledPasses", &backward_cancelled},
    {"PassesUnderGuards", &backward_under_guards},
    {"Steps", [] { step(false); }, kWithLedgers},
    {"PassesWithSteps", [] { step(true); }, kWithLedgers},
};

TEST_P(Memory, MayFailOnce) { run_with(1); }

// A drop cannot fail: what it has to do is done without memory, or later.
TEST(DroppedReferences, AreCountedWhereThereIsNoMemory) {
  const UnfailingMemory scaffold;
  Cluster cluster(2, name_worker);
  std::vector<RRef<Counter>> dropped;
  for (int i = 0; i < 20; ++i) {
    dropped.push_back(remote<Counter>(i % 2 == 0 ? kThere : kHere, i));
    dropped.back().rpc_sync<&Counter::add>(1);
  }
  std::atomic<bool> go{false}, done{false};
  std::thread dropping([&] {
    while (!go) std::this_thread::sleep_for(1ms);
    dropped.clear();
    done = true;
  });
  FailingMemory::begin(1, 1'000'000);
  go = true;
  EXPECT_TRUE(eventually([&] { return done.load(); }));
  std::this_thread::sleep_for(50ms);  // what follows has no memory either
  EXPECT_GT(FailingMemory::end(), 0);
  dropping.join();
  EXPECT_TRUE(eventually([&] { return left_behind(cluster).empty(); })) << left_behind(cluster);
  EXPECT_EQ(rpc_sync<twice>(kThere, 2), 4);
}

// A node of the other worker that waits until the test lets it go on.
std::atomic<bool> node_waits{false}, node_may_go_on{false};
at::Tensor times_held(at::Tensor x) {
  const at::Tensor y = times(std::move(x));
  y.register_hook([](const at::Tensor& gradient) {
    node_waits = true;
    while (!node_may_go_on) std::this_thread::sleep_for(1ms);
    return gradient;
  });
  return y;
}

// Whichever step of that finds no memory, and the next ones for longer than is waited for it.
TEST(PassesThatTimeOut, EndOnAllWorkersWhereThereIsNoMemoryForLong) {
  constexpr auto kTimeLimit = 40ms, kOutage = 150ms;
  const UnfailingMemory scaffold;
  Watchdog watchdog(30s);  // the context, too, waits for the end of the pass
  Cluster cluster(2, name_worker);
  const auto sent = [&] { return cluster[0].debug_info().at("rpc.messages_sent"); };
  std::int64_t first = 1;
  for (bool told = false; !told; ++first) {
    watchdog.step();
    ASSERT_LT(first, 300);
    node_waits = node_may_go_on = false;
    {
      dist_autograd::Context context;
      const at::Tensor x = at::ones({3}, at::kDouble).requires_grad_();
      const at::Tensor loss = rpc_sync<times_held>(kThere, x).sum();
      const auto future = context.backward_async({loss}, {.timeout = kTimeLimit});
      ASSERT_TRUE(eventually([&] { return node_waits.load(); }));
      const auto before = sent();
      FailingMemory::begin(first, 1'000'000'000);
      std::this_thread::sleep_for(kTimeLimit + kOutage);
      told = sent() != before;  // the other worker, before the memory was missing: that is all
      static_cast<void>(FailingMemory::end());
      EXPECT_TRUE(future.wait_for(10s)) << "allocation " << first;
      node_may_go_on = true;
      EXPECT_EQ(future.error().code(), ErrorCode::timeout) << future.error().what();
    }
    if (told) break;
    ASSERT_TRUE(eventually([&] { return left_behind(cluster).empty(); }, 10s))
        << "allocation " << first << ":" << left_behind(cluster);
  }
  EXPECT_GT(first, 10) << "it shows little";
  // What the other worker had no memory to read may be lost.
  for (int i = 0; i < 2; ++i) cluster[i].shutdown({.graceful = false});
}

// A node that throws, and from its k-th allocation on there is no memory.
std::atomic<std::int64_t> first_failing{0};
const std::runtime_error hook_error("the hook has failed");
at::Tensor throws_in_backward(const at::Tensor& x) {
  const at::Tensor y = times(x);
  y.register_hook([](const at::Tensor& gradient) {
    FailingMemory::begin(first_failing, 1'000'000'000);
    node_waits = true;
    if (node_waits) throw hook_error;
    return gradient;
  });
  return y;
}

// At the worker that called backward(), and at another.
TEST(PassesWithANodeThatThrows, FailWhereThereIsNoMemoryForLong) {
  constexpr auto kOutage = 150ms;
  const UnfailingMemory scaffold;
  Watchdog watchdog(30s);
  Cluster cluster(2, name_worker);
  for (const bool remote : {false, true}) {
    for (std::int64_t first = 1; first < 30; first += first < 8 ? 1 : 7) {
      watchdog.step();
      node_waits = false;
      first_failing = first;
      {
        dist_autograd::Context context;
        const at::Tensor x = at::ones({3}, at::kDouble).requires_grad_();
        const at::Tensor y =
            remote ? rpc_sync<throws_in_backward>(kThere, x) : throws_in_backward(x);
        const auto future = context.backward_async({y.sum()}, {.timeout = 20s});
        EXPECT_TRUE(eventually([&] { return node_waits.load(); }));
        std::this_thread::sleep_for(kOutage);  // longer than patiently() waits: it has to give up
        static_cast<void>(FailingMemory::end());
        ASSERT_TRUE(future.wait_for(10s)) << "remote " << remote << ", allocation " << first;
        ASSERT_TRUE(future.has_error()) << "remote " << remote << ", allocation " << first;
      }
      ASSERT_TRUE(eventually([&] { return left_behind(cluster).empty(); }, 10s))
          << "remote " << remote << ", allocation " << first << ":" << left_behind(cluster);
    }
  }
  for (int i = 0; i < 2; ++i) cluster[i].shutdown({.graceful = false});
}

// Calls without a deadline, to a peer that is lost: whatever its end has no memory for, they fail.
TEST(PeersThatAreLost, FailTheirCallsWhicheverAllocationFails) {
  const UnfailingMemory scaffold;
  Watchdog watchdog(30s);
  for (const std::int64_t failures : {1, 3}) {
    std::int64_t failed = 1;
    for (std::int64_t first = 1; failed != 0; ++first) {
      watchdog.step();
      ASSERT_LT(first, 1000);
      Cluster cluster(2, [](Options& options) { name_worker(options).rpc_timeout = 0s; });
      std::vector<Future<int>> calls;
      for (int i = 0; i < 4; ++i) calls.push_back(rpc_async<until_stopped>(kThere, 60'000));
      ASSERT_TRUE(eventually([&] { return cluster[1].debug_info().at("rpc.calls_served") == 4; }));
      const Error reason(ErrorCode::disconnected, "the test gives this worker up");
      const WorkerInfo given_up = cluster[1].info();
      FailingMemory::begin(first, failures);
      std::thread([&] {
        try {
          cluster[0].agent()->peers().give_up(given_up, reason);
        } catch (const std::bad_alloc&) {
          // Not before it is lost: the calls say.
        }
      }).join();
      for (const auto& call : calls) {
        EXPECT_TRUE(call.wait_for(10s)) << "allocation " << first;
        EXPECT_TRUE(call.ready() && call.has_error()) << "allocation " << first;
      }
      failed = FailingMemory::end();
      if (HasFailure()) FailingMemory::print_where();
      for (int i = 0; i < 2; ++i) cluster[i].shutdown({.graceful = false});
      ASSERT_FALSE(HasFailure());
    }
  }
}

// Both leave, whichever of the two has no memory for a step of it: what is lost is repeated.
TEST(GracefulShutdown, EndsInTimeWhicheverAllocationFails) {
  constexpr auto kLimit = 5s;
  const UnfailingMemory scaffold;
  Watchdog watchdog(60s);
  std::map<std::string, int> outcomes;
  std::int64_t failed = 1;
  for (std::int64_t first = 1; failed != 0; ++first) {
    watchdog.step();
    ASSERT_LT(first, 2000);
    Cluster cluster(2, [&](Options& options) { name_worker(options).shutdown_timeout = kLimit; });
    require(rpc_sync<twice>(kThere, 2) == 4, "wrong result");
    const auto begun = std::chrono::steady_clock::now();
    FailingMemory::begin(first, 1);
    std::vector<std::thread> leaving;
    std::mutex mutex;
    for (int i = 0; i < 2; ++i) {
      leaving.emplace_back([&, i] {
        // What it throws before it has begun may be called again.
        for (int tries = 0; tries < 2; ++tries) {
          try {
            cluster[i].shutdown();
          } catch (const std::exception& error) {
            const UnfailingMemory own;
            const std::lock_guard lock(mutex);
            ++outcomes[error.what()];
            EXPECT_EQ(tries, 0) << "allocation " << first << ": it throws again: " << error.what();
          }
        }
      });
    }
    for (auto& thread : leaving) thread.join();
    failed = FailingMemory::end();
    if (std::chrono::steady_clock::now() - begun >= kLimit) {
      ADD_FAILURE() << "allocation " << first << ": its limit has passed";
      FailingMemory::print_where();
      break;
    }
  }
  for (const auto& [text, count] : outcomes) {
    std::printf("%5d  %s\n", count, text.c_str());
    EXPECT_EQ(text, std::bad_alloc().what());
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Memory, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace stitch::testing
