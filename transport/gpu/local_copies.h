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
// offers its memory in Lanes: no address is in a frame. Copies between two devices are used once a
// test has copied bytes right. Owned by Transfers. Thread contract: on lanes.
class LocalCopies {
 public:
  explicit LocalCopies(Transfers& transfers) : transfers_(transfers) {}

  // Lane of the destination. `key`: of the offer, as RTS says it.
  void start(const std::shared_ptr<Incoming>& transfer, std::uint64_t key);
  // Lane of the source.
  void test(PeerId to, int source, int destination);

 private:
  // Of PeerCopyTest; null data where there is none.
  [[nodiscard]] DeviceMemory memory_for_test(Lane& lane);
  void failed(PeerId peer, int device, int source, int destination, const std::string& why);

  Transfers& transfers_;
};

}  // namespace stitch::transport::gpu
