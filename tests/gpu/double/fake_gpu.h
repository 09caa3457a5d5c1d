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
// world exists at a time, as the functions of the tables are plain functions. A thread of its own
// executes operations as they come; the seed chooses how long each takes. Calls of host threads are
// ordered as they come. Thread contract: any thread.
//
// Violations that were not taken with take_violations() fail the gtest when the world ends.
class FakeGpu {
 public:
  using Time = std::chrono::nanoseconds;
  static constexpr int kMaxProcesses = 4;

  struct Options {
    std::uint64_t seed = 1;
    int devices = 2;
    std::size_t device_memory = std::size_t{1} << 30;
    // Of each process on each device; 1 is CUDA_DEVICE_MAX_CONNECTIONS=1, 0 one for each stream.
    int hardware_queues = 8;
    // malloc, free and their pinned siblings wait until the device is idle.
    bool sync_on_alloc = false;
    bool sync_on_free = false;
    // A call that blocks longer is reported and fails.
    std::chrono::milliseconds block_limit{20'000};
  };

  FakeGpu();
  explicit FakeGpu(Options options);
  ~FakeGpu();
  FakeGpu(const FakeGpu&) = delete;
  FakeGpu& operator=(const FakeGpu&) = delete;

  [[nodiscard]] const CudaApi& cuda(int process = 0) const;
  [[nodiscard]] const NcclApi& nccl(int process = 0) const;

  // Waits until all work is done; then, or after a while, what is unfinished and why.
  std::string wait_until_idle(std::chrono::milliseconds limit = std::chrono::milliseconds(20'000));
  [[nodiscard]] std::string describe_unfinished() const;
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
    int gate = 0;                      // ends only when that gate is open
  };
  // Launches a kernel on a stream of that process (null: of its current device).
  cuda::Status launch(int process, cuda::Stream stream, Kernel kernel);
  // A kernel that fills memory, and one that notes whether the memory has only that byte.
  cuda::Status fill(int process, cuda::Stream stream, void* memory, std::size_t count, char value,
                    int gate = 0);
  cuda::Status check(int process, cuda::Stream stream, const void* memory, std::size_t count,
                     char value, std::shared_ptr<bool> equal);
  // A gate for kernels, closed at first.
  int make_gate();
  void open_gate(int gate);
  // Launches a kernel that ends only when the gate that is returned is open.
  [[nodiscard]] int hold(int process, cuda::Stream stream);
  // Whether a stream of a device has work behind a kernel with a gate.
  [[nodiscard]] bool has_held_work(int process, int device) const;

  // --- what libtorch calls, and the library does not ---------------------------------------------
  [[nodiscard]] int current_device(int process) const;
  // Makes it current; its context is created by the next call that needs it.
  void set_device_lazily(int process, int device);
  cuda::Status stream_wait_event(int process, cuda::Stream stream, cuda::Event event);

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
  // status from now on; until heal().
  void break_context(int process, int device, cuda::Status status);
  void heal();
  // As Options::sync_on_alloc, from now on.
  void set_sync_on_alloc(bool sync);
  void set_nccl_version(int process, int version);
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
  // The devices on which the process has created a context since the last call: a thread that calls
  // CUDA creates one on its current device, which is the first until it has set another.
  [[nodiscard]] std::vector<int> take_contexts(int process);
  [[nodiscard]] std::size_t open_communicators(int process = -1) const;
  [[nodiscard]] std::size_t live_streams() const;
  [[nodiscard]] std::size_t live_events() const;
  [[nodiscard]] std::size_t device_memory_used(int device) const;
  [[nodiscard]] std::size_t pinned_memory_used() const;

 private:
  std::unique_ptr<Machine> machine_;
};

}  // namespace stitch::transport::gpu::test
