// Whatever allocation fails: the call that it belongs to succeeds or fails with an error,
// nothing hangs or ends the process, what follows works, and nothing stays behind.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/worker.h"
#include "tests/support/cluster.h"
#include "tests/support/eventually.h"
#include "tests/support/failing_memory.h"

namespace stitch::testing {
namespace {

using namespace std::chrono_literals;

// ---- what is called

int twice(int x) { return 2 * x; }
std::string repeat(const std::string& text) { return text + text; }
at::Tensor plus_one(at::Tensor x) { return x + 1; }
int twice_there(int x) { return 2 * rpc_sync<twice>("worker0", x); }
Future<int> twice_later(int x) { co_return co_await rpc_async<twice>("worker0", x) + 1; }
std::atomic<int> noted{0};
void note(int) { ++noted; }

int until_stopped(int milliseconds) {
  const auto stop = current_stop_token();
  for (int i = 0; i < milliseconds && !stop.stop_requested(); ++i) std::this_thread::sleep_for(1ms);
  return 0;
}

// ---- how it is looked at

void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

// What is under way on the workers, or was left there; empty if nothing.
std::string left_behind(Cluster& cluster) {
  static const char* const kNames[] = {
      "rpc.calls_made",     "rpc.calls_served",   "rpc.calls_waiting", "rpc.control_bytes",
      "rpc.incoming_bytes", "rpc.outgoing_bytes", "rpc.pool_queue"};
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
};
void PrintTo(const Case& each, std::ostream* out) { *out << each.name; }

class Memory : public ::testing::TestWithParam<Case> {
 protected:
  static std::unique_ptr<Cluster> make_cluster() {
    auto cluster = std::make_unique<Cluster>(2, [](Options& options) {
      options.rpc_timeout = 4s;  // what is lost ends then, and is found
    });
    return cluster;
  }
  // That everything works; what fails is thrown.
  static void look(Cluster& cluster) {
    require(rpc_sync<twice>("worker1", 2) == 4, "wrong result there");
    require(cluster[1].rpc_sync<twice>("worker0", 3) == 6, "wrong result here");
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
      const bool over = eventually([&] { return left_behind(*cluster).empty(); }, 2s);
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

const Case kCases[] = {
    {"Calls", [] { require(rpc_sync<twice>("worker1", 21) == 42, "wrong result"); }},
    {"NestedCalls", [] { require(rpc_sync<twice_there>("worker1", 21) == 84, "wrong result"); }},
    {"Texts",
     [] {
       const std::string text(100'000, 'x');
       require(rpc_sync<repeat>("worker1", text) == text + text, "wrong result");
     }},
    {"Tensors",
     [] {
       for (const std::int64_t size : {3, 100'000}) {
         const at::Tensor result = rpc_sync<plus_one>("worker1", at::zeros({size}));
         require(at::equal(result, at::ones({size})), "wrong result");
       }
     }},
    {"Continuations",
     [] {
       auto future = rpc_async<twice>("worker1", 1).then([](int x) { return x + 1; });
       require(future.get() == 3, "wrong result");
     }},
    {"Coroutines", [] { require(rpc_sync<twice_later>("worker1", 1) == 3, "wrong result"); }},
    {"ManyCalls",
     [] {
       std::vector<Future<int>> futures;
       for (int i = 0; i < 8; ++i) futures.push_back(rpc_async<twice>("worker1", i));
       const std::vector<int> all = when_all(std::move(futures)).get();
       for (int i = 0; i < 8; ++i) require(all[i] == 2 * i, "wrong result");
     }},
    {"OneWayCalls", [] { notify<note>("worker1", 1); }},
    {"CancelledCalls",
     [] {
       // Where it cannot be told, its deadline stops it.
       auto future = rpc_async<until_stopped>({.to = "worker1", .timeout = 500ms}, 60'000);
       future.cancel();
       require(future.ready(), "it is not over");
     }},
    {"TimedOutCalls",
     [] {
       try {
         rpc_sync<until_stopped>({.to = "worker1", .timeout = 20ms}, 60'000);
       } catch (const Error& error) {
         if (error.code() != ErrorCode::timeout) throw;
       }
     }},
};

TEST_P(Memory, MayFailOnce) { run_with(1); }

INSTANTIATE_TEST_SUITE_P(Cases, Memory, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace stitch::testing
