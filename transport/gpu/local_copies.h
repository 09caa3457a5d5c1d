#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "stitch/transport/gpu/device_transfers.h"

namespace stitch::transport::gpu {

struct Incoming;
class Lane;
class Transfers;

// Transfers between workers of one process: one copy, on the lane of the destination. The source
// offers its memory in Lanes, so frames have no address. Copies between two devices need a test
// that has copied bytes right. Owned by Transfers. Thread contract: on lanes.
class LocalCopies {
 public:
  explicit LocalCopies(Transfers& transfers) : transfers_(transfers) {}

  // Lane of the destination. `key`: of the offer, from RTS.
  void start(const std::shared_ptr<Incoming>& transfer, std::uint64_t key);
  // Lane of the source.
  void test(PeerId to, int source, int destination);

 private:
  // Null data when the device has no memory.
  [[nodiscard]] DeviceMemory memory_for_test(Lane& lane);
  void failed(PeerId peer, int device, int source, int destination, const std::string& why);

  Transfers& transfers_;
};

}  // namespace stitch::transport::gpu
