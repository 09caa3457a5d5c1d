// Two processes on one GPU that send each other bytes by one path: what arrives, whether anything
// that is stale is read, and what becomes of the one when the other is killed in the middle. On a
// GPU; with --double over the double of CUDA.
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
  std::size_t delay = 64 * kMiB;   // bytes
  int delay_times = 4;             // that they are written
  bool on_double = false;          // in place of a GPU
  std::chrono::seconds stress{0};  // in place of all else, if it takes any time
  int processes = 2;
  int number = 0;       // of this process; 0 starts the others
  std::string peers{};  // as OtherProcesses has them

  // For the others.
  [[nodiscard]] std::vector<std::string> words() const {
    std::vector<std::string> all{"gpu_pair_check",
                                 "--path",
                                 std::string(short_name(path)),
                                 "--delay",
                                 std::to_string(delay),
                                 "--delay-times",
                                 std::to_string(delay_times),
                                 "--stress",
                                 std::to_string(stress.count())};
    if (on_double) all.insert(all.end(), {"--double", "yes"});
    return all;
  }
};

std::optional<FakeGpu> double_of(const Arguments& arguments) {
  if (!arguments.on_double) return std::nullopt;
  FakeGpu::Options options;
  options.devices = 1;
  options.hardware_queues = 0;
  options.device_memory = std::size_t{8} << 30;
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

class Check {
 public:
  // `fake`: null on a GPU.
  Check(const Arguments& arguments, std::shared_ptr<Lanes> lanes, FakeGpu* fake)
      : arguments_(arguments), lanes_(std::move(lanes)), fake_(fake) {}

  // Each size by the path, with the right bytes; and nothing stale.
  void bytes() {
    // Long beside the frames and copies of a transfer, which do not wait for it where they are
    // wrong. The double puts what is not ordered into its report.
    if (!arguments_.on_double) {
      arguments_.delay_times = writes_that_take(lanes_->cuda(), arguments_.delay, 3ms);
      std::printf("delay %s: %d times %zu bytes\n", name(), arguments_.delay_times,
                  arguments_.delay);
    }
    OtherProcesses other(arguments_.words(), 2);  // answers until its socket ends
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
    if (!other.end()) fail("the second process failed");
    arguments_.delay_times = Arguments{}.delay_times;
  }

  void kills() {
    std::mt19937 random(7);
    int failed = 0;
    for (int i = 0; i < arguments_.kills; ++i) {
      OtherProcesses other(arguments_.words(), 2);  // answers until its socket ends
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
      other.kill_all();
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
  std::unique_ptr<PairEnd> open(const OtherProcesses& other) {
    auto end = std::make_unique<PairEnd>(PairEnd::Options{peers_of(other.peers()).at(1), 0, lanes_,
                                                          arguments_.path, arguments_.delay,
                                                          arguments_.delay_times});
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
  if (arguments.path == Path::nccl) set_up_nccl(arguments.number);
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
    if (arguments.stress.count() > 0) {
      std::optional<OtherProcesses> others;
      if (arguments.number == 0) others.emplace(arguments.words(), arguments.processes);
      run_stress(arguments.path, arguments.stress, arguments.number,
                 others ? others->peers() : arguments.peers, lanes);
      if (others && !others->end()) fail("another process failed");
    } else if (arguments.number > 0) {
      PairEnd({peers_of(arguments.peers).at(0), 1, lanes, arguments.path, arguments.delay,
               arguments.delay_times})
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
    } else if (option == "--double") {
      arguments.on_double = true;
    } else if (option == "--stress") {
      arguments.stress = std::chrono::seconds(std::stoi(value));
    } else if (option == "--processes") {
      arguments.processes = std::stoi(value);
    } else if (option == "--number") {
      arguments.number = std::stoi(value);
    } else if (option == "--peers") {
      arguments.peers = value;
    } else {
      fail("unknown option " + option);
    }
  }
  return arguments;
}

}  // namespace

}  // namespace stitch::transport::gpu::check

int main(int argc, char** argv) try {
  using namespace stitch::transport::gpu::check;
  return run(parse(argc, argv));
} catch (const std::exception& error) {
  std::printf("FAIL %s\n", error.what());
  return 1;
}
