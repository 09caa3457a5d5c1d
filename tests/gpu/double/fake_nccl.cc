#include "tests/gpu/double/fake_nccl.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/gpu/double/fake_cuda.h"

namespace stitch::transport::gpu::test {
namespace {

using nccl::Result;

FakeMemory::Actor actor_of(const Op& op) {
  return {op.process, op.device, &op.clock, op.epoch, op.what};
}

std::string describe_piece(const NcclPiece& piece) {
  return std::string(piece.send ? "send" : "recv") + " of " + std::to_string(piece.bytes) +
         " bytes";
}

}  // namespace

NcclPiece* NcclGroup::next(bool send) {
  const auto at = std::find_if(pieces.begin(), pieces.end(), [send](const NcclPiece& piece) {
    return piece.send == send && !piece.done;
  });
  return at == pieces.end() ? nullptr : &*at;
}

std::size_t NcclGroup::count(bool send) const {
  return static_cast<std::size_t>(std::count_if(
      pieces.begin(), pieces.end(), [send](const auto& piece) { return piece.send == send; }));
}

std::string NcclGroup::describe() const {
  return "NCCL's " + comm->name() + ": " + describe_piece(pieces.front()) +
         (pieces.size() > 1 ? ", ..." : "");
}

FakeComm* FakeNccl::find(Caller& caller, nccl::Comm comm, const char* function) {
  const auto found = comms.find(comm);
  if (found == comms.end() || found->second->process != caller.process ||
      found->second->destroyed) {
    machine_.violation(std::string(function) + "() got no communicator of process " +
                       std::to_string(caller.process));
    return nullptr;
  }
  return found->second.get();
}

int FakeNccl::version_of(int process) const {
  const auto found = versions.find(process);
  return found == versions.end() ? nccl::version_code(2, 28, 9) : found->second;
}

Result FakeNccl::get_version(Caller& caller, int* version) {
  *version = version_of(caller.process);
  return nccl::kSuccess;
}

Result FakeNccl::get_unique_id(Caller&, nccl::UniqueId* id) {
  std::memset(id->internal, 0, sizeof(id->internal));
  ++unique_ids_;
  std::memcpy(id->internal, &unique_ids_, sizeof(unique_ids_));
  return nccl::kSuccess;
}

// --- init ---------------------------------------------------------------------------------------

Result FakeNccl::comm_init_rank_config(Caller& caller, nccl::Comm* handle, int ranks,
                                       nccl::UniqueId id, int rank, nccl::Config* config) {
  *handle = nullptr;
  // It initializes CUDA and allocates on the calling thread, whatever the configuration says.
  if (!machine_.cuda->implicit_sync(caller, machine_.options.sync_on_alloc,
                                    "comm_init_rank_config"))
    return nccl::kUnhandledCudaError;
  std::uint64_t number = 0;
  std::memcpy(&number, id.internal, sizeof(number));
  if (number < 1 || number > unique_ids_ || ranks != 2 || rank < 0 || rank >= ranks ||
      config->magic != nccl::Config{}.magic || config->size != sizeof(nccl::Config) ||
      config->blocking != 0)
    return nccl::kInvalidArgument;
  if (static_cast<int>(config->version) > version_of(caller.process)) return nccl::kInvalidUsage;
  FakeLink& link = links_[number];
  if (link.rank[rank] != nullptr) return nccl::kInvalidUsage;
  auto made = std::make_unique<FakeComm>();
  made->id = static_cast<int>(comms.size()) + 1;
  made->process = caller.process;
  made->device = caller.in.device;
  made->rank = rank;
  made->link = &link;
  link.rank[rank] = made.get();
  *handle = reinterpret_cast<nccl::Comm>((std::uintptr_t{3} << 48) |
                                         (static_cast<std::uintptr_t>(made->id) << 4));
  comms[*handle] = std::move(made);
  if (link.rank[0] == nullptr || link.rank[1] == nullptr) return nccl::kInProgress;
  for (FakeComm* comm : link.rank) {
    const FakeComm& peer = *comm->peer();
    const bool match =
        version_of(comm->process) == version_of(peer.process) && comm->device != peer.device;
    machine_.schedule(machine_.draw(), [comm, match] {
      if (comm->aborted || comm->state != nccl::kInProgress) return;
      comm->state = match ? nccl::kSuccess : nccl::kInvalidUsage;
    });
  }
  return nccl::kInProgress;
}

// --- groups -------------------------------------------------------------------------------------

Result FakeNccl::add(Caller& caller, const NcclPiece& piece, int peer, nccl::Comm handle,
                     cuda::Stream stream, const char* function) {
  FakeComm* const comm = find(caller, handle, function);
  if (comm == nullptr) return nccl::kInvalidArgument;
  const auto wrong = [&](const std::string& text) {
    machine_.violation(std::string(function) + "() on " + comm->name() + " " + text);
    return nccl::kInvalidArgument;
  };
  if (peer != 1 - comm->rank) return wrong("got rank " + std::to_string(peer));
  if (comm->state == nccl::kInProgress)
    return wrong("before its last operation was seen to succeed");
  if (comm->state != nccl::kSuccess) return comm->state;
  const FakeMemory::Place place = machine_.memory.find(piece.memory);
  if (piece.bytes > 0 &&
      (place.block < 0 || place.kind != FakeMemory::Kind::device || place.device != comm->device))
    return wrong("got memory that is not on device " + std::to_string(comm->device));
  FakeStream* const on = machine_.cuda->find(caller, stream, function);
  if (on == nullptr) return nccl::kInvalidArgument;
  if (on->device != comm->device) return wrong("got a stream of another device");
  const auto group = caller.in.group ? caller.in.group : std::make_shared<NcclGroup>();
  if (group->comm != nullptr && (group->comm != comm || group->stream != on))
    return wrong("is in one group with another communicator or stream");
  group->comm = comm;
  group->stream = on;
  group->pieces.push_back(piece);
  return caller.in.group ? nccl::kSuccess : run_group(group);
}

Result FakeNccl::send(Caller& caller, const void* memory, std::size_t count, nccl::DataType,
                      int peer, nccl::Comm comm, cuda::Stream stream) {
  return add(caller, {true, const_cast<void*>(memory), count}, peer, comm, stream, "send");
}

Result FakeNccl::recv(Caller& caller, void* memory, std::size_t count, nccl::DataType, int peer,
                      nccl::Comm comm, cuda::Stream stream) {
  return add(caller, {false, memory, count}, peer, comm, stream, "recv");
}

Result FakeNccl::group_start(Caller& caller) {
  caller.in.group = std::make_shared<NcclGroup>();
  caller.in.group_error = nccl::kSuccess;
  return nccl::kSuccess;
}

Result FakeNccl::group_end(Caller& caller) {
  const auto group = std::exchange(caller.in.group, nullptr);
  if (!group) {
    machine_.violation("group_end() without group_start()");
    return nccl::kInvalidUsage;
  }
  // Where a call of a group has failed, NCCL launches nothing of it.
  if (caller.in.group_error != nccl::kSuccess) return static_cast<Result>(caller.in.group_error);
  return group->pieces.empty() ? nccl::kSuccess : run_group(group);
}

Result FakeNccl::run_group(const std::shared_ptr<NcclGroup>& group) {
  FakeComm& comm = *group->comm;
  if (comm.destroyed || comm.aborted) return nccl::kInvalidUsage;
  group->clock = machine_.host_clock;
  comm.group = group;
  comm.state = nccl::kInProgress;
  advance(group);
  return nccl::kInProgress;
}

// The first transfer in a direction takes part in a handshake of both ranks.
void FakeNccl::advance(const std::shared_ptr<NcclGroup>& group) {
  if (group->scheduled) return;
  FakeComm& comm = *group->comm;
  const FakeComm* const peer = comm.peer();
  const auto other = peer != nullptr && !peer->aborted ? peer->group : nullptr;
  bool ready = true;
  bool met = false;
  for (const NcclPiece& piece : group->pieces) {
    bool& connected = comm.link->connected[piece.send ? comm.rank : 1 - comm.rank];
    if (connected || comm.aborted) continue;
    met = met || (other && other->next(!piece.send) != nullptr);
    connected = other && other->next(!piece.send) != nullptr;
    ready = ready && connected;
  }
  if (ready) {
    group->scheduled = true;
    machine_.schedule(machine_.draw(), [this, group] { launch(group); });
  }
  if (met) advance(other);
}

void FakeNccl::launch(const std::shared_ptr<NcclGroup>& group) {
  FakeComm& comm = *group->comm;
  if (comm.group == group) comm.group.reset();
  if (comm.aborted || comm.destroyed || comm.state == nccl::kUnhandledCudaError) return;
  group->op = machine_.make_op(*group->stream, group->describe());
  group->op->nccl = group;
  if (comm.last) group->op->behind.push_back(comm.last);  // a communicator is one queue
  comm.last = group->op;
  comm.kernels.push_back(group->op);
  machine_.submit(group->op, group->clock);
  if (comm.state == nccl::kInProgress) comm.state = nccl::kSuccess;
}

// --- transfers ----------------------------------------------------------------------------------

void FakeNccl::started(const std::shared_ptr<NcclGroup>& group) {
  group->comm->running = group;
  if (!group->comm->aborted) return match(*group->comm->link);
  machine_.schedule(machine_.draw(), [this, group] { abandon(group); });
}

void FakeNccl::match(FakeLink& link) {
  for (FakeComm* comm : link.rank) {
    FakeComm* const peer = comm == nullptr ? nullptr : comm->peer();
    if (peer == nullptr || !comm->running || !peer->running) continue;
    if (comm->aborted || peer->aborted) continue;
    NcclPiece* const from = comm->running->next(true);
    NcclPiece* const to = peer->running->next(false);
    if (from == nullptr || to == nullptr || from->moving || to->moving) continue;
    from->moving = to->moving = true;
    if (from->bytes != to->bytes || comm->running->count(true) != peer->running->count(false)) {
      machine_.violation(comm->running->describe() + " has a " + describe_piece(*from) + " for a " +
                         describe_piece(*to) + ", of groups of " +
                         std::to_string(comm->running->count(true)) + " and " +
                         std::to_string(peer->running->count(false)) + ": this hangs or corrupts");
    }
    move(comm->running, *from, peer->running, *to);
  }
}

void FakeNccl::move(const std::shared_ptr<NcclGroup>& sender, NcclPiece& from,
                    const std::shared_ptr<NcclGroup>& receiver, NcclPiece& to) {
  const std::size_t bytes = std::min(from.bytes, to.bytes);
  machine_.schedule(machine_.draw(bytes), [this, sender, &from, receiver, &to, bytes] {
    // Either may have been aborted meanwhile.
    from.moving = to.moving = false;
    if (!sender->op || !receiver->op) return;
    if (sender->comm->aborted || receiver->comm->aborted) return;
    receiver->op->clock.join(sender->op->clock);
    FakeMemory& memory = machine_.memory;
    const bool readable = memory.access(actor_of(*sender->op), from.memory, from.bytes, false);
    const bool writable = memory.access(actor_of(*receiver->op), to.memory, to.bytes, true);
    if (readable && writable && bytes > 0) std::memmove(to.memory, from.memory, bytes);
    from.done = to.done = true;
    FakeLink& link = *sender->comm->link;
    finish_if_done(sender);
    finish_if_done(receiver);
    match(link);
  });
}

void FakeNccl::finish_if_done(const std::shared_ptr<NcclGroup>& group) {
  if (!group->op || group->next(true) != nullptr || group->next(false) != nullptr) return;
  const OpPtr op = group->op;
  FakeComm& comm = *group->comm;
  if (comm.running == group) comm.running.reset();
  std::erase(comm.kernels, op);
  machine_.finish(op);
}

void FakeNccl::abandon(const std::shared_ptr<NcclGroup>& group) {
  if (!group->op) return;
  for (NcclPiece& piece : group->pieces) {
    if (piece.done) continue;
    piece.done = true;
    if (!piece.send &&
        machine_.memory.access(actor_of(*group->op), piece.memory, piece.bytes, true)) {
      machine_.memory.poison(piece.memory, piece.bytes);  // some of it may have come
    }
  }
  finish_if_done(group);
}

// --- the end ------------------------------------------------------------------------------------

Result FakeNccl::comm_get_async_error(Caller& caller, nccl::Comm handle, Result* result) {
  const FakeComm* const comm = find(caller, handle, "comm_get_async_error");
  if (comm == nullptr) return nccl::kInvalidArgument;
  *result = comm->state;
  return nccl::kSuccess;
}

Result FakeNccl::comm_abort(Caller& caller, nccl::Comm handle) {
  FakeComm* const comm = find(caller, handle, "comm_abort");
  if (comm == nullptr) return nccl::kInvalidArgument;
  comm->aborted = true;
  comm->state = nccl::kInvalidUsage;
  if (comm->group) advance(comm->group);  // nothing has to connect for it any more
  if (comm->running)
    machine_.schedule(machine_.draw(), [this, group = comm->running] { abandon(group); });
  if (!machine_.wait_for(caller, comm->kernels, "comm_abort()")) return nccl::kSystemError;
  comm->destroyed = true;
  comm->last.reset();
  return nccl::kSuccess;
}

void FakeNccl::context_broke(int process, int device) {
  for (auto& [handle, comm] : comms) {
    if (comm->process != process || comm->destroyed || comm->device != device) continue;
    comm->state = nccl::kUnhandledCudaError;
    comm->kernels.clear();
    comm->running.reset();
  }
}

const char* FakeNccl::get_error_string(Caller&, Result result) {
  return result == nccl::kSystemError ? "unhandled system error" : "an error of NCCL";
}

const char* FakeNccl::get_last_error(Caller&, nccl::Comm) { return "an error of the double"; }

}  // namespace stitch::transport::gpu::test
