#include "tests/simulation/order_simulation.h"

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "stitch/base/hash.h"

namespace stitch::transport::gpu::order_simulation {
namespace {

constexpr TransferOrder::Time kNow;  // the simulation has no timeouts

class World final : public simulation::History {
 public:
  World(std::uint64_t number, const Options& options)
      : History(number),
        options_(options),
        transfers_(options.transfers),
        devices_(options.devices) {
    for (Device& device : devices_) {
      device.order = TransferOrder(options.limits);
      device.queues.resize(options.queues);
    }
    double start = 0;
    for (std::size_t i = 0; i < transfers_.size(); ++i) {
      Transfer& transfer = transfers_[i];
      start += std::exponential_distribution<>(5.0)(random_);
      transfer.source = pick(devices_.size());
      transfer.destination = pick(devices_.size() - 1);
      if (transfer.destination >= transfer.source) ++transfer.destination;
      transfer.duration = uniform(0.05, 1.0);
      later(start, [this, i] { begin(i); });
      if (chance(options_.break_chance)) {
        const std::size_t end = chance(0.5) ? transfer.source : transfer.destination;
        later(start + uniform(0, 2),
              [this, i, end] { break_pair(end, pair_of(transfers_[i]), true); });
      }
    }
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      for (std::size_t j = 0; j < devices_.size(); ++j) {
        if (i == j) continue;
        const TransferOrder::Pair pair = i * devices_.size() + j;
        devices_[i].order.add_pair(pair, TransferOrder::End::source, 100 - i);
        devices_[j].order.add_pair(pair, TransferOrder::End::destination, 100 - i);
      }
    }
    for (std::size_t i = 0; i < options_.deaths; ++i) {
      const std::size_t device = pick(devices_.size());
      later(uniform(0, start), [this, device] { die(device); });
    }
  }

 private:
  struct Transfer {
    std::size_t source = 0, destination = 0;
    double duration = 0;
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

  void play() override {
    run_until_quiet(1'000'000, [this] { return step(); });
    if (!failed()) check_rest();
  }
  // The model counts in seconds.
  void later(double delay, simulation::Task task) {
    after(std::chrono::duration_cast<simulation::Duration>(std::chrono::duration<double>(delay)),
          std::move(task));
  }
  // After a random delay, unless that device is dead by then.
  void send(std::size_t to, simulation::Task task) {
    later(uniform(0.01, 0.5), [this, to, task = std::move(task)]() mutable {
      if (!devices_[to].dead) task();
    });
  }
  std::size_t device_at(const Transfer& transfer, std::size_t end) const {
    return end == 0 ? transfer.source : transfer.destination;
  }
  std::size_t queue_of(const Transfer& transfer, std::size_t device) const {
    return base::hash_of(transfer.source, transfer.destination, device) % options_.queues;
  }
  TransferOrder::Pair pair_of(const Transfer& transfer) const {
    return transfer.source * devices_.size() + transfer.destination;
  }

  // ---- the policies

  void begin(std::size_t number) {
    Transfer& transfer = transfers_[number];
    Device& source = devices_[transfer.source];
    if (source.dead) return;
    switch (options_.policy) {
      case Policy::eager:
        source.to_launch.push_back(number);
        pump(transfer.source);
        [[fallthrough]];
      case Policy::rendezvous:
        send(transfer.destination, [this, number] { on_rts(number, 0); });
        return;
      case Policy::agreed: {
        const auto clock = source.order.announce(pair_of(transfer), number, kNow);
        if (!clock) {
          transfer.ended[0] = true;  // the pair is broken: by staging
          return;
        }
        send(transfer.destination, [this, number, at = *clock] { on_rts(number, at); });
        return;
      }
    }
  }
  void on_rts(std::size_t number, std::uint64_t clock) {
    Transfer& transfer = transfers_[number];
    Device& destination = devices_[transfer.destination];
    if (options_.policy == Policy::agreed) {
      const auto answer = destination.order.accept(pair_of(transfer), number, clock);
      if (!answer) {
        transfer.ended[1] = true;
        return;  // the BREAK is on its way or was the cause
      }
      send(transfer.source, [this, number, at = *answer] { on_cts(number, at); });
    } else {
      destination.to_launch.push_back(number);
      if (options_.policy == Policy::rendezvous)
        send(transfer.source, [this, number] { on_cts(number, 0); });
    }
    pump(transfer.destination);
  }
  void on_cts(std::size_t number, std::uint64_t clock) {
    Transfer& transfer = transfers_[number];
    Device& source = devices_[transfer.source];
    if (options_.policy == Policy::agreed)
      source.order.agree(pair_of(transfer), number, clock);
    else
      source.to_launch.push_back(number);
    pump(transfer.source);
  }
  void break_pair(std::size_t device, TransferOrder::Pair pair, bool tell) {
    if (devices_[device].dead || !broken_.emplace(device, pair).second) return;
    const std::size_t end = pair / devices_.size() == device ? 0 : 1;
    const std::size_t peer = end == 0 ? pair % devices_.size() : pair / devices_.size();
    for (const std::uint64_t number : devices_[device].order.drop_pair(pair))
      transfers_[number].ended[end] = true;
    if (tell) send(peer, [this, peer, pair] { break_pair(peer, pair, false); });
    // The communicator is aborted a little later: its kernels leave their queues.
    later(uniform(0, 0.3), [this, device, pair, end] {
      if (devices_[device].dead) return;
      for (std::size_t i = 0; i < transfers_.size(); ++i) {
        if (pair_of(transfers_[i]) != pair || !transfers_[i].occupies[end]) continue;
        transfers_[i].ended[end] = true;
        vacate(device, i);
        devices_[device].order.finish(pair);
        --devices_[device].unfinished;
      }
      if (devices_[device].connecting && pair_of(transfers_[*devices_[device].connecting]) == pair)
        devices_[device].connecting.reset();
      pump(device);
    });
    pump(device);
  }
  void die(std::size_t device) {
    if (devices_[device].dead) return;
    devices_[device].dead = true;
    note("device ", device, " dies");
    for (std::size_t peer = 0; peer < devices_.size(); ++peer) {
      if (peer == device) continue;
      send(peer, [this, peer, device] {
        break_pair(peer, peer * devices_.size() + device, false);
        break_pair(peer, device * devices_.size() + peer, false);
      });
    }
  }

  // ---- the devices

  // Launches what may be launched.
  void pump(std::size_t number) {
    Device& device = devices_[number];
    while (!device.dead && !failed()) {
      if (device.synchronizing) {
        for (const auto& queue : device.queues)
          if (!queue.empty()) return;
        device.synchronizing = false;
      }
      if (device.connecting) {
        const Transfer& transfer = transfers_[*device.connecting];
        if (!transfer.launched[transfer.source == number ? 1 : 0]) return;
        device.connecting.reset();
      }
      std::size_t next = 0;
      if (options_.policy == Policy::agreed) {
        const auto launched = device.order.launch();
        if (!launched) return;
        next = launched->key.number;
        ++device.unfinished;
        check_key(number, next, launched->key);
      } else {
        if (device.to_launch.empty()) return;
        next = device.to_launch.front();
        device.to_launch.erase(device.to_launch.begin());
      }
      launch(number, next);
      if (chance(options_.sync_chance)) device.synchronizing = true;
      if (chance(options_.connect_chance)) device.connecting = next;
    }
  }
  void check_key(std::size_t device, std::size_t number, const TransferOrder::Key& key) {
    Transfer& transfer = transfers_[number];
    const std::size_t end = transfer.source == device ? 0 : 1;
    transfer.key[end] = key;
    if (transfer.key[1 - end] && *transfer.key[1 - end] != key)
      fail("the ends of transfer ", number, " launch it under two keys");
    if (devices_[device].last && key <= *devices_[device].last) {
      fail("device ", device, " launches transfer ", number,
           " under a key that is not above the last one");
    }
    devices_[device].last = key;
  }
  void launch(std::size_t device, std::size_t number) {
    Transfer& transfer = transfers_[number];
    const std::size_t end = transfer.source == device ? 0 : 1;
    transfer.launched[end] = transfer.occupies[end] = true;
    note("device ", device, " launches transfer ", number);
    devices_[device].queues[queue_of(transfer, device)].push_back(number);
    try_run(number);
    // An end that waits for this launch to connect may go on.
    const std::size_t peer = device_at(transfer, 1 - end);
    if (devices_[peer].connecting == number) later(0, [this, peer] { pump(peer); });
  }
  void try_run(std::size_t number) {
    Transfer& transfer = transfers_[number];
    if (transfer.running || transfer.done) return;
    for (std::size_t end = 0; end < 2; ++end) {
      const std::size_t device = device_at(transfer, end);
      if (devices_[device].dead || !transfer.occupies[end]) return;
      if (devices_[device].queues[queue_of(transfer, device)].front() != number) return;
    }
    transfer.running = true;
    later(transfer.duration, [this, number] { finish(number); });
  }
  // A transfer leaves its hardware queue.
  void vacate(std::size_t device, std::size_t number) {
    Transfer& transfer = transfers_[number];
    transfer.occupies[transfer.source == device ? 0 : 1] = false;
    transfer.running = false;
    for (auto& queue : devices_[device].queues) {
      std::erase(queue, number);
      if (!queue.empty()) try_run(queue.front());
    }
  }
  void finish(std::size_t number) {
    Transfer& transfer = transfers_[number];
    // Aborted at an end, or an end died, while it ran: the other end waits for its own abort.
    if (!transfer.running || devices_[transfer.source].dead || devices_[transfer.destination].dead)
      return;
    transfer.done = true;
    note("transfer ", number, " is done");
    for (std::size_t end = 0; end < 2; ++end) {
      const std::size_t device = device_at(transfer, end);
      transfer.ended[end] = true;
      vacate(device, number);
      if (options_.policy == Policy::agreed) {
        devices_[device].order.finish(pair_of(transfer));
        --devices_[device].unfinished;
      }
    }
    pump(transfer.source);
    pump(transfer.destination);
  }

  void check_rest() {
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      const Device& device = devices_[i];
      if (device.dead) continue;
      if (device.order.pending() != 0)
        return fail("device ", i, " waits to launch ", device.order.pending(), " transfers");
      if (device.order.launched() != device.unfinished)
        return fail("device ", i, " counts launches wrongly");
      for (const auto& queue : device.queues)
        if (!queue.empty()) return fail("device ", i, " is stuck in transfer ", queue.front());
    }
    for (std::size_t i = 0; i < transfers_.size(); ++i) {
      const Transfer& transfer = transfers_[i];
      if (devices_[transfer.source].dead || devices_[transfer.destination].dead) continue;
      const bool left = transfer.ended[0] && !transfer.done;  // by another path
      if (!transfer.done && !left) return fail("transfer ", i, " is not done");
      if (left && options_.break_chance == 0) return fail("transfer ", i, " left its path");
    }
  }
  const Options options_;
  std::vector<Transfer> transfers_;
  std::vector<Device> devices_;
  std::set<std::pair<std::size_t, TransferOrder::Pair>> broken_;  // (device, pair)
};

}  // namespace

simulation::Outcome run(std::uint64_t number, const Options& options) {
  return World(number, options).run();
}

}  // namespace stitch::transport::gpu::order_simulation
