#include "tests/gpu/order_simulation.h"

#include <algorithm>
#include <memory>

#include "stitch/base/hash.h"

namespace stitch::transport::gpu::test {
namespace {

constexpr TransferOrder::Time kNow;  // the simulation has no timeouts

}  // namespace

OrderSimulation::OrderSimulation(std::uint64_t seed, const Options& options)
    : random_(seed), options_(options), transfers_(options.transfers), devices_(options.devices) {
  for (Device& device : devices_) {
    device.order = TransferOrder(options.limits);
    device.queues.resize(options.queues);
  }
  Time start = 0;
  for (std::size_t i = 0; i < transfers_.size(); ++i) {
    Transfer& transfer = transfers_[i];
    start += std::exponential_distribution<>(5.0)(random_);
    transfer.source = random_() % devices_.size();
    transfer.destination = random_() % (devices_.size() - 1);
    if (transfer.destination >= transfer.source) ++transfer.destination;
    transfer.duration = uniform(0.05, 1.0);
    at(start, [this, i] { begin(i); });
    if (chance(options_.break_chance)) {
      const std::size_t end = chance(0.5) ? transfer.source : transfer.destination;
      at(start + uniform(0, 2), [this, i, end] { break_pair(end, pair_of(transfers_[i]), true); });
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
    const std::size_t device = random_() % devices_.size();
    at(uniform(0, start), [this, device] { die(device); });
  }
}

double OrderSimulation::uniform(double from, double to) {
  return std::uniform_real_distribution<>(from, to)(random_);
}
bool OrderSimulation::chance(double probability) { return uniform(0, 1) < probability; }

TransferOrder::Pair OrderSimulation::pair_of(const Transfer& transfer) const {
  return transfer.source * devices_.size() + transfer.destination;
}

void OrderSimulation::at(Time delay, std::function<void()> what) {
  agenda_.emplace(std::pair(now_ + delay, ++events_), std::move(what));
}

void OrderSimulation::send(std::size_t to, std::function<void()> what) {
  at(uniform(0.01, 0.5), [this, to, what = std::move(what)] {
    if (!devices_[to].dead) what();
  });
}

std::string OrderSimulation::run() {
  while (!agenda_.empty() && failure_.empty()) {
    auto event = agenda_.extract(agenda_.begin());
    now_ = event.key().first;
    try {
      event.mapped()();
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  return failure_.empty() ? verdict() : failure_;
}

// --- the policies ---

void OrderSimulation::begin(std::size_t number) {
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

void OrderSimulation::on_rts(std::size_t number, std::uint64_t clock) {
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
    if (options_.policy == Policy::rendezvous) {
      send(transfer.source, [this, number] { on_cts(number, 0); });
    }
  }
  pump(transfer.destination);
}

void OrderSimulation::on_cts(std::size_t number, std::uint64_t clock) {
  Transfer& transfer = transfers_[number];
  Device& source = devices_[transfer.source];
  if (options_.policy == Policy::agreed) {
    source.order.agree(pair_of(transfer), number, clock);
  } else {
    source.to_launch.push_back(number);
  }
  pump(transfer.source);
}

void OrderSimulation::break_pair(std::size_t device, TransferOrder::Pair pair, bool tell) {
  if (devices_[device].dead || !broken_.emplace(device, pair).second) return;
  const std::size_t end = pair / devices_.size() == device ? 0 : 1;
  const std::size_t peer = end == 0 ? pair % devices_.size() : pair / devices_.size();
  for (const std::uint64_t number : devices_[device].order.drop_pair(pair)) {
    transfers_[number].ended[end] = true;
  }
  if (tell) {
    send(peer, [this, peer, pair] { break_pair(peer, pair, false); });
  }
  // The communicator is aborted a little later: its kernels leave their queues.
  at(uniform(0, 0.3), [this, device, pair, end] {
    if (devices_[device].dead) return;
    for (std::size_t i = 0; i < transfers_.size(); ++i) {
      if (pair_of(transfers_[i]) != pair || !transfers_[i].occupies[end]) continue;
      transfers_[i].ended[end] = true;
      vacate(device, i);
      devices_[device].order.finish(pair);
      --devices_[device].unfinished;
    }
    if (devices_[device].connecting && pair_of(transfers_[*devices_[device].connecting]) == pair) {
      devices_[device].connecting.reset();
    }
    pump(device);
  });
  pump(device);
}

void OrderSimulation::die(std::size_t device) {
  if (devices_[device].dead) return;
  devices_[device].dead = true;
  for (std::size_t peer = 0; peer < devices_.size(); ++peer) {
    if (peer == device) continue;
    send(peer, [this, peer, device] {
      break_pair(peer, peer * devices_.size() + device, false);
      break_pair(peer, device * devices_.size() + peer, false);
    });
  }
}

// --- the devices ---

void OrderSimulation::pump(std::size_t number) {
  Device& device = devices_[number];
  while (!device.dead && failure_.empty()) {
    if (device.synchronizing) {
      for (const auto& queue : device.queues) {
        if (!queue.empty()) return;
      }
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

void OrderSimulation::check_key(std::size_t device, std::size_t number,
                                const TransferOrder::Key& key) {
  Transfer& transfer = transfers_[number];
  const std::size_t end = transfer.source == device ? 0 : 1;
  transfer.key[end] = key;
  if (transfer.key[1 - end] && *transfer.key[1 - end] != key) {
    failure_ = "the ends of transfer " + std::to_string(number) + " launch it under two keys";
  }
  if (devices_[device].last && key <= *devices_[device].last) {
    failure_ = "device " + std::to_string(device) + " launches transfer " + std::to_string(number) +
               " under a key that is not above the last one";
  }
  devices_[device].last = key;
}

void OrderSimulation::launch(std::size_t device, std::size_t number) {
  Transfer& transfer = transfers_[number];
  const std::size_t end = transfer.source == device ? 0 : 1;
  transfer.launched[end] = transfer.occupies[end] = true;
  const std::size_t queue =
      base::hash_of(transfer.source, transfer.destination, device) % options_.queues;
  devices_[device].queues[queue].push_back(number);
  try_run(number);
  // An end that waits for this launch to connect may go on.
  const std::size_t peer = end == 0 ? transfer.destination : transfer.source;
  if (devices_[peer].connecting == number) at(0, [this, peer] { pump(peer); });
}

void OrderSimulation::try_run(std::size_t number) {
  Transfer& transfer = transfers_[number];
  if (transfer.running || transfer.done) return;
  for (std::size_t end = 0; end < 2; ++end) {
    const std::size_t device = end == 0 ? transfer.source : transfer.destination;
    if (devices_[device].dead || !transfer.occupies[end]) return;
    const std::size_t queue =
        base::hash_of(transfer.source, transfer.destination, device) % options_.queues;
    if (devices_[device].queues[queue].front() != number) return;
  }
  transfer.running = true;
  at(transfer.duration, [this, number] { finish(number); });
}

void OrderSimulation::vacate(std::size_t device, std::size_t number) {
  Transfer& transfer = transfers_[number];
  transfer.occupies[transfer.source == device ? 0 : 1] = false;
  transfer.running = false;
  for (auto& queue : devices_[device].queues) {
    std::erase(queue, number);
    if (!queue.empty()) try_run(queue.front());
  }
}

void OrderSimulation::finish(std::size_t number) {
  Transfer& transfer = transfers_[number];
  // Aborted at an end, or an end died, while it ran: the other end waits for its own abort.
  if (!transfer.running || devices_[transfer.source].dead || devices_[transfer.destination].dead) {
    return;
  }
  transfer.done = true;
  for (std::size_t end = 0; end < 2; ++end) {
    const std::size_t device = end == 0 ? transfer.source : transfer.destination;
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

std::string OrderSimulation::verdict() {
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    const Device& device = devices_[i];
    if (device.dead) continue;
    if (device.order.pending() != 0) {
      return "device " + std::to_string(i) + " waits to launch " +
             std::to_string(device.order.pending()) + " transfers";
    }
    if (device.order.launched() != device.unfinished) {
      return "device " + std::to_string(i) + " counts launches wrongly";
    }
    for (const auto& queue : device.queues) {
      if (!queue.empty()) {
        return "device " + std::to_string(i) + " is stuck in transfer " +
               std::to_string(queue.front());
      }
    }
  }
  for (std::size_t i = 0; i < transfers_.size(); ++i) {
    const Transfer& transfer = transfers_[i];
    if (devices_[transfer.source].dead || devices_[transfer.destination].dead) continue;
    const bool left = transfer.ended[0] && !transfer.done;  // by another path
    if (!transfer.done && !left) return "transfer " + std::to_string(i) + " is not done";
    if (left && options_.break_chance == 0) {
      return "transfer " + std::to_string(i) + " left its path";
    }
  }
  return {};
}

}  // namespace stitch::transport::gpu::test
