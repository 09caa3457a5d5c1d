// Communicators whose other rank is in another process. Each process has half of a link: what its
// rank launches waits for what the other says.

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/gpu/double/fake_nccl.h"

namespace stitch::transport::gpu::test {

FakeNccl::~FakeNccl() {
  for (auto& [number, link] : links_) link->far.reset();
  for (const auto& [path, listener] : listeners_) {
    if (listener < 0) continue;
    close(listener);
    unlink(path.c_str());
  }
}

void FakeNccl::meet_far(FakeLink& link, const std::string& path) {
  const auto own = listeners_.find(path);
  const int listener = own == listeners_.end() ? -1 : std::exchange(own->second, -1);
  link.far = std::make_unique<FarRank>(
      machine_, listener, path, [this, &link](const FarMessage& message) { on_far(link, message); },
      [this, &link] { on_far_gone(link); });
}

void FakeNccl::on_far(FakeLink& link, const FarMessage& message) {
  FakeComm& comm = *link.here();
  FarRank& far = *link.far;
  switch (message.kind) {
    case FarMessage::Kind::hello: {
      if (!far.there) {  // the socket is
        FarMessage hello;
        hello.version = version_of(comm.process);
        hello.device = comm.device;
        hello.arena = machine_.memory.arena();
        return far.say(hello);
      }
      const bool same_device = message.device == comm.device && !machine_.options.duplicate_gpu;
      const nccl::Result result =
          message.version != version_of(comm.process) || same_device || far.arena == nullptr
              ? nccl::kInvalidUsage
              : nccl::kSuccess;
      machine_.schedule(machine_.draw(), [&comm, result] {
        if (comm.aborted || comm.state != nccl::kInProgress) return;
        comm.ready = result == nccl::kSuccess;
        comm.state = result;
      });
      return;
    }
    case FarMessage::Kind::wants:
      far.wanted.at(message.direction) = true;
      if (comm.group) advance(comm.group);
      return;
    case FarMessage::Kind::sending:
      far.offered = message;
      far.has_offer = true;
      return match_far(link);
    case FarMessage::Kind::taken: {
      NcclPiece* const sent = comm.running ? comm.running->next(true) : nullptr;
      if (sent == nullptr || !sent->moving) return;  // it has been aborted
      sent->done = true;
      finish_if_done(comm.running);
      return match_far(link);
    }
  }
}

void FakeNccl::on_far_gone(FakeLink& link) {
  FakeComm& comm = *link.here();
  if (comm.aborted || comm.destroyed) return;
  // One that is still opening is left to its caller's patience.
  if (!machine_.options.network_transport || !comm.ready) return;
  comm.state = nccl::kRemoteError;
  machine_.changed();
}

bool FakeNccl::connect_far(FakeLink& link, int direction) {
  FarRank& far = *link.far;
  const auto at = static_cast<std::size_t>(direction);
  if (!std::exchange(far.wants.at(at), true)) {
    FarMessage message;
    message.kind = FarMessage::Kind::wants;
    message.direction = static_cast<std::uint32_t>(direction);
    far.say(message);
  }
  link.connected[direction] = far.wanted.at(at);
  return link.connected[direction];
}

void FakeNccl::match_far(FakeLink& link) {
  FakeComm& comm = *link.here();
  if (!comm.running || comm.aborted) return;
  NcclPiece* const from = comm.running->next(true);
  if (from != nullptr && !from->moving) {
    const Op& op = *comm.running->op;
    from->moving = true;
    FarMessage message;
    message.kind = FarMessage::Kind::sending;
    message.offset = machine_.memory.arena_offset(from->memory);
    message.bytes = from->bytes;
    message.total = from->total;
    if (machine_.memory.access({op.process, op.device, &op.clock, op.epoch, op.what}, from->memory,
                               from->bytes, false))
      link.far->say(message);
  }
  NcclPiece* const to = comm.running->next(false);
  if (to == nullptr || to->moving || !link.far->has_offer) return;
  to->moving = true;
  machine_.schedule(machine_.draw(to->bytes), [this, &link, kernel = comm.running, to] {
    to->moving = false;
    if (!kernel->op || kernel->comm->aborted || kernel->comm->running != kernel) return;
    take_far(link);
  });
}

// The bytes that the other has offered, into the next receive.
void FakeNccl::take_far(FakeLink& link) {
  FakeComm& comm = *link.here();
  FarRank& far = *link.far;
  const std::shared_ptr<NcclKernel> kernel = comm.running;
  NcclPiece& to = *kernel->next(false);
  const Op& op = *kernel->op;
  if (far.offered.bytes != to.bytes || far.offered.total != to.total) {
    machine_.violation("NCCL's " + comm.name() + " has a recv of " + std::to_string(to.bytes) +
                       " bytes for a send of " + std::to_string(far.offered.bytes) +
                       " in another process: this hangs or corrupts");
  }
  const std::size_t bytes = std::min<std::size_t>(far.offered.bytes, to.bytes);
  const std::byte* const from = far.arena->at(far.offered.offset, bytes);
  if (from != nullptr && bytes > 0 &&
      machine_.memory.access({op.process, op.device, &op.clock, op.epoch, op.what}, to.memory,
                             to.bytes, true))
    std::memcpy(to.memory, from, bytes);
  to.done = true;
  far.has_offer = false;
  FarMessage message;
  message.kind = FarMessage::Kind::taken;
  far.say(message);
  finish_if_done(kernel);
  match_far(link);
}

}  // namespace stitch::transport::gpu::test
