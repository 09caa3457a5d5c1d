#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stitch/transport/gpu/transfer_order.h"

namespace stitch::transport::gpu::test {

// A discrete-event model of GPUs that move bytes between each other as NCCL does: a transfer runs
// once both its ends are at the head of a hardware queue of their device, and what stands behind it
// waits. Decides by a policy when an end launches; `agreed` drives one TransferOrder per device.
// Deterministic for a seed. Not thread-safe.
class OrderSimulation {
 public:
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

  OrderSimulation(std::uint64_t seed, const Options& options);
  // Runs until nothing can happen any more. Returns what is wrong then; empty: every transfer
  // between live devices is done or has left for staging, and nothing is left behind.
  std::string run();

 private:
  using Time = double;
  struct Transfer {
    std::size_t source = 0, destination = 0;
    Time duration = 0;
    // What each end knows: [0] source, [1] destination.
    bool launched[2] = {false, false};
    bool occupies[2] = {false, false};  // a hardware queue
    bool ended[2] = {false, false};     // done, or given up: its bytes go another way
    std::optional<TransferOrder::Key> key[2];
    bool running = false, done = false;
  };
  struct Device {
    TransferOrder order;
    std::vector<std::vector<std::size_t>> queues;
    std::vector<std::size_t> to_launch;  // by the policies without an order
    bool synchronizing = false;          // its launching thread waits for the device
    std::optional<std::size_t> connecting;
    std::optional<TransferOrder::Key> last;
    std::size_t unfinished = 0;  // launches that the order has not heard the end of
    bool dead = false;
  };

  void at(Time delay, std::function<void()> what);
  void send(std::size_t to, std::function<void()> what);  // after a random delay, unless dead
  double uniform(double from, double to);
  bool chance(double probability);
  TransferOrder::Pair pair_of(const Transfer& transfer) const;

  void begin(std::size_t number);
  void on_rts(std::size_t number, std::uint64_t clock);
  void on_cts(std::size_t number, std::uint64_t clock);
  void break_pair(std::size_t device, TransferOrder::Pair pair, bool tell);
  void die(std::size_t device);

  void pump(std::size_t device);  // launches what may be launched
  void launch(std::size_t device, std::size_t number);
  void try_run(std::size_t number);
  void finish(std::size_t number);
  void vacate(std::size_t device, std::size_t number);  // its hardware queue
  void check_key(std::size_t device, std::size_t number, const TransferOrder::Key& key);
  std::string verdict();

  std::mt19937_64 random_;
  Options options_;
  Time now_ = 0;
  std::uint64_t events_ = 0;
  std::map<std::pair<Time, std::uint64_t>, std::function<void()>> agenda_;
  std::vector<Transfer> transfers_;
  std::vector<Device> devices_;
  std::set<std::pair<std::size_t, TransferOrder::Pair>> broken_;  // (device, pair)
  std::string failure_;
};

}  // namespace stitch::transport::gpu::test
