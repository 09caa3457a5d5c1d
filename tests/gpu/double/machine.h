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
struct NcclGroup;

// A queue of operations. `tail` is the last one submitted, done or not.
struct FakeStream {
  int id = 0, process = 0, device = 0;
  bool blocking = false;  // waits for the default stream, and it for this
  bool is_default = false;
  std::size_t queue = 0;  // hardware queue
  std::size_t timeline = 0;
  std::uint64_t submitted = 0;
  OpPtr tail;
  bool capturing = false;
};

struct FakeEvent {
  int process = 0, device = 0;
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
  std::vector<OpPtr> after;       // stream order and events: happened before
  std::vector<OpPtr> behind;      // shares a hardware queue: only waited for
  std::vector<OpPtr> dependents;  // wait for this one
  std::size_t unmet = 0;
  VectorClock clock;  // of its submission, then of its start, then of its end
  Epoch epoch;
  Time duration{0};
  int gate = 0;
  std::function<void(Op&)> execute;
  std::shared_ptr<NcclGroup> nccl;
};

// A thread that calls.
struct FakeHost {
  std::string name;
  std::uint64_t calls = 0;  // of functions of the tables
  bool spared = false;      // no injected error comes to it
  struct InProcess {
    int device = 0;
    cuda::Status last_error = cuda::kSuccess;
    cuda::CaptureMode capture_mode = cuda::kCaptureGlobal;
    std::shared_ptr<NcclGroup> group;  // between group_start() and group_end()
    int group_error = 0;               // of a call in between, which then does nothing
  };
  std::array<InProcess, FakeGpu::kMaxProcesses> in;
};

struct Caller {
  FakeHost& host;
  int process;
  FakeHost::InProcess& in;
};

// The simulated machine. All of it is guarded by one lock, which as() takes; functions below expect
// it to be held. Two parts have classes of their own: FakeCuda and FakeNccl, whose functions are
// the tables.
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
  FakeMemory::Actor actor(const Caller& caller, std::string what) const;

  // --- events in virtual time ---
  void schedule(Time delay, std::function<void()> action);
  Time draw(std::size_t bytes = 0);  // a duration, of moving so many bytes

  // --- operations ---
  FakeStream& make_stream(int process, int device, bool blocking);
  OpPtr make_op(FakeStream& stream, std::string what);
  // Puts it at the end of its stream; `clock` is what its submitter knew.
  void submit(const OpPtr& op, const VectorClock& clock);
  void finish(const OpPtr& op);
  void drop_work(int process, int device);

  // Blocks the calling thread until all of these are done, of which the host then knows. False when
  // that takes too long, which is reported.
  bool wait_for(const Caller& caller, const std::vector<OpPtr>& ops, const std::string& what);
  bool wait_until_device_idle(const Caller& caller, int device, const std::string& what);
  // Any change that a blocked thread may wait for.
  void changed() { changed_.notify_all(); }

  // --- reports ---
  void violation(const std::string& text);
  [[nodiscard]] std::string describe_unfinished() const;
  [[nodiscard]] bool idle() const;

  FakeGpu::Options options;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  FakeMemory memory;
  std::vector<std::string> violations;
  std::map<int, OpPtr> unfinished;  // by id
  std::map<cuda::Stream, FakeStream*> stream_handles;
  std::map<std::pair<int, int>, FakeStream*> default_streams;  // by process and device
  std::map<cuda::Event, std::unique_ptr<FakeEvent>> event_handles;
  std::map<std::pair<int, int>, cuda::Status> broken;  // contexts
  std::set<std::pair<int, int>> contexts;              // created so far, by process and device
  std::map<int, bool> gates;
  std::map<std::pair<int, std::string>, std::size_t> calls;
  struct Injected {
    int process;
    std::string function;
    int status, left;
  };
  std::list<Injected> injected;
  std::uint64_t last_id = 0;
  VectorClock host_clock;  // of all hosts: their calls are ordered as they come
  std::unique_ptr<class FakeCuda> cuda;
  std::unique_ptr<class FakeNccl> nccl;
  std::array<CudaApi, FakeGpu::kMaxProcesses> cuda_tables{};
  std::array<NcclApi, FakeGpu::kMaxProcesses> nccl_tables{};

 private:
  bool step();
  void start(const OpPtr& op);
  void run_device();

  std::mt19937_64 random_;
  std::map<std::pair<Time, std::uint64_t>, std::function<void()>> events_;
  Time now_{0};
  std::vector<std::unique_ptr<FakeStream>> streams_;
  std::map<std::pair<std::pair<int, int>, std::size_t>, OpPtr> queue_tails_;
  std::map<std::pair<int, int>, std::size_t> queues_used_;
  std::list<FakeHost> hosts_;
  std::uint64_t actions_ = 0;  // of hosts
  bool stopping_ = false;
  std::thread thread_;
};

void fill_tables(Machine& machine);

}  // namespace stitch::transport::gpu::test
