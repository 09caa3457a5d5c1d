// References when a process is killed: those that it held are reclaimed, those to its objects fail.
#include <signal.h>
#include <unistd.h>

#include <iostream>

#include "tests/support/forked_world.h"
#include "tests/support/world_test.h"

namespace references_test {
namespace {

using namespace stitch::testing;
using Clock = std::chrono::steady_clock;

constexpr int kWorkers = 3;
constexpr int kObjects = 20;

std::atomic<int> live_objects{0};
struct Counted {
  Counted() { ++live_objects; }
  ~Counted() { --live_objects; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  int add(int more) { return value += more; }
  int value = 0;
};
int live() { return live_objects; }

std::mutex held_mutex;
std::vector<RRef<Counted>> held;
// Makes objects on both other workers, holds them, and gives one of those on worker 1 away.
RRef<Counted> hold() {
  const std::lock_guard lock(held_mutex);
  for (const char* owner : {"worker0", "worker1"}) {
    for (int i = 0; i < kObjects; ++i) held.push_back(remote<Counted>(owner));
  }
  for (const auto& each : held) each.when_created().get();
  return held.back();
}
void keep(RRef<Counted> object) {
  const std::lock_guard lock(held_mutex);
  held.push_back(std::move(object));
}
int add_at(RRef<Counted> object) { return object.rpc_sync<&Counted::add>(1); }
int plus_one(int value) { return value + 1; }
int sleep_long() {
  std::this_thread::sleep_for(10s);
  return 1;
}
void die() { ::kill(::getpid(), SIGKILL); }

bool reached(int here, int at_worker1, Worker& self) {
  return live() == here && self.rpc_sync<live>("worker1") == at_worker1;
}

// Worker 2 dies, and with it what it held on workers 0 and 1, but for what it has lent to worker 0.
int outlive_a_holder(Worker& self) {
  auto lent = self.rpc_sync<hold>("worker2");
  {
    const auto object = self.remote<Counted>("worker1");
    object.when_created().get();
    self.rpc_sync<keep>("worker2", object);
  }
  if (!reached(kObjects, kObjects + 1, self)) {
    std::cerr << "objects: " << live() << " and " << self.rpc_sync<live>("worker1");
    return 1;
  }
  self.notify<die>("worker2");
  const auto start = Clock::now();
  while (!reached(0, 1, self)) {
    if (Clock::now() > start + 5s) {
      std::cerr << "after 5 s there are " << live() << " and " << self.rpc_sync<live>("worker1");
      return 2;
    }
    std::this_thread::sleep_for(1ms);
  }
  if (lent.rpc_sync<&Counted::add>(7) != 7) return 3;
  lent = {};
  while (!reached(0, 0, self)) {
    if (Clock::now() > start + 10s) return 4;
    std::this_thread::sleep_for(1ms);
  }
  return 0;
}

// Makes `call`; it has to fail within 2 s, with an error that names the life that is gone.
bool fails_by_name(const char* what, std::uint64_t epoch, const std::function<void()>& call) {
  const auto start = Clock::now();
  try {
    call();
    std::cerr << what << ": no error\n";
  } catch (const Error& error) {
    const auto took = Clock::now() - start;
    const std::string text = error.what();
    const bool named = text.find("worker \"worker2\"") != std::string::npos &&
                       text.find("epoch " + std::to_string(epoch)) != std::string::npos;
    if (error.code() == ErrorCode::disconnected && named && took < 2s) return true;
    std::cerr << what << " after " << std::chrono::duration<double>(took).count()
              << " s: " << to_string(error.code()) << ": " << text << '\n';
  }
  return false;
}

// Worker 2 dies, with objects that worker 0 refers to, and worker 1 through it.
int outlive_an_owner(Worker& self) {
  const auto object = self.remote<Counted>("worker2");
  const auto number = self.remote<plus_one>("worker2", 1);
  object.rpc_sync<&Counted::add>(1);
  // Of others, which the worker that dies holds, too.
  const auto elsewhere = self.remote<Counted>("worker1"), mine = self.remote<Counted>("worker0");
  for (const auto& others : {elsewhere, mine}) self.rpc_sync<keep>("worker2", others);
  const std::uint64_t epoch = object.owner().epoch;
  const auto pending = self.rpc_async<sleep_long>("worker2");
  const auto creating = self.remote<sleep_long>("worker2");
  self.notify<die>("worker2");
  const std::vector<std::pair<const char*, std::function<void()>>> uses{
      {"a pending call", [&] { pending.get(); }},
      {"an object that is being made", [&] { creating.to_here(); }},
      {"a method", [&] { object.rpc_sync<&Counted::add>(1); }},
      {"a method of a copy, with a limit",
       [&] { object.with_timeout(1s).rpc_sync<&Counted::add>(1); }},
      {"a result that stays there", [&] { object.remote<&Counted::add>(1).when_created().get(); }},
      {"to_here", [&] { number.to_here(); }},
      {"to_here with a limit", [&] { number.to_here(1s); }},
      {"the object as an argument", [&] { self.rpc_sync<plus_one>("worker1", number); }},
      {"the reference as an argument", [&] { self.rpc_sync<add_at>("worker1", object); }},
      {"a new object", [&] { self.remote<Counted>("worker2").when_created().get(); }},
      {"a call of the life", [&] { self.rpc_sync<plus_one>(object.owner(), 1); }},
  };
  int failures = 0;
  // Twice: as the owner dies, and once that is known.
  for (int round = 0; round < 2; ++round) {
    for (const auto& [what, call] : uses) failures += fails_by_name(what, epoch, call) ? 0 : 1;
  }
  for (const auto& others : {elsewhere, mine})
    failures += others.rpc_sync<&Counted::add>(5) == 5 ? 0 : 1;
  return failures;
}

// Worker 0 runs `what`; worker 2 dies of it; the others leave gracefully.
void run(const char* transport, int (*what)(Worker&)) {
  SCOPED_TRACE(transport);
  ForkedWorld world(kWorkers, [what, transport](Options options) {
    options.transports = {transport};
    options.num_threads = 4;
    auto self = stitch::init(std::move(options));
    if (self.rank() != 0) return 0;  // ~Worker serves until all leave
    const int failures = what(self);
    self.shutdown();
    return failures;
  });
  const auto first = world.wait(0);
  EXPECT_EQ(first.status, 0) << "signal " << first.signal;
  EXPECT_EQ(first.said, "");
  const auto second = world.wait(1);
  EXPECT_EQ(second.status, 0) << "signal " << second.signal;
  EXPECT_EQ(second.said, "");
  EXPECT_EQ(world.wait(2).signal, SIGKILL);
}

TEST(ReferencesOfTheDead, AreReclaimedWithin5Seconds) {
  for (const char* transport : {"shm", "tcp"}) run(transport, outlive_a_holder);
}

TEST(ReferencesToTheDead, FailOnEveryUseWithin2SecondsNamingTheLife) {
  for (const char* transport : {"shm", "tcp"}) run(transport, outlive_an_owner);
}

}  // namespace
}  // namespace references_test
