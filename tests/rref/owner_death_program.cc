// One of three workers, for owner_death_test.cc. Worker 1 is killed; worker 0 prints what happens
// to references to its objects and to objects that it held references to.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/worker.h"
#include "stitch/rref/rref.h"

namespace {

using namespace std::chrono_literals;

struct Tally {
  int count = 0;
  int add(int by) { return count += by; }
};
int add_one(stitch::RRef<Tally> tally) { return tally.rpc_sync<&Tally::add>(1); }
stitch::base::Mutex kept_mutex;
stitch::RRef<Tally> kept;
void keep(stitch::RRef<Tally> tally) {
  stitch::base::MutexLock lock(kept_mutex);
  kept = std::move(tally);
}
void die() { kill(getpid(), SIGKILL); }

void tell(const char* what, const stitch::Error& error) {
  std::printf("%s: %s, worker \"%s\": %s\n", what, std::string(to_string(error.code())).c_str(),
              error.worker().c_str(), error.what());
}
template <class Call>
void tell_error(const char* what, Call&& call) {
  try {
    call();
    std::printf("%s: no error\n", what);
  } catch (const stitch::Error& error) {
    tell(what, error);
  }
}

bool has_lost_the_owner() {
  return stitch::rpc::current_agent()->peers().lost(stitch::WorkerId(1)).has_value();
}

int first_worker() {
  const auto owned_there = stitch::remote<Tally>("worker1");  // by the worker that dies
  const auto owned_elsewhere = stitch::remote<Tally>("worker2");
  const auto mine = stitch::make_rref(1);
  owned_there.rpc_sync<&Tally::add>(1);
  // The worker that dies holds an object of another worker.
  stitch::rpc_sync<keep>("worker1", owned_elsewhere);
  stitch::rpc_sync<add_one>("worker2", owned_there);
  std::printf("owner epoch %llu\n", static_cast<unsigned long long>(owned_there.owner().epoch));
  const auto start = std::chrono::steady_clock::now();
  stitch::notify<die>("worker1");
  // Until its loss is noticed, requests to it may still be answered.
  while (!(has_lost_the_owner() && stitch::rpc_sync<has_lost_the_owner>("worker2")) &&
         std::chrono::steady_clock::now() - start < 2s) {
    std::this_thread::sleep_for(1ms);
  }
  tell_error("its creation", [] { stitch::remote<Tally>("worker1").when_created().get(); });
  tell_error("its method", [&] { owned_there.rpc_sync<&Tally::add>(1); });
  tell_error("passed on", [&] { stitch::rpc_sync<add_one>("worker2", owned_there); });
  std::printf("noticed %s\n",
              std::chrono::steady_clock::now() - start < 2s ? "within 2 s" : "too late");
  std::printf("other object %d\n", owned_elsewhere.rpc_sync<&Tally::add>(5));
  std::printf("own object %d\n", mine.to_here());
  return 0;
}

}  // namespace

int main() try {
  const auto self = stitch::init();
  if (self.rank() == 0) return first_worker();
  if (self.rank() == 1) std::this_thread::sleep_for(60s);  // killed long before
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
