// Two processes on one GPU that send each other bytes by one path: what arrives, whether anything
// that is stale is read, and what becomes of the one when the other is killed in the middle. On a
// GPU; with --meeting over the double of CUDA and NCCL.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "stitch/transport/gpu/gpu_libraries.h"
#include "tests/gpu/device/pair_end.h"
#include "tests/gpu/device/pair_stress.h"
#include "tests/gpu/double/fake_gpu.h"
#include "tests/support/temporary_folder.h"

namespace stitch::transport::gpu::check {

namespace {

using namespace std::chrono_literals;
using test::FakeGpu;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr int kNoDevice = 77;

struct Arguments {
  Path path = Path::staging;
  int trials = 1000;  // of stale reads
  int kills = 50;
  std::size_t delay = 64 * kMiB;  // bytes
  int delay_times = 4;            // that they are written
  std::string meeting{};          // of the double; empty: a GPU
  int socket = -1;                // of the second process
  Stress stress{};                // in place of all else, if it takes any time
};

std::optional<FakeGpu> double_of(const Arguments& arguments) {
  if (arguments.meeting.empty()) return std::nullopt;
  FakeGpu::Options options;
  options.driving = FakeGpu::Driving::thread;
  options.devices = 1;
  const char* const queues = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  options.hardware_queues = queues != nullptr ? std::atoi(queues) : 0;
  options.duplicate_gpu = true;
  options.network_transport = true;
  options.device_memory = std::size_t{8} << 30;
  options.meeting = arguments.meeting;
  return std::make_optional<FakeGpu>(options);
}

// NCCL takes one GPU twice where it sees two hosts, which then have only sockets between them.
void set_up_nccl(int number) {
  const std::string host = "stitch-pair-check-" + std::to_string(number);
  setenv("NCCL_HOSTID", host.c_str(), 1);
  for (const auto& [name, value] : std::map<std::string, std::string>{{"NCCL_SOCKET_IFNAME", "lo"},
                                                                      {"NCCL_NET", "Socket"},
                                                                      {"NCCL_NET_PLUGIN", "none"},
                                                                      {"NCCL_IB_DISABLE", "1"},
                                                                      {"NCCL_MNNVL_ENABLE", "0"},
                                                                      {"NCCL_NVLS_ENABLE", "0"},
                                                                      {"NCCL_RAS_ENABLE", "0"}})
    setenv(name.c_str(), value.c_str(), 0);
}

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

// The other process, which answers until it is killed or its socket ends.
class Other {
 public:
  explicit Other(const Arguments& arguments) {
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) fail("no sockets");
    static_cast<void>(fcntl(sockets[0], F_SETFD, FD_CLOEXEC));
    std::vector<std::string> words{"gpu_pair_check",
                                   "--path",
                                   std::string(short_name(arguments.path)),
                                   "--delay",
                                   std::to_string(arguments.delay),
                                   "--delay-times",
                                   std::to_string(arguments.delay_times),
                                   "--socket",
                                   std::to_string(sockets[1])};
    if (!arguments.meeting.empty()) words.insert(words.end(), {"--meeting", arguments.meeting});
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const int status =
        posix_spawn(&process_, "/proc/self/exe", nullptr, nullptr, argv.data(), environ);
    close(sockets[1]);
    socket_ = sockets[0];  // of this process alone
    if (status != 0) fail("the second process cannot be started");
  }
  ~Other() {
    if (process_ > 0) static_cast<void>(kill_it());
  }
  Other(const Other&) = delete;
  Other& operator=(const Other&) = delete;

  [[nodiscard]] int socket() const { return socket_; }
  int kill_it() {
    kill(process_, SIGKILL);
    return end();
  }
  // Its exit status, once it ends.
  int end() {
    int status = 0;
    waitpid(process_, &status, 0);
    process_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t process_ = -1;
  int socket_ = -1;
};

class Check {
 public:
  // `fake`: null on a GPU.
  Check(const Arguments& arguments, std::shared_ptr<Lanes> lanes, FakeGpu* fake)
      : arguments_(arguments), lanes_(std::move(lanes)), fake_(fake) {}

  // Each size by the path, with the right bytes; and nothing stale.
  void bytes() {
    // Long beside the frames and copies of a transfer, which do not wait for it where they are
    // wrong. The double puts what is not ordered into its report.
    if (arguments_.meeting.empty()) {
      arguments_.delay_times = writes_that_take(lanes_->cuda(), arguments_.delay, 3ms);
      std::printf("delay %s: %d times %zu bytes\n", name(), arguments_.delay_times,
                  arguments_.delay);
    }
    Other other(arguments_);
    {
      const auto end = open(other);
      control(*end);
      const auto before = end->sent_by(arguments_.path);
      const std::vector<std::size_t> sizes{1, 4096, 65'537, kMiB, 8 * kMiB, 41 * kMiB + 5};
      std::uint8_t value = 1;
      for (const std::size_t size : sizes) transfer(*end, size, ++value);
      if (end->sent_by(arguments_.path) != before + sizes.size()) fail("another path was taken");
      std::printf("pass %s: bytes of %zu sizes\n", name(), sizes.size());
      // The same memory at the source each time, which has other bytes as soon as it may.
      const auto source = end->source_of(kMiB);
      for (int i = 0; i < arguments_.trials; ++i)
        transfer(*end, kMiB, static_cast<std::uint8_t>(i % 200), source);
      std::printf("pass %s: %d trials, 0 stale\n", name(), arguments_.trials);
    }
    if (other.end() != 0) fail("the second process failed");
    arguments_.delay_times = Arguments{}.delay_times;
  }

  void kills() {
    std::mt19937 random(7);
    int failed = 0;
    for (int i = 0; i < arguments_.kills; ++i) {
      Other other(arguments_);
      const auto end = open(other);
      // Always some under way, however quick the path is.
      constexpr std::size_t kAtATime = 4;
      const auto until =
          std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 30'000);
      for (std::uint8_t k = 0; k < kAtATime || std::chrono::steady_clock::now() < until; ++k) {
        if (end->transfers().under_way() < kAtATime) {
          end->send(end->source_of(32 * kMiB), 32 * kMiB, k % 200);
        } else {
          std::this_thread::sleep_for(100us);  // enough are under way
        }
      }
      static_cast<void>(other.kill_it());
      if (!end->wait()) fail("kill " + std::to_string(i) + ": transfers do not end");
      for (const auto& outcome : end->take_outcomes()) {
        if (outcome.error) ++failed;
        if (outcome.verified && !*outcome.verified) fail("wrong bytes before a kill");
      }
      if (end->transfers().under_way() != 0) fail("something stays under way after a kill");
    }
    if (failed == 0 && arguments_.kills > 0) fail("no kill came in the middle of a transfer");
    std::printf("pass %s: %d kills, %d transfers failed, 0 hung\n", name(), arguments_.kills,
                failed);
  }

 private:
  [[nodiscard]] const char* name() const { return short_name(arguments_.path).data(); }

  // A source that does not wait for its producer is noticed: else nothing here shows anything.
  void control(PairEnd& end) {
    constexpr int kTrials = 10;
    int stale = 0;
    for (int i = 0; i < kTrials; ++i) {
      end.send(end.source_of(kMiB), kMiB, static_cast<std::uint8_t>(100 + i), false);
      if (!end.wait()) fail("a transfer does not end");
      for (const auto& outcome : end.take_outcomes()) {
        if (outcome.error) fail(outcome.error->what());
        stale += outcome.verified && !*outcome.verified ? 1 : 0;
      }
    }
    // Writes that nothing has waited for may be reported late.
    if (fake_ != nullptr && !fake_->wait_until_idle().empty()) fail("a write does not end");
    const std::string reported = fake_ != nullptr ? fake_->take_violations() : "";
    if (stale == 0 && reported.empty())
      fail("transfers that did not wait for their producer brought its bytes: the delay is short");
    std::printf("pass %s: %d of %d that do not wait are stale%s\n", name(), stale, kTrials,
                reported.empty() ? "" : ", or reported");
  }

  // With the path open.
  std::unique_ptr<PairEnd> open(const Other& other) {
    auto end = std::make_unique<PairEnd>(PairEnd::Options{
        other.socket(), 0, lanes_, arguments_.path, arguments_.delay, arguments_.delay_times});
    const auto limit = std::chrono::steady_clock::now() + 60s;
    while (end->sent_by(arguments_.path) == 0) {
      if (std::chrono::steady_clock::now() > limit) fail(std::string(name()) + " does not open");
      transfer(*end, 1000, 1);
    }
    return end;
  }
  void transfer(PairEnd& end, std::size_t bytes, std::uint8_t value,
                std::shared_ptr<Memory> source = nullptr) {
    if (!source) source = end.source_of(bytes);
    end.send(std::move(source), bytes, value);
    if (!end.wait()) fail("a transfer does not end");
    for (const auto& outcome : end.take_outcomes()) {
      if (outcome.error) fail(outcome.error->what());
      if (!outcome.verified) fail("the second process is gone");
      if (!*outcome.verified) fail("wrong bytes in " + std::to_string(bytes));
    }
  }

  Arguments arguments_;
  const std::shared_ptr<Lanes> lanes_;
  FakeGpu* const fake_;
};

int run(const Arguments& arguments) {
  const bool second = arguments.socket >= 0;
  const bool stress = arguments.stress.time.count() > 0;
  if (arguments.path == Path::nccl) set_up_nccl(stress ? arguments.stress.number : second ? 1 : 0);
  std::optional<FakeGpu> fake = double_of(arguments);
  std::optional<GpuLibraries> tables;
  std::optional<GpuLibraries::Override> over;
  if (fake) over.emplace(tables.emplace(&fake->cuda(), &fake->nccl(), ""));
  const GpuLibraries& libraries = GpuLibraries::of_process();
  if (libraries.cuda() == nullptr) {
    std::printf("%s\n", libraries.why_no_cuda().c_str());
    return kNoDevice;
  }
  if (arguments.path == Path::nccl && libraries.nccl() == nullptr) {
    std::printf("%s\n", libraries.why_no_nccl().c_str());
    return kNoDevice;
  }
  {
    const auto lanes = std::make_shared<Lanes>(*libraries.cuda(), libraries.nccl());
    if (stress) {
      std::optional<OtherProcesses> others;
      if (arguments.stress.number == 0) others.emplace(arguments.stress);
      run_stress(arguments.stress, others ? others->peers() : arguments.stress.peers, lanes);
      if (others && !others->end()) fail("another process failed");
    } else if (second) {
      PairEnd({arguments.socket, 1, lanes, arguments.path, arguments.delay, arguments.delay_times})
          .serve();
    } else {
      Check check(arguments, lanes, fake ? &*fake : nullptr);
      check.bytes();
      check.kills();
    }
  }
  const std::string violations = fake ? fake->take_violations() : "";
  if (!violations.empty()) fail(violations);
  return 0;
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  const std::map<std::string, Path> paths{{"staging", Path::staging}, {"nccl", Path::nccl}};
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    const std::string value = argv[i + 1];
    if (option == "--path") {
      arguments.path = paths.at(value);
    } else if (option == "--trials") {
      arguments.trials = std::stoi(value);
    } else if (option == "--kills") {
      arguments.kills = std::stoi(value);
    } else if (option == "--delay") {
      arguments.delay = std::stoul(value);
    } else if (option == "--delay-times") {
      arguments.delay_times = std::stoi(value);
    } else if (option == "--meeting") {
      arguments.meeting = value;
    } else if (option == "--socket") {
      arguments.socket = std::stoi(value);
    } else if (option == "--stress") {
      arguments.stress.time = std::chrono::seconds(std::stoi(value));
    } else if (option == "--processes") {
      arguments.stress.processes = std::stoi(value);
    } else if (option == "--number") {
      arguments.stress.number = std::stoi(value);
    } else if (option == "--peers") {
      arguments.stress.peers = value;
    } else {
      fail("unknown option " + option);
    }
  }
  arguments.stress.path = arguments.path;
  return arguments;
}

}  // namespace

}  // namespace stitch::transport::gpu::check

int main(int argc, char** argv) try {
  using namespace stitch::transport::gpu::check;
  auto arguments = parse(argc, argv);
  const stitch::testing::TemporaryFolder folder;
  if (arguments.meeting == "new") arguments.meeting = folder.path().string();
  arguments.stress.meeting = arguments.meeting;
  return run(arguments);
} catch (const std::exception& error) {
  std::printf("FAIL %s\n", error.what());
  return 1;
}
