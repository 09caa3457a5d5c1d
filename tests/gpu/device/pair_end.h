#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "stitch/transport/gpu/device_transfers.h"
#include "stitch/transport/gpu/lanes.h"

namespace stitch::transport::gpu::check {

// Bytes of a device and a stream that writes them, which end with it.
class Memory {
 public:
  Memory(const CudaApi& cuda, std::size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] cuda::Stream stream() const noexcept { return stream_; }

 private:
  const CudaApi& cuda_;
  void* data_ = nullptr;
  cuda::Stream stream_ = nullptr;
};

// How often `bytes` have to be written on device 0 to take it at least `time`.
[[nodiscard]] int writes_that_take(const CudaApi& cuda, std::size_t bytes,
                                   std::chrono::milliseconds time);

// Throws std::runtime_error with the text of the status.
void require(const CudaApi& cuda, cuda::Status status, const char* what);

// One of two processes that send each other bytes of device 0 by DeviceTransfers, over a socket.
// What arrives is looked at on the device's own stream, and its sender is told. Thread contract:
// one thread, beside those of its own.
class PairEnd {
 public:
  struct Options {
    int socket = -1;           // taken over
    std::uint64_t number = 0;  // of this end, 0 or 1
    std::shared_ptr<Lanes> lanes;
    Path path = Path::staging;    // the only one it is to use, but while that is being opened
    std::size_t delay_bytes = 0;  // written on the device before and after each transfer
    int delay_times = 4;          // so often
    std::uint64_t host = number;  // with a path of NCCL: that this process passes for
  };
  struct Outcome {
    bool sent = false;             // its end at the source
    std::optional<bool> verified;  // at the destination
    std::optional<Error> error;
  };

  explicit PairEnd(Options options);
  ~PairEnd();
  PairEnd(const PairEnd&) = delete;
  PairEnd& operator=(const PairEnd&) = delete;

  // Memory to send so many bytes from.
  [[nodiscard]] std::shared_ptr<Memory> source_of(std::size_t bytes) const;
  // Fills `source` with `value`, behind a delay, and sends it; as soon as that has ended it has
  // other bytes. Not `ordered`: without waiting for what fills it, which is wrong.
  std::uint64_t send(std::shared_ptr<Memory> source, std::size_t bytes, std::uint8_t value,
                     bool ordered = true);
  // Waits for all that was sent; false after a minute.
  [[nodiscard]] bool wait();
  // Of all that was sent since the last call.
  [[nodiscard]] std::vector<Outcome> take_outcomes();
  [[nodiscard]] std::uint64_t sent_by(Path path) const;
  [[nodiscard]] DeviceTransfers& transfers() noexcept { return *transfers_; }
  // Until the other end is gone.
  void serve();
  // Where both ends send: waits for the other end's finish(). False after a minute, or if it is
  // gone.
  [[nodiscard]] bool finish();

 private:
  struct Arrived {
    std::uint64_t id = 0;
    std::shared_ptr<Memory> memory;
    std::size_t bytes = 0;
    std::uint8_t value = 0;
  };
  void write(char kind, const void* bytes, std::size_t count);
  void read_all();
  void on_named(const std::vector<std::byte>& body);
  void on_verified(const std::vector<std::byte>& body);
  void verify_all();
  [[nodiscard]] bool holds(const Arrived& arrived);
  void delay(const Memory& memory, std::size_t behind);

  const Options options_;
  const CudaApi& cuda_;
  const std::shared_ptr<Memory> consumer_;  // on whose stream arrivals are looked at
  std::mutex writing_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, Outcome> outcomes_;
  std::deque<Arrived> arrived_;
  bool lost_ = false;
  bool other_is_done_ = false;
  bool ending_ = false;
  std::unique_ptr<DeviceTransfers> transfers_;
  std::thread verifier_;
  std::thread reader_;
};

}  // namespace stitch::transport::gpu::check
