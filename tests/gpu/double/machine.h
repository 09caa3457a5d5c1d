#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/double/fake_gpu.h"
#include "tests/gpu/double/fake_memory.h"
#include "tests/gpu/double/vector_clock.h"

namespace stitch::transport::gpu::test {

using Time = FakeGpu::Time;
struct Op;
using OpPtr = std::shared_ptr<Op>;
struct NcclKernel;

// A queue of operations. `tail` is the last one submitted, done or not.
struct FakeStream {
  int id = 0, process = 0, device = 0;
  bool blocking = false;  // waits for the default stream, and it for this
  bool is_default = false;
  std::size_t queue = 0;  // hardware queue
  std::size_t timeline = 0, unfinished = 0;
  std::uint64_t submitted = 0;
  OpPtr tail;
  bool capturing = false;
};

struct FakeEvent {
  int id = 0, process = 0, device = 0;
  OpPtr marker;  // null: never recorded
};

// One operation on a stream. It starts when all of `after` are done and ends `duration` later, or
// when its gate opens, or, NCCL's, when its transfers are done.
struct Op {
  enum class State { queued, running, done };
  int id = 0, process = 0, device = 0;
  std::string what;
  FakeStream* stream = nullptr;
  State state = State::queued;
  bool dropped = false;           // vanished with its context
  bool in_order = true;           // false: only waits for a hardware queue
  std::vector<OpPtr> after;       // stream order and events: happened before
  std::vector<OpPtr> behind;      // shares a hardware queue: only waited for
  std::vector<OpPtr> dependents;  // wait for this one
  std::size_t unmet = 0;
  VectorClock clock;  // of its submission, then of its start, then of its end
  Epoch epoch;
  std::optional<Time> duration;
  int gate = 0;
  std::function<void(Op&)> execute;
  std::shared_ptr<NcclKernel> nccl;
};

// A thread that calls, real or simulated.
struct FakeHost {
  std::string name;
  std::size_t timeline = 0;
  std::uint64_t actions = 0;
  VectorClock clock;
  std::uint64_t calls = 0;  // of functions of the tables
  bool spared = false;      // no injected error comes to it
  struct InProcess {
    int device = 0;
    cuda::Status last_error = cuda::kSuccess;
    cuda::CaptureMode capture_mode = cuda::kCaptureGlobal;
    int group_depth = 0;
    int group_error =
        0;  // of a call between group_start() and group_end(), which then does nothing
    std::shared_ptr<struct NcclGroup> group;
  };
  std::array<InProcess, FakeGpu::kMaxProcesses> in;
};

struct Caller {
  FakeHost& host;
  int process;
  FakeHost::InProcess& in;
};

// A host thread inside a call that blocks.
struct BlockedHost {
  const FakeHost* host = nullptr;
  int process = 0;
  std::string what;
  std::function<std::vector<OpPtr>()> waits_for;
  const struct NcclGroup* group = nullptr;
};

// The simulated machine. All of it is guarded by one lock, which invoke() takes; functions below
// expect it to be held. Two parts have classes of their own: FakeCuda and FakeNccl, whose functions
// are the tables.
class Machine {
 public:
  explicit Machine(FakeGpu::Options options);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  static Machine& current();

  // Runs `body(caller)` under the lock as that process, on this thread's host.
  template <typename Body>
  decltype(auto) as(int process, Body&& body) {
    const std::unique_lock<std::mutex> lock(mutex_);
    Caller caller = enter(process);
    return body(caller);
  }
  Caller enter(int process);
  FakeHost& this_host();
  // From now on this thread acts as the host of that name; returns what it acted as before.
  void* act_as(const std::string& name);
  static void act_as_before(void* host);
  // The host knows what the clock covers.
  void learn(Caller& caller, const VectorClock& clock);
  FakeMemory::Actor actor(Caller& caller, std::string what);

  // --- events in virtual time ---
  void schedule(Time delay, std::function<void()> action);
  bool step();
  Time draw();                   // a duration
  Time draw(std::size_t bytes);  // of moving bytes
  bool chance(double probability);

  // --- operations ---
  FakeStream& make_stream(int process, int device, bool blocking);
  OpPtr make_op(FakeStream& stream, std::string what);
  // Puts it at the end of its stream; `clock` is what its submitter knew.
  void submit(const OpPtr& op, const VectorClock& clock);
  void finish(const OpPtr& op);
  void drop_work(int process, int device);  // -1: of all devices
  [[nodiscard]] std::vector<OpPtr> unfinished_of(int process, int device) const;
  [[nodiscard]] std::vector<OpPtr> tails_of(int process, int device) const;

  // Blocks the calling thread until `ready`. False when that cannot come, which is reported.
  bool block_until(Caller& caller, const std::string& what, const std::function<bool()>& ready,
                   const std::function<std::vector<OpPtr>()>& waits_for,
                   const struct NcclGroup* group = nullptr);
  bool wait_until_device_idle(Caller& caller, int device, const std::string& what);
  // Any change that a blocked thread may wait for.
  void changed() { changed_.notify_all(); }

  // --- reports ---
  void violation(const std::string& text);
  [[nodiscard]] std::string describe_unfinished() const;
  [[nodiscard]] bool idle() const;

  FakeGpu::Options options;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<Time, std::uint64_t>, std::function<void()>> events;
  Time now{0};
  FakeMemory memory;
  std::vector<std::string> violations;
  std::map<int, OpPtr> unfinished;  // by id
  std::vector<std::unique_ptr<FakeStream>> streams;
  std::map<cuda::Stream, FakeStream*> stream_handles;
  std::map<std::pair<int, int>, FakeStream*> default_streams;  // by process and device
  std::map<cuda::Event, std::unique_ptr<FakeEvent>> event_handles;
  std::map<std::pair<int, int>, cuda::Status> broken;  // contexts
  std::set<std::pair<int, int>> contexts;              // created so far, by process and device
  std::map<std::pair<int, int>, int> peer_access;
  std::set<std::pair<int, std::string>> loaded;  // kernels, by process
  std::map<int, const FakeHost*> loading;        // processes whose context lock is held
  std::map<int, std::vector<int>> visible;
  std::map<int, bool> gates;
  std::map<std::pair<int, std::string>, std::size_t> calls;
  struct Injected {
    int process;
    std::string function;
    int status, left;
  };
  std::list<Injected> injected;
  std::list<BlockedHost*> blocked;
  std::map<std::string, std::unique_ptr<FakeHost>> hosts;
  std::size_t timelines = 0;
  std::uint64_t last_id = 0;
  VectorClock host_clock;  // of all hosts, where calls are ordered as they come
  std::unique_ptr<class FakeCuda> cuda;
  std::unique_ptr<class FakeNccl> nccl;
  std::array<CudaApi, FakeGpu::kMaxProcesses> cuda_tables{};
  std::array<NcclApi, FakeGpu::kMaxProcesses> nccl_tables{};

 private:
  void start(const OpPtr& op);
  void run_device();

  std::mt19937_64 random_;
  std::map<std::pair<std::pair<int, int>, std::size_t>, OpPtr> queue_tails_;
  std::map<std::pair<int, int>, std::size_t> queues_used_;
  bool stopping_ = false;
  std::thread thread_;
};

void fill_tables(Machine& machine);

}  // namespace stitch::transport::gpu::test
