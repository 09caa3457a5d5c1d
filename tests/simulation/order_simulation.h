#pragma once

#include <cstddef>
#include <cstdint>

#include "stitch/transport/gpu/transfer_order.h"
#include "tests/simulation/kernel.h"

namespace stitch::transport::gpu::order_simulation {

enum class Policy : std::uint8_t {
  eager,       // the source launches at once, the destination when it hears of the transfer
  rendezvous,  // the destination launches on the RTS, the source on the CTS
  agreed,      // TransferOrder
};
struct Options {
  Policy policy = Policy::agreed;
  std::size_t devices = 6;
  std::size_t transfers = 60;
  std::size_t queues = 1;     // hardware queues of a device
  double sync_chance = 0;     // that the launching thread then waits for the whole device
  double connect_chance = 0;  // that it then waits until the other end has launched, too
  double break_chance = 0;    // that a pair breaks at one end, per transfer
  std::size_t deaths = 0;     // devices that die, with their workers
  TransferOrder::Limits limits = {};
};

// A discrete-event model of GPUs that move bytes between each other as NCCL does: a transfer runs
// once both its ends are at the head of a hardware queue of their device, and what stands behind it
// waits. Decides by a policy when an end launches; `agreed` drives one TransferOrder per device.
// At the end every transfer between live devices is done or has left for staging, and nothing is
// left behind.
[[nodiscard]] simulation::Outcome run(std::uint64_t number, const Options& options);

}  // namespace stitch::transport::gpu::order_simulation
