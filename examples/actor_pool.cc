// One learner, and collectors that come and go. The program starts its three collectors itself,
// kills one after another in the middle of its work, and starts it again under its name; the others
// never stop, and neither does the learner.
//   actor_pool [kills]
#include <signal.h>
#include <stitch/stitch.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>

#include "support/until.h"

// ---- what runs on the learner

std::mutex mutex;
std::map<std::string, long> rollouts;  // by collector, of its present life
std::atomic<long> total{0};
std::atomic<bool> finished{false};

// Takes what a collector has seen. False: there is no need for more.
bool learn_from(const std::string& collector, at::Tensor rollout) {
  total += rollout.numel() > 0;
  const std::lock_guard lock(mutex);
  ++rollouts[collector];
  return !finished;
}

// ---- a collector: a process of its own, which does not know that it may be killed

int collect(const std::string& name) {
  const auto self = stitch::init({.name = name});
  while (stitch::rpc_sync<learn_from>("learner", self.name(), at::rand({4, 16}))) {
  }
  return 0;
}

// ---- the program that the user starts: the learner, and what starts and kills its collectors

pid_t start(const std::string& collector) {
  const pid_t child = fork();
  if (child != 0) return child;
  execl("/proc/self/exe", "actor_pool", "collect", collector.c_str(), nullptr);
  _exit(127);
}

int learn(int kills) {
  std::string path = std::filesystem::temp_directory_path() / "stitch-actor-pool-XXXXXX";
  if (mkdtemp(path.data()) == nullptr) throw std::runtime_error("cannot make " + path);
  setenv("STITCH_INIT_METHOD", ("file://" + path + "/store").c_str(), 1);
  setenv("STITCH_WORLD_SIZE", "1:4", 1);

  auto self = stitch::init({.name = "learner"});  // an elastic world: it runs from here on
  std::map<std::string, std::uint64_t> epochs;    // of the collectors that live
  const auto joins = self.on_join([&](const stitch::WorkerInfo& info) {
    const std::lock_guard lock(mutex);
    epochs[info.name] = info.epoch;
    rollouts[info.name] = 0;
    std::printf("%s joined, epoch %d\n", info.name.c_str(), static_cast<int>(info.epoch));
  });
  const auto leaves = self.on_leave([&](const stitch::WorkerInfo& info, stitch::LeaveReason why) {
    const std::lock_guard lock(mutex);
    if (epochs[info.name] == info.epoch) epochs.erase(info.name);  // else it is back already
    std::printf("%s is %s after %ld rollouts; %ld from all\n", info.name.c_str(),
                why == stitch::LeaveReason::dead ? "dead" : "gone", rollouts[info.name],
                total.load());
  });
  const auto works = [&](const std::string& name) {
    const std::lock_guard lock(mutex);
    return epochs.contains(name) && rollouts[name] > 0;
  };

  std::map<std::string, pid_t> collectors;
  for (const std::string name : {"collector0", "collector1", "collector2"}) {
    collectors[name] = start(name);
    until(name + " works", [&] { return works(name); });
  }
  for (int i = 0; i < kills; ++i) {
    const std::string victim = "collector" + std::to_string(i % 3);
    std::printf("%s is killed (process %d)\n", victim.c_str(), collectors[victim]);
    kill(collectors[victim], SIGKILL);
    waitpid(collectors[victim], nullptr, 0);
    until("its death is known", [&] { return !works(victim); });
    const long before = total;
    until("the others have gone on", [&] { return total > before + 100; });
    collectors[victim] = start(victim);
    std::printf("%s is started again; meanwhile the others sent %ld rollouts\n", victim.c_str(),
                total - before);
    until("it works again", [&] { return works(victim); });
  }
  finished = true;  // the collectors leave
  for (const auto& [name, process] : collectors) waitpid(process, nullptr, 0);
  std::printf("%d collectors were killed and came back, the learner has %s\n", kills,
              total > 0 ? "learned all the time" : "learned nothing");
  std::filesystem::remove_all(path);
  return 0;
}

int main(int argc, char** argv) try {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string first = argc > 1 ? argv[1] : "6";
  if (first == "collect" && argc > 2) return collect(argv[2]);
  if (first.find_first_not_of("0123456789") == std::string::npos) return learn(std::stoi(first));
  std::fprintf(stderr, "usage: actor_pool [kills]     how often a collector is killed (6)\n");
  return first == "--help" ? 0 : 2;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
