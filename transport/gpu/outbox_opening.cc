// Between processes of one host: how memory is offered, mapped, tested and closed again. A source
// offers its outbox anew some time after it was refused or closed.

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {
namespace {

// Lane.
std::string text_of(Lane& lane, const OutboxStep& step) {
  return step.refusal.empty() ? lane.error_of(step.status, step.what).what() : step.refusal;
}

}  // namespace

bool DeviceTransfers::Impl::uses_outbox(Path path) const {
  return path == Path::ipc ? options_.use_ipc : options_.use_shared;
}

PathState DeviceTransfers::Impl::outbox_state(Lane& lane, Path path, PeerId peer,
                                              std::uint32_t to_device) const {
  const Outbox& outbox = lane.outbox(path);
  if (!uses_outbox(path) || outbox.unsupported()) return PathState::closed;
  // While peers hold all slots and do not give them back, none is waited for.
  if (outbox.all_lent_since(Clock::now() - options_.stall_timeout)) return PathState::closed;
  const auto at =
      own_outboxes_.find({peer, path, static_cast<std::uint32_t>(lane.device()), to_device});
  if (at == own_outboxes_.end()) return PathState::untried;
  const OwnOutbox& memory = at->second;
  const bool again = memory.state == PathState::closed && !memory.mapped && memory.pause.over();
  return again ? PathState::untried : memory.state;
}

// Lane of the source.
void DeviceTransfers::Impl::open_outbox(Lane& lane, Path path, PeerId peer,
                                        std::uint32_t to_device) {
  const auto device = static_cast<std::uint32_t>(lane.device());
  const OutboxKey key{peer, path, device, to_device};
  PairName pair{device, to_device, 0};
  {
    const base::MutexLock lock(mutex_);
    if (closing_ || peers_[peer].lost ||
        outbox_state(lane, path, peer, to_device) != PathState::untried)
      return;
    OwnOutbox& memory = own_outboxes_[key];
    memory.state = PathState::opening;
    pair.epoch = memory.offers++;
  }
  Outbox& outbox = lane.outbox(path);
  try {
    const OutboxStep prepared = outbox.prepare(lane.copies_out());
    if (!prepared.ok()) {
      const std::string why = text_of(lane, prepared);
      const base::MutexLock lock(mutex_);
      return outbox_failed(key, why.c_str());
    }
    lane.when_done(lane.copies_out(),
                   [self = shared_from_this(), &outbox, key, pair](cuda::Status) {
                     const auto [to, of, source, destination] = key;
                     outbox.add_user();
                     try {
                       self->send_frame(to, encode(OutboxOfferFrame{of, pair, outbox.handle()}));
                     } catch (...) {  // it is offered again
                       outbox.remove_user();
                       const base::MutexLock lock(self->mutex_);
                       self->outbox_failed(key, "no memory for a frame");
                     }
                   });
  } catch (const std::bad_alloc&) {
    const base::MutexLock lock(mutex_);
    outbox_failed(key, "no memory to offer it");
  }
}

void DeviceTransfers::Impl::outbox_failed(const OutboxKey& key, const char* why) {
  OwnOutbox& memory = own_outboxes_[key];
  memory.state = PathState::closed;
  memory.mapped = false;
  memory.pause.failure(options_.reopen_backoff);
  const auto& [peer, path, source, destination] = key;
  path_failed(peer, static_cast<int>(source), path, why);
}

void DeviceTransfers::Impl::on_outbox_offer(PeerId from, const OutboxOfferFrame& frame) {
  const auto device = static_cast<int>(frame.pair.destination_device);
  const auto refuse = [&](const char* why) {
    send_frame(from, encode(OutboxReadyFrame{frame.path, frame.pair, 1, why}));
  };
  if (device >= lanes_.device_count() || !uses_outbox(frame.path))
    return refuse("it is not used here");
  bool elsewhere = false;
  {
    const base::MutexLock lock(mutex_);
    const auto& hello = peers_[from].hello;
    elsewhere = hello && hello->process.host != options_.identity.host;
  }
  if (elsewhere) return refuse("its process is on another host");
  Lane* lane = nullptr;
  try {
    lane = &lanes_.lane(device);
  } catch (const Error& error) {  // no thread for it
    return refuse(error.what());
  }
  {
    const base::MutexLock lock(mutex_);
    const auto& hello = peers_[from].hello;
    if (hello && frame.pair.source_device >= hello->device_uuids.size())
      throw Error(ErrorCode::protocol, "OUTBOX_OFFER frame for memory of device " +
                                           std::to_string(frame.pair.source_device) +
                                           ", its sender has " +
                                           std::to_string(hello->device_uuids.size()));
    const auto [at, first] = peer_outboxes_.try_emplace(
        {from, frame.path, frame.pair.source_device, frame.pair.destination_device});
    PeerOutbox& memory = at->second;
    if (!first && (!memory.closed || frame.pair.epoch <= memory.offer))
      throw Error(ErrorCode::protocol, "second OUTBOX_OFFER frame for device " +
                                           std::to_string(frame.pair.source_device) +
                                           " to device " + std::to_string(device));
    memory.offer = frame.pair.epoch;
    memory.closed = false;
  }
  map_later(*lane, from, frame);
}

void DeviceTransfers::Impl::map_later(Lane& lane, PeerId from, const OutboxOfferFrame& frame) {
  {
    const base::MutexLock lock(mutex_);
    if (closing_ || peers_[from].lost) return;
  }
  const auto self = shared_from_this();
  if (lane.held()) {
    constexpr auto kPoll = std::chrono::milliseconds(10);
    lanes_.connector().post_at(base::deadline_after(kPoll),
                               [self, &lane, from, frame] { self->map_later(lane, from, frame); });
  } else {
    lane.post([self, &lane, from, frame] { self->map_outbox(lane, from, frame); });
  }
}

// Lane of the destination: maps the memory, and looks whether it is the right one.
void DeviceTransfers::Impl::map_outbox(Lane& lane, PeerId from, const OutboxOfferFrame& frame) {
  if (lane.held()) return map_later(lane, from, frame);
  const Path path = frame.path;
  const OutboxKey key{from, path, frame.pair.source_device, frame.pair.destination_device};
  const CudaApi& cuda = lanes_.cuda();
  {
    const base::MutexLock lock(mutex_);
    if (closing_ || peers_[from].lost) return;
  }
  // With the memory that the answer needs, so that there is one: its source waits for it.
  struct Mapping {
    Mapping(const CudaApi& api, Path of, const PairName& pair)
        : test(api, of),
          mapped_frame(encode(OutboxReadyFrame{of, pair, 0, ""})),
          no_memory_frame(encode(OutboxReadyFrame{of, pair, 1, "no memory to map it"})) {}
    OutboxTest test;
    base::Bytes mapped_frame;
    base::Bytes no_memory_frame;
    std::byte* mapped = nullptr;
    OutboxStep step{cuda::kLaunchFailure};
  };
  const auto mapping = std::make_shared<Mapping>(cuda, path, frame.pair);
  const auto end = [self = shared_from_this(), from, key, path, pair = frame.pair, mapping,
                    &lane](cuda::Status done) {
    mapping->test.done();
    const OutboxStep& step = mapping->step;
    const bool right = step.ok() && done == cuda::kSuccess && mapping->test.right();
    bool keep = false;
    {
      const base::MutexLock lock(self->mutex_);
      const auto at = self->peer_outboxes_.find(key);
      const bool wanted = !self->closing_ && !self->peers_[from].lost.has_value();
      if (at != self->peer_outboxes_.end()) {
        keep = right && wanted;
        at->second.closed = !keep;
        if (keep) at->second.mapped = mapping->mapped;
      }
    }
    if (keep) return self->send_frame(from, std::move(mapping->mapped_frame));
    // Device memory that is still mapped is not said not to be: its source might free it.
    if (mapping->mapped != nullptr &&
        !unmap_outbox_memory(self->lanes_.cuda(), path, mapping->mapped) && path == Path::ipc)
      return;
    base::Bytes answer;
    try {
      std::string why = !step.ok()               ? text_of(lane, step)
                        : done != cuda::kSuccess ? lane.error_of(done, step.what).what()
                        : !right                 ? "mapped memory has other bytes"
                                                 : "it is not wanted any more";
      answer = encode(OutboxReadyFrame{path, pair, 1, std::move(why)});
    } catch (const std::bad_alloc&) {
      answer = std::move(mapping->no_memory_frame);
    }
    self->send_frame(from, std::move(answer));
  };
  base::UniqueFunction<void(cuda::Status)> then(end);
  try {
    if (!lane.failure())
      mapping->step = map_outbox_memory(cuda, path, frame.handle, &mapping->mapped);
    if (mapping->step.ok()) mapping->step = mapping->test.begin(mapping->mapped, lane.copies_in());
  } catch (const std::bad_alloc&) {
    mapping->step.status = cuda::kOutOfMemory;
  }
  lane.when_done(lane.copies_in(), std::move(then));
}

void DeviceTransfers::Impl::on_outbox_ready(PeerId from, const OutboxReadyFrame& frame) {
  const OutboxKey key{from, frame.path, frame.pair.source_device, frame.pair.destination_device};
  {
    const base::MutexLock lock(mutex_);
    const auto at = own_outboxes_.find(key);
    if (at == own_outboxes_.end() || at->second.state != PathState::opening ||
        frame.pair.epoch + 1 != at->second.offers) {
      throw Error(ErrorCode::protocol, "OUTBOX_READY frame for memory that was not offered");
    }
    if (frame.failed != 0) {
      outbox_failed(key, frame.text.c_str());
    } else {
      at->second.state = PathState::open;
      at->second.mapped = true;
    }
  }
  if (frame.failed != 0) remove_outbox_user(static_cast<int>(frame.pair.source_device), frame.path);
}

void DeviceTransfers::Impl::on_outbox_closed(PeerId from, const OutboxClosedFrame& frame) {
  const OutboxKey key{from, frame.path, frame.pair.source_device, frame.pair.destination_device};
  {
    const base::MutexLock lock(mutex_);
    const auto at = own_outboxes_.find(key);
    if (at == own_outboxes_.end() || !at->second.mapped) return;
    if (frame.failed != 0) {
      outbox_failed(key, frame.text.c_str());
    } else {
      at->second.state = PathState::closed;
      at->second.mapped = false;
      at->second.pause.failure(options_.reopen_backoff);
    }
  }
  remove_outbox_user(static_cast<int>(frame.pair.source_device), frame.path);
}

void DeviceTransfers::Impl::ask_to_break_outbox(const OutgoingPtr& transfer, const Error& why) {
  OutboxBreakFrame frame;
  frame.pair.source_device = static_cast<std::uint32_t>(transfer->source.device);
  frame.pair.destination_device = static_cast<std::uint32_t>(transfer->to_device);
  frame.text = why.what();
  {
    const base::MutexLock lock(mutex_);
    frame.path = transfer->path;
    const auto at = own_outboxes_.find(
        {transfer->to, frame.path, frame.pair.source_device, frame.pair.destination_device});
    if (at == own_outboxes_.end() || at->second.state != PathState::open) return;
    at->second.state = PathState::closed;  // and mapped, until the peer says otherwise
    frame.pair.epoch = at->second.offers - 1;
  }
  send_frame(transfer->to, encode(frame));
}

void DeviceTransfers::Impl::on_outbox_break(PeerId from, const OutboxBreakFrame& frame) {
  const OutboxKey key{from, frame.path, frame.pair.source_device, frame.pair.destination_device};
  {
    const base::MutexLock lock(mutex_);
    const auto at = peer_outboxes_.find(key);
    if (at == peer_outboxes_.end() || at->second.mapped == nullptr ||
        at->second.offer != frame.pair.epoch)
      return;  // it is closed already
  }
  Lane& lane = lanes_.lane(static_cast<int>(frame.pair.destination_device));
  lane.post([self = shared_from_this(), &lane, key, why = frame.text] {
    self->break_outbox(lane, key, why);
  });
}

void DeviceTransfers::Impl::break_outbox(Lane& lane, const OutboxKey& key, const std::string& why) {
  const auto& [from, path, source, destination] = key;
  PeerOutbox memory;
  std::vector<IncomingPtr> left;
  {
    const base::MutexLock lock(mutex_);
    const auto at = peer_outboxes_.find(key);
    if (at == peer_outboxes_.end() || at->second.mapped == nullptr) return;
    for (const auto& [id, transfer] : incoming_) {
      if (id.first == from && transfer->wanted && transfer->rts && transfer->rts->path == path &&
          transfer->lane == &lane && transfer->rts->pair.source_device == source)
        left.push_back(transfer);
    }
    memory = std::exchange(at->second, {at->second.offer, nullptr, false});
  }
  // Each by itself: what there is no memory for must not keep the others.
  for (const IncomingPtr& transfer : left) guarded(transfer, [&] { retry(transfer); });
  try {
    unmap_outbox(key, memory, true, why);
  } catch (...) {  // its source uses it no more; it is unmapped when the peer is lost
    const base::MutexLock lock(mutex_);
    const auto at = peer_outboxes_.find(key);
    if (at != peer_outboxes_.end()) at->second.mapped = memory.mapped;
  }
}

void DeviceTransfers::Impl::remove_outbox_user(int device, Path path) {
  Lane& lane = lanes_.lane(device);
  lane.post([&lane, path] { lane.outbox(path).remove_user(); });
}

void DeviceTransfers::Impl::unmap_outbox(const OutboxKey& key, const PeerOutbox& memory, bool tell,
                                         const std::string& why) {
  const auto& [from, path, source, destination] = key;
  Lane& lane = lanes_.lane(static_cast<int>(destination));
  if (!begin_call()) return;
  const std::shared_ptr<void> ended(nullptr,
                                    [self = shared_from_this()](void*) { self->end_call(); });
  OutboxClosedFrame closed{path,
                           {source, destination, memory.offer},
                           static_cast<std::uint8_t>(why.empty() ? 0 : 1),
                           why};
  lane.post(
      [self = shared_from_this(), &lane, key, memory, tell, closed = std::move(closed), ended] {
        lane.when_done(lane.copies_in(), [self, key, memory, tell, closed, ended](cuda::Status) {
          const Path path = std::get<Path>(key);
          // Device memory that is still mapped is not said not to be: its source might free it.
          if (!unmap_outbox_memory(self->lanes_.cuda(), path, memory.mapped) && path == Path::ipc)
            return;
          {
            const base::MutexLock lock(self->mutex_);
            const auto at = self->peer_outboxes_.find(key);
            if (at != self->peer_outboxes_.end()) at->second.closed = true;
          }
          if (tell) self->send_frame(std::get<0>(key), encode(closed));
        });
      });
}

// Unmaps what `peer` (none: all) has offered, once nothing reads it any more, and says so.
void DeviceTransfers::Impl::close_outboxes(std::optional<PeerId> peer, bool tell) {
  std::vector<std::pair<OutboxKey, PeerOutbox>> mapped;
  std::vector<std::tuple<Path, int, int>> lent;  // of the path, device, slot
  {
    const base::MutexLock lock(mutex_);
    for (auto& [key, memory] : peer_outboxes_) {
      if (memory.mapped == nullptr || (peer && std::get<0>(key) != *peer)) continue;
      mapped.emplace_back(key, memory);
      memory.mapped = nullptr;
    }
    for (const auto& [key, transfer] : lent_slots_) {
      const auto& [holder, path, device, slot] = key;
      if (!peer || holder == *peer) lent.emplace_back(path, device, slot);
    }
    std::erase_if(lent_slots_,
                  [&](const auto& each) { return !peer || std::get<0>(each.first) == *peer; });
  }
  // A peer whose connection broke may live, and still copy out of its slots, as may the peers of a
  // worker that shuts down, which reads no FREE any more: they stay lent, and no transfer of any
  // worker of the process is to wait for them.
  for (const auto& [path, device, slot] : lent) {
    Lane& lane = lanes_.lane(device);
    Outbox& outbox = lane.outbox(path);
    lane.post([&outbox, slot = slot] { outbox.lend(slot, Clock::time_point::min()); });
    lanes_.connector().post_at(
        base::deadline_after(options_.slot_grace),
        [&lane, &outbox, slot = slot] { lane.post([&outbox, slot] { outbox.give_back(slot); }); });
  }
  for (const auto& [key, memory] : mapped) unmap_outbox(key, memory, tell, "");
}

}  // namespace stitch::transport::gpu
