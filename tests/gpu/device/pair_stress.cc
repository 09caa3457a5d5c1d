#include "tests/gpu/device/pair_stress.h"

#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

namespace stitch::transport::gpu::check {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kAtATime = 4;  // transfers to each of the others

[[noreturn]] void give_up(const std::string& what) { throw std::runtime_error(what); }

void check_outcomes(PairEnd& end, std::size_t& checked) {
  for (const auto& outcome : end.take_outcomes()) {
    if (outcome.error) give_up(outcome.error->what());
    if (!outcome.verified) give_up("another process is gone");
    if (!*outcome.verified) give_up("wrong bytes");
    ++checked;
  }
}

// Until the time is over; returns how many have arrived.
std::size_t send_all(PairEnd& end, std::uint64_t seed, Clock::time_point until) {
  std::mt19937_64 random(seed);
  std::size_t checked = 0;
  while (Clock::now() < until) {
    for (std::size_t i = 0; i < kAtATime; ++i) {
      const std::size_t bytes = 1 + random() % (random() % 4 == 0 ? 8'000'000 : 100'000);
      end.send(end.source_of(bytes), bytes, static_cast<std::uint8_t>(random() % 200));
    }
    if (!end.wait()) give_up("transfers do not end");
    check_outcomes(end, checked);
  }
  return checked;
}

}  // namespace

OtherProcesses::OtherProcesses(std::vector<std::string> words, int processes) {
  std::map<std::pair<int, int>, int> sockets;  // (own, other): one end
  for (int one = 0; one < processes; ++one) {
    for (int other = one + 1; other < processes; ++other) {
      int ends[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) give_up("no sockets");
      sockets[{one, other}] = ends[0];
      sockets[{other, one}] = ends[1];
    }
  }
  const auto text_of = [&](int number) {
    std::string peers;
    for (const auto& [pair, socket] : sockets) {
      if (pair.first == number)
        peers += std::to_string(pair.second) + ':' + std::to_string(socket) + ',';
    }
    return peers;
  };
  for (int number = 1; number < processes; ++number) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    for (const auto& [pair, socket] : sockets) {  // its own stay open
      if (pair.first == number) posix_spawn_file_actions_adddup2(&actions, socket, socket);
    }
    std::vector<std::string> all = words;
    all.insert(all.end(), {"--number", std::to_string(number), "--peers", text_of(number)});
    std::vector<char*> argv;
    for (std::string& word : all) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_t process = -1;
    const int status =
        posix_spawn(&process, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (status != 0) give_up("process " + std::to_string(number) + " cannot be started");
    processes_.push_back(process);
  }
  peers_ = text_of(0);
  for (const auto& [pair, socket] : sockets) {
    if (pair.first != 0) close(socket);
  }
}

void OtherProcesses::kill_all() {
  for (const int process : processes_) kill(process, SIGKILL);
  static_cast<void>(end());
}

bool OtherProcesses::end() {
  bool passed = true;
  for (const int process : std::exchange(processes_, {})) {
    int status = 0;
    waitpid(process, &status, 0);
    passed = passed && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  return passed;
}

std::map<int, int> peers_of(const std::string& text) {
  std::map<int, int> sockets;
  std::istringstream all(text);
  for (std::string each; std::getline(all, each, ',');)
    sockets[std::stoi(each)] = std::stoi(each.substr(each.find(':') + 1));
  return sockets;
}

void run_stress(Path path, std::chrono::seconds time, int own, const std::string& peers,
                const std::shared_ptr<Lanes>& lanes) {
  const CudaApi& cuda = lanes->cuda();
  std::map<int, std::unique_ptr<PairEnd>> ends;
  for (const auto& [other, socket] : peers_of(peers)) {
    PairEnd::Options options;
    options.socket = socket;
    options.number = own < other ? 0 : 1;
    options.host = static_cast<std::uint64_t>(own);
    options.lanes = lanes;
    options.path = path;
    ends[other] = std::make_unique<PairEnd>(std::move(options));
  }
  // Everything is on the path before the time begins.
  const auto limit = Clock::now() + 60s;
  std::size_t checked = 0;
  for (const auto& [other, end] : ends) {
    while (end->sent_by(path) == 0) {
      if (Clock::now() > limit) give_up(std::string(short_name(path)) + " does not open");
      end->send(end->source_of(1000), 1000, 1);
      if (!end->wait()) give_up("a transfer does not end");
      check_outcomes(*end, checked);
    }
  }
  const auto until = Clock::now() + time;
  std::atomic<bool> over{false};
  std::thread allocating([&] {
    std::mt19937_64 random(static_cast<std::uint64_t>(own));
    while (!over) {
      const Memory memory(cuda, std::size_t{1} << (16 + random() % 10));
      std::this_thread::sleep_for(1ms);
    }
  });
  std::mutex mutex;
  std::string wrong;
  std::atomic<std::size_t> all{0};
  std::atomic<std::uint64_t> by_path{0};
  std::vector<std::thread> senders;
  for (const auto& [other, end] : ends) {
    senders.emplace_back([&, number = other, sender = end.get()] {
      try {
        all += send_all(*sender, static_cast<std::uint64_t>(100 * own + number), until);
        // Before the other end may close.
        if (sender->transfers().counters().breaks != 0)
          give_up("communicators with process " + std::to_string(number) + " broke");
        by_path += sender->sent_by(path);
        if (!sender->finish()) give_up("process " + std::to_string(number) + " does not finish");
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        wrong = error.what();
      }
    });
  }
  for (std::thread& each : senders) each.join();
  over = true;
  allocating.join();
  if (!wrong.empty()) give_up(wrong);
  if (by_path < all / 2) give_up("most went by another path");
  std::printf("pass %s: stress, process %d of %zu: %zu transfers, 0 stalls\n",
              short_name(path).data(), own, ends.size() + 1, all.load());
}

}  // namespace stitch::transport::gpu::check
