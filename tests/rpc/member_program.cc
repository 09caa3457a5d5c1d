// One worker of a world in which others are killed and started again, for restart_test.cc. The
// first argument says what it does.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "stitch/base/event_loop.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/graceful_shutdown.h"
#include "stitch/rpc/worker.h"
#include "stitch/rpc/world/world_record.h"
#include "stitch/transport/store/file_store.h"
#include "stitch/transport/store/prefix_store.h"
#include "stitch/transport/store/tcp_store.h"

namespace {

// Those of stitch-run's job.
std::shared_ptr<stitch::transport::Store> keys_of(std::shared_ptr<stitch::transport::Store> store) {
  const char* const job = getenv("STITCH_JOB");
  return stitch::transport::make_prefix_store(
      std::string("stitch/") + (job == nullptr ? "" : job) + '/', std::move(store));
}

using namespace std::chrono_literals;
using stitch::Error;

std::atomic<bool> serving{false}, over{false};
bool is_serving() { return serving; }
int process_id() { return getpid(); }
void die() { kill(getpid(), SIGKILL); }
void end() { over = true; }

void serve() {
  serving = true;
  for (int i = 0; i < 6000 && !over; ++i) std::this_thread::sleep_for(10ms);
}

// Whether it has called shutdown, and waits for the others.
bool is_leaving() {
  return stitch::rpc::current_agent()->graceful_shutdown().waiting().has_value();
}

// A call from here to `other`, until `other` is told to end.
std::optional<stitch::Future<void>> work;
void begin_work(const std::string& other) { work = stitch::rpc_async<serve>(other); }

// Calls `name` until a life of it with a higher epoch than `former` answers.
stitch::WorkerInfo until_back(const stitch::Worker& self, const stitch::WorkerInfo& former) {
  for (int i = 0; i < 3000; ++i) {
    const stitch::WorkerInfo now = self.worker(former.id);
    if (now.epoch > former.epoch) return now;
    std::this_thread::sleep_for(10ms);
  }
  throw std::runtime_error(former.name + " did not come back");
}

// Until init has returned there, it still reads the store that worker 0 may serve.
void await_serving(stitch::Worker& self, const std::vector<std::string>& workers) {
  for (const auto& each : workers) {
    for (int i = 0; i < 3000 && !self.rpc_sync<is_serving>(each); ++i)
      std::this_thread::sleep_for(10ms);
  }
}

// Worker `victim` is killed and comes back while `witness` and `other` call each other.
int outlive(stitch::Worker& self, const std::string& victim, const std::string& witness,
            const std::string& other) {
  if (self.name() != witness) {
    serve();
    return 0;
  }
  await_serving(self, {victim, other});
  const stitch::WorkerInfo former = self.worker(victim);
  const int process = self.rpc_sync<process_id>(former);
  self.notify<die>(former);
  int calls = 0;
  std::jthread traffic([&](std::stop_token stop) {
    const stitch::WorkerScope scope(self);
    for (; !stop.stop_requested(); ++calls) self.rpc_sync<process_id>(other);
  });
  const auto now = until_back(self, former);
  const bool another = self.rpc_sync<process_id>(victim) != process;
  traffic.request_stop();
  traffic.join();
  std::printf("%s is back, epoch %d, %s\n", now.name.c_str(), static_cast<int>(now.epoch),
              another ? "in another process" : "in the same process");
  std::printf("%s\n", calls > 100 ? "calls to others went on" : "calls to others stopped");
  try {
    self.rpc_sync<process_id>(former);
  } catch (const Error& error) {
    std::printf("%s: %s\n", std::string(to_string(error.code())).c_str(), error.what());
  }
  self.notify<end>(victim);
  self.notify<end>(other);
  return 0;
}

// The others return from main at once, and serve until all leave. `victim` is killed when they wait
// for that, comes back, calls them and leaves.
int come_back_to_leaving(stitch::Worker& self, const std::string& victim, const std::string& one,
                         const std::string& other) {
  if (self.name() != victim) return 0;
  if (self.info().epoch == 1) {
    for (const auto& each : {one, other}) {
      for (int i = 0; i < 3000 && !self.rpc_sync<is_leaving>(each); ++i)
        std::this_thread::sleep_for(10ms);  // until they have begun to leave, without an event
    }
    // Else they would leave without it.
    self.rpc_sync<begin_work>(one, other);
    die();
  }
  const bool both = self.rpc_sync<is_leaving>(one) && self.rpc_sync<is_leaving>(other);
  std::printf("%s is back, epoch %d, the others %s\n", self.name().c_str(),
              static_cast<int>(self.info().epoch), both ? "wait for it" : "do not wait");
  self.notify<end>(other);
  return 0;
}

// Whether the store has the record of a world.
int say_what_is_recorded(const std::string& path) {
  const auto store = keys_of(stitch::transport::make_file_store(path));
  const auto record = store->try_get(stitch::rpc::world_key::kWorld);
  std::printf("%s\n", record ? "a world is recorded" : "the record is gone");
  return 0;
}

// Until that many workers have claimed a place.
void await_claims(stitch::transport::Store& store, std::size_t count) {
  static_cast<void>(store.claims(stitch::rpc::world_key::kMember, count, 30s));
}

// Before init() of one of two workers that meet at a file. Worker 0 is killed when it waits for
// worker 1, which comes after that.
void begin_founding(const std::string& method, const std::string& folder) {
  const std::shared_ptr<stitch::transport::Store> store =
      keys_of(stitch::transport::make_file_store(method.substr(std::string("file://").size())));
  const std::filesystem::path died = folder + "/died";
  if (getenv("RANK") == std::string("1")) {
    for (int i = 0; i < 6000 && !std::filesystem::exists(died); ++i)
      std::this_thread::sleep_for(5ms);
  } else if (!std::filesystem::exists(died)) {
    std::thread([store, died] {
      await_claims(*store, 1);
      std::ofstream(died) << '\n';
      die();
    }).detach();
  }
}

// The same of three workers whose store worker 0 serves: it is killed when worker 1 waits, too, and
// worker 2 comes after that.
void begin_founding_at_a_host(const std::string& folder) {
  const std::filesystem::path died = folder + "/died";
  const std::string rank = getenv("RANK");
  if (rank == "2") {
    for (int i = 0; i < 6000 && !std::filesystem::exists(died); ++i)
      std::this_thread::sleep_for(5ms);
  } else if (rank == "0" && !std::filesystem::exists(died)) {
    std::thread([died] {
      stitch::transport::TcpStoreOptions options;
      options.port = static_cast<std::uint16_t>(std::atoi(getenv("MASTER_PORT")));
      std::string secret;
      std::getline(std::ifstream(getenv("STITCH_SECRET_FILE")), secret);
      options.key = stitch::transport::SecretKey::stretch(secret);
      const auto store = keys_of(stitch::transport::make_tcp_store(options));
      await_claims(*store, 2);
      std::ofstream(died) << '\n';
      die();
    }).detach();
  }
}

// A worker of an elastic world that no other calls: it tells in files `folder`/NAME when all of
// `count` are there, and in NAME-OTHER-dead of each that is gone. `end`: how it ends itself as soon
// as it is a member.
int watch(const std::string& folder, int rank, int count, const std::string& end) {
  const std::string name = "w" + std::to_string(rank);
  auto self = stitch::init({.name = name,
                            .rank = rank,
                            .world_size = "3:8",
                            .init_timeout = 40s,
                            .shutdown_timeout = 40s});
  if (end != "no") kill(getpid(), end == "kill" ? SIGKILL : SIGSTOP);
  const auto tell = [&](const std::string& what) { std::ofstream(folder + '/' + what) << '\n'; };
  const auto watching = self.on_leave([&](const stitch::WorkerInfo& gone, stitch::LeaveReason why) {
    tell(name + '-' + gone.name + '-' + std::string(to_string(why)));
  });
  for (int i = 0; i < 3000 && self.world_size() < count; ++i) std::this_thread::sleep_for(10ms);
  tell(name);
  serve();
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "watch" && argc > 5)
    return watch(argv[2], std::atoi(argv[3]), std::atoi(argv[4]), argv[5]);
  if (what == "record" && argc > 2) return say_what_is_recorded(argv[2]);
  stitch::Options options{.init_timeout = 40s, .shutdown_timeout = 40s};
  // The store of the launcher is a file; here worker 0 serves one.
  if (what.starts_with("host"))
    options.init_method = std::string("tcp://127.0.0.1:") + getenv("MASTER_PORT");
  if (what == "founding" && argc > 2) begin_founding(getenv("STITCH_INIT_METHOD"), argv[2]);
  if (what == "host founding" && argc > 2) begin_founding_at_a_host(argv[2]);
  auto self = stitch::init(options);
  if (what == "restart") return outlive(self, "worker1", "worker0", "worker2");
  if (what == "host") return outlive(self, "worker0", "worker1", "worker2");
  if (what == "worker1 among leaving")
    return come_back_to_leaving(self, "worker1", "worker0", "worker2");
  if (what == "worker0 among leaving")
    return come_back_to_leaving(self, "worker0", "worker1", "worker2");
  if (what == "wait" && argc > 2) {
    std::ofstream(argv[2] + self.name()) << self.info().epoch << '\n';
    serve();
    return 0;
  }
  if (what == "meet" || what == "founding" || what == "host founding") {
    std::vector<std::string> all;
    for (const auto& each : self.workers()) all.push_back(each.name);
    self.barrier(all);
    std::printf("%s has met the others, epoch %d\n", self.name().c_str(),
                static_cast<int>(self.info().epoch));
    return 0;
  }
  std::fprintf(stderr, "unknown: %s\n", what.c_str());
  return 2;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
