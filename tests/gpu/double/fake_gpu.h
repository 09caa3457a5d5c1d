#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/transport/gpu/cuda_api.h"
#include "stitch/transport/gpu/nccl_api.h"

namespace stitch::transport::gpu::test {

class Machine;

// A simulated machine with GPUs behind the tables CudaApi and NcclApi: the double of CUDA and NCCL.
// Streams are queues, copies and kernels move bytes when they execute in virtual time, NCCL's sends
// and receives are rendezvous. It is strict where the real libraries hang, corrupt or forgive: what
// is not ordered by streams, events or what the host has seen is reported as a violation.
//
// Several simulated processes live in it, each with tables of its own (a thread needs no mark). One
// world exists at a time, as the functions of the tables are plain functions.
//
// Two ways of driving it. `steps`: nothing happens but in step() and in calls that block, all
// chosen by the seed, so that a run can be repeated; `thread`: a thread executes operations as they
// come. Any thread may call any function.
//
// Violations that were not taken with take_violations() fail the gtest when the world ends.
class FakeGpu {
 public:
  using Time = std::chrono::nanoseconds;
  static constexpr int kMaxProcesses = 16;

  enum class Driving { steps, thread };
  // When one host thread is known to be after another: whenever its call comes later (programs with
  // real threads), or only by publish() and observe() (simulations).
  enum class HostOrder { as_called, as_published };

  struct Options {
    std::uint64_t seed = 1;
    Driving driving = Driving::steps;
    HostOrder host_order = HostOrder::as_called;
    int devices = 2;
    std::size_t device_memory = std::size_t{1} << 30;
    // Of each process on each device; 1 is CUDA_DEVICE_MAX_CONNECTIONS=1, 0 one for each stream.
    int hardware_queues = 8;
    std::size_t launch_limit = 1024;  // unfinished operations on a stream before the host blocks
    // malloc, free and their pinned siblings wait until the device is idle.
    bool sync_on_alloc = false;
    bool sync_on_free = false;
    // The first launch of each kernel (by name) waits until the device is idle, and other calls of
    // its process wait for it: CUDA_MODULE_LOADING=LAZY.
    bool lazy_loading = false;
    bool peer_access = true;  // else no device can access another
    // A folder in which processes that each have such a world meet, as processes on one machine:
    // they have communicators with each other. Empty: none do.
    std::string meeting = {};
    // Two ranks of a communicator on one device; NCCL refuses that.
    bool duplicate_gpu = false;
    // A rank sees kRemoteError when its peer aborts or dies; over NVLink nothing is seen.
    bool network_transport = false;
    int nccl_version = nccl::version_code(2, 28, 9);
    int cuda_version = 13000;
    // Called in a call that blocks, without a lock, when driven by steps: runs some of what other
    // hosts would do meanwhile. False: there was nothing to do.
    std::function<bool()> while_blocked = nullptr;
    // When driven by a thread, a call that blocks longer is reported and fails.
    std::chrono::milliseconds block_limit{20'000};
  };

  FakeGpu();
  explicit FakeGpu(Options options);
  ~FakeGpu();
  FakeGpu(const FakeGpu&) = delete;
  FakeGpu& operator=(const FakeGpu&) = delete;

  [[nodiscard]] const CudaApi& cuda(int process = 0) const;
  [[nodiscard]] const NcclApi& nccl(int process = 0) const;

  // --- driving -------------------------------------------------------------------------------
  // Executes the next event. False when there is none.
  bool step();
  // The virtual time, and that of the next event.
  [[nodiscard]] Time now() const;
  [[nodiscard]] std::optional<Time> next_event() const;
  // Lets time pass: executes all events until then.
  void run_until(Time time);
  // Executes events until there are none. Empty when all work is done, else who waits for whom: the
  // cycle, if there is one, and the seed. A closed gate is no deadlock but is named.
  std::string run();
  // Driven by a thread: waits until all work is done. Else like run().
  std::string wait_until_idle(std::chrono::milliseconds limit = std::chrono::milliseconds(20'000));
  // What is unfinished and why; empty when nothing is.
  [[nodiscard]] std::string describe_unfinished() const;

  // --- violations ----------------------------------------------------------------------------
  // What was done wrong so far, one a line; the last line has the seed. Empty when nothing was.
  [[nodiscard]] std::string violations() const;
  // The same, and forgets them.
  std::string take_violations();

  // --- work of users ---------------------------------------------------------------------------
  struct Bytes {
    const void* memory = nullptr;
    std::size_t count = 0;
  };
  struct Kernel {
    std::string name = "kernel";
    std::vector<Bytes> reads, writes;  // what `body` touches
    std::function<void()> body;        // called when the kernel ends, under the machine's lock
    std::optional<Time> duration;      // else chosen by the seed
    int gate = 0;                      // ends only when that gate is open
  };
  // Launches a kernel on a stream of that process (null: of its current device).
  cuda::Status launch(int process, cuda::Stream stream, Kernel kernel);
  // A kernel that fills memory, and one that notes whether the memory has only that byte.
  cuda::Status fill(int process, cuda::Stream stream, void* memory, std::size_t count, char value);
  cuda::Status check(int process, cuda::Stream stream, const void* memory, std::size_t count,
                     char value, std::shared_ptr<bool> equal);
  // A gate for kernels, closed at first.
  int make_gate();
  void open_gate(int gate);
  // The host itself touches known memory: checked like an operation. A cache that hands memory to
  // a new user does host_write.
  void host_read(int process, const void* memory, std::size_t count);
  void host_write(int process, const void* memory, std::size_t count);

  // --- host threads ------------------------------------------------------------------------------
  // Makes this thread act as another host thread for a block, so that one thread can simulate many.
  // Names are the identity.
  class AsHost {
   public:
    AsHost(FakeGpu& world, const std::string& name);
    ~AsHost();
    AsHost(const AsHost&) = delete;
    AsHost& operator=(const AsHost&) = delete;

   private:
    void* before_;
  };
  // What this host thread knows, to travel with a message to another.
  using Token = std::shared_ptr<const void>;
  [[nodiscard]] Token publish();
  void observe(const Token& token);

  // --- failures --------------------------------------------------------------------------------
  // The n-th call from now (1: the next) of that function in that process returns the status and
  // does nothing else.
  void inject(int process, const std::string& cuda_function, cuda::Status status, int nth = 1);
  void inject(int process, const std::string& nccl_function, nccl::Result result, int nth = 1);
  // Calls of this host thread do not count for that, nor fail by it.
  void spare_this_host();
  // Whether all that was injected has come.
  [[nodiscard]] bool all_injected() const;
  // The context of that process on that device is dead: its work vanishes, its calls return the
  // status from now on.
  void break_context(int process, int device, cuda::Status status);
  // The process is gone: its work, memory and communicators.
  void kill(int process);
  // What comm_get_async_error() says from now on.
  void set_async_error(int process, nccl::Comm comm, nccl::Result result);
  // As Options::sync_on_alloc, from now on.
  void set_sync_on_alloc(bool sync);
  void set_nccl_version(int process, int version);
  // Devices of the machine that the process sees, in its numbering (CUDA_VISIBLE_DEVICES).
  void set_visible_devices(int process, std::vector<int> devices);
  // A thread of the program captures that stream into a graph, in CUDA's default mode, which is
  // global: until it ends, a call of any thread that might be unsafe is reported, returns
  // cudaErrorStreamCaptureUnsupported, and the capture is invalid; unless the thread is in another
  // mode (thread_exchange_stream_capture_mode).
  void set_capturing(int process, cuda::Stream stream, bool capturing);

  // --- what was called -------------------------------------------------------------------------
  // How often a function of CudaApi was called, or of NcclApi with "nccl_" in front of its name, by
  // one process or all (-1).
  [[nodiscard]] std::size_t calls(const std::string& function, int process = -1) const;
  // How many calls of the tables this host thread has made.
  [[nodiscard]] std::uint64_t calls_of_this_host() const;
  // The devices of the machine on which the process has a context: a thread that calls CUDA creates
  // one on its current device, which is the first until it has set another.
  [[nodiscard]] std::vector<int> contexts(int process) const;
  // Host threads that launched NCCL's kernels on a device of that process.
  [[nodiscard]] std::size_t nccl_launching_hosts(int process, int device) const;
  [[nodiscard]] std::size_t open_communicators(int process = -1) const;
  [[nodiscard]] std::size_t live_streams(int process = -1) const;
  [[nodiscard]] std::size_t live_events(int process = -1) const;
  [[nodiscard]] std::size_t device_memory_used(int device) const;
  [[nodiscard]] std::size_t pinned_memory_used() const;
  [[nodiscard]] std::uint64_t seed() const;

 private:
  std::unique_ptr<Machine> machine_;
};

}  // namespace stitch::transport::gpu::test
