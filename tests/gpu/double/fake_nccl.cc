#include "tests/gpu/double/fake_nccl.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/gpu/double/fake_cuda.h"

namespace stitch::transport::gpu::test {
namespace {

using nccl::Result;
constexpr std::uint64_t kIdMark = 0x1dfa4e5ULL;

FakeMemory::Actor actor_of(const Op& op) {
  return {op.process, op.device, &op.clock, op.epoch, op.what};
}

std::string describe(const NcclPiece& piece) {
  return std::string(piece.send ? "send" : "recv") + " of " + std::to_string(piece.bytes) +
         " bytes";
}

}  // namespace

std::string FakeComm::name() const {
  return "communicator " + std::to_string(link->id) + " rank " + std::to_string(rank);
}

NcclPiece* NcclKernel::next(bool send) {
  for (NcclPiece& piece : pieces) {
    if (piece.send == send && !piece.done) return &piece;
  }
  return nullptr;
}

bool NcclKernel::finished() const {
  return std::all_of(pieces.begin(), pieces.end(), [](const NcclPiece& p) { return p.done; });
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
  return found == versions.end() ? machine_.options.nccl_version : found->second;
}

Result FakeNccl::get_version(Caller& caller, int* version) {
  *version = version_of(caller.process);
  return nccl::kSuccess;
}

Result FakeNccl::get_unique_id(Caller&, nccl::UniqueId* id) {
  std::memset(id->internal, 0, sizeof(id->internal));
  const std::uint64_t words[2] = {kIdMark, static_cast<std::uint64_t>(++unique_ids_)};
  std::memcpy(id->internal, words, sizeof(words));
  if (!machine_.options.meeting.empty()) {
    const std::string path = machine_.options.meeting + "/" +
                             std::to_string(machine_.memory.arena().process) + "-" +
                             std::to_string(unique_ids_);
    if (path.size() >= sizeof(id->internal) - sizeof(words)) return nccl::kSystemError;
    std::memcpy(id->internal + sizeof(words), path.data(), path.size());
    listeners_[path] = FarRank::listen_at(path);
  }
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
  std::uint64_t words[2];
  std::memcpy(words, id.internal, sizeof(words));
  const std::string far(id.internal + sizeof(words));  // a path, or nothing
  const int number =
      far.empty() ? static_cast<int>(words[1]) : -1 - static_cast<int>(links_.size());
  if (words[0] == kIdMark && !far.empty()) {
    if (machine_.options.meeting.empty()) return nccl::kSystemError;
  } else if (words[0] != kIdMark || number < 1 || number > unique_ids_)
    return nccl::kInvalidArgument;
  if (ranks != 2 || rank < 0 || rank >= ranks) return nccl::kInvalidArgument;
  if (config != nullptr &&
      (config->magic != nccl::Config{}.magic || config->size != sizeof(nccl::Config))) {
    return nccl::kInvalidArgument;
  }
  if (config != nullptr && static_cast<int>(config->version) > version_of(caller.process)) {
    return nccl::kInvalidUsage;
  }
  std::unique_ptr<FakeLink>& link = links_[number];
  if (!link) {
    link = std::make_unique<FakeLink>();
    link->id = number;
  }
  if (link->rank[rank] != nullptr) return nccl::kInvalidUsage;
  auto comm = std::make_unique<FakeComm>();
  comm->id = static_cast<int>(comms.size()) + 1;
  comm->process = caller.process;
  comm->device = machine_.cuda->current_device(caller);
  comm->rank = rank;
  comm->link = link.get();
  comm->nonblocking = config != nullptr && config->blocking == 0;
  link->rank[rank] = comm.get();
  *handle = reinterpret_cast<nccl::Comm>((std::uintptr_t{3} << 48) |
                                         (static_cast<std::uintptr_t>(comm->id) << 4));
  const auto group = caller.in.group_depth > 0 ? caller.in.group : std::make_shared<NcclGroup>();
  group->inits.push_back(comm.get());
  comms[*handle] = std::move(comm);
  if (!far.empty()) meet_far(*link, far);
  return caller.in.group_depth > 0 ? nccl::kSuccess : run_group(caller, group);
}

void FakeNccl::advance_init(FakeLink& link) {
  if (link.starting || link.rank[0] == nullptr || link.rank[1] == nullptr) return;
  link.starting = true;
  for (FakeComm* comm : link.rank) {
    Result result = nccl::kSuccess;
    if (version_of(comm->process) != version_of(comm->peer()->process) ||
        (comm->device == comm->peer()->device && !machine_.options.duplicate_gpu)) {
      result = nccl::kInvalidUsage;
    }
    machine_.schedule(machine_.draw(), [comm, result] {
      if (comm->aborted || comm->state != nccl::kInProgress) return;
      comm->ready = result == nccl::kSuccess;
      comm->state = result;
    });
  }
}

// --- groups -------------------------------------------------------------------------------------

Result FakeNccl::add(Caller& caller, NcclPiece piece, int peer, nccl::Comm handle,
                     cuda::Stream stream, const char* function) {
  FakeComm* const comm = find(caller, handle, function);
  if (comm == nullptr) return nccl::kInvalidArgument;
  const auto wrong = [&](const std::string& text) {
    machine_.violation(std::string(function) + "() on " + comm->name() + " " + text);
    return nccl::kInvalidArgument;
  };
  if (peer != 1 - comm->rank) return wrong("got rank " + std::to_string(peer));
  if (comm->state == nccl::kInProgress) {
    return wrong("before its last operation was seen to succeed");
  }
  if (comm->state != nccl::kSuccess) return comm->state;
  if (comm->finalizing) return wrong("after it was finalized");
  const FakeMemory::Place place = machine_.memory.find(piece.memory);
  if (piece.bytes > 0 &&
      (place.block < 0 || place.kind != FakeMemory::Kind::device || place.device != comm->device)) {
    return wrong("got memory that is not on device " + std::to_string(comm->device));
  }
  piece.stream = machine_.cuda->find(caller, stream, function);
  if (piece.stream == nullptr) return nccl::kInvalidArgument;
  if (piece.stream->device != comm->device) return wrong("got a stream of another device");
  piece.comm = comm;
  const auto group = caller.in.group_depth > 0 ? caller.in.group : std::make_shared<NcclGroup>();
  group->pieces.push_back(piece);
  return caller.in.group_depth > 0 ? nccl::kSuccess : run_group(caller, group);
}

Result FakeNccl::send(Caller& caller, const void* memory, std::size_t count, nccl::DataType type,
                      int peer, nccl::Comm comm, cuda::Stream stream) {
  if (type != nccl::kInt8) return nccl::kInvalidArgument;
  NcclPiece piece;
  piece.send = true;
  piece.memory = const_cast<void*>(memory);
  piece.bytes = count;
  return add(caller, piece, peer, comm, stream, "send");
}

Result FakeNccl::recv(Caller& caller, void* memory, std::size_t count, nccl::DataType type,
                      int peer, nccl::Comm comm, cuda::Stream stream) {
  if (type != nccl::kInt8) return nccl::kInvalidArgument;
  NcclPiece piece;
  piece.memory = memory;
  piece.bytes = count;
  return add(caller, piece, peer, comm, stream, "recv");
}

Result FakeNccl::group_start(Caller& caller) {
  if (caller.in.group_depth++ == 0) {
    caller.in.group = std::make_shared<NcclGroup>();
    caller.in.group_error = nccl::kSuccess;
  }
  return nccl::kSuccess;
}

Result FakeNccl::group_end(Caller& caller) {
  if (caller.in.group_depth == 0) {
    machine_.violation("group_end() without group_start()");
    return nccl::kInvalidUsage;
  }
  if (--caller.in.group_depth > 0) return nccl::kSuccess;
  // Where a call of a group has failed, NCCL launches nothing of it.
  if (caller.in.group_error != nccl::kSuccess) {
    caller.in.group = nullptr;
    return static_cast<Result>(caller.in.group_error);
  }
  return run_group(caller, std::exchange(caller.in.group, nullptr));
}

Result FakeNccl::run_group(Caller& caller, const std::shared_ptr<NcclGroup>& group) {
  group->process = caller.process;
  group->clock = caller.host.clock;
  bool nonblocking = true;
  for (NcclPiece& piece : group->pieces) {
    FakeComm& comm = *piece.comm;
    if (comm.destroyed || comm.aborted) return nccl::kInvalidUsage;
    comm.group = group;
    comm.state = nccl::kInProgress;
    nonblocking &= comm.nonblocking;
    ++launching_hosts[{caller.process, comm.device}][&caller.host];
    for (const NcclPiece& other : group->pieces) {
      if (other.comm != piece.comm || other.send != piece.send) continue;
      ++piece.total;
      if (&other < &piece) ++piece.index;
    }
  }
  for (FakeComm* comm : group->inits) {
    nonblocking &= comm->nonblocking;
    advance_init(*comm->link);
  }
  if (group->pieces.empty()) {
    group->done = true;
  } else {
    advance(group);
  }
  if (!group->aborts.empty()) {
    for (FakeComm* comm : group->aborts) abort(*comm);
    const Result result = wait_for_end(caller, group->aborts, "comm_abort() of a group");
    if (result != nccl::kSuccess) return result;
  }
  if (group->done && group->inits.empty()) return nccl::kSuccess;
  if (nonblocking) return nccl::kInProgress;
  const auto ended = [&] {
    return group->done && std::all_of(group->inits.begin(), group->inits.end(),
                                      [](FakeComm* c) { return c->state != nccl::kInProgress; });
  };
  const auto nothing = [] { return std::vector<OpPtr>{}; };
  if (!machine_.block_until(caller, "a call of NCCL that waits for the peer", ended, nothing,
                            group.get())) {
    return nccl::kSystemError;
  }
  for (FakeComm* comm : group->inits) {
    if (comm->state != nccl::kSuccess) return comm->state;
  }
  for (const NcclPiece& piece : group->pieces) {
    if (piece.comm->state != nccl::kSuccess) return piece.comm->state;
  }
  return nccl::kSuccess;
}

void FakeNccl::advance(const std::shared_ptr<NcclGroup>& group) {
  if (group->scheduled) return;
  bool ready = true;
  std::vector<std::shared_ptr<NcclGroup>> others;
  for (const NcclPiece& piece : group->pieces) {
    if (piece.comm->aborted) continue;
    // The first transfer in a direction takes part in a handshake of both ranks.
    FakeLink& link = *piece.comm->link;
    const int direction = piece.send ? piece.comm->rank : 1 - piece.comm->rank;
    if (link.connected[direction]) continue;
    const FakeComm* const peer = piece.comm->peer();
    if (link.far != nullptr) {
      if (!connect_far(link, direction)) ready = false;
      continue;
    }
    if (peer != nullptr && peer->group && !peer->aborted) {
      for (const NcclPiece& other : peer->group->pieces) {
        if (other.comm == peer && other.send != piece.send) link.connected[direction] = true;
      }
    }
    if (link.connected[direction]) {
      if (peer->group != group) others.push_back(peer->group);
    } else {
      ready = false;
    }
  }
  if (ready) {
    group->scheduled = true;
    machine_.schedule(machine_.draw(), [this, group] { launch(group); });
  }
  for (const auto& other : others) advance(other);
}

void FakeNccl::launch(const std::shared_ptr<NcclGroup>& group) {
  group->done = true;
  std::vector<FakeComm*> launched;
  for (const NcclPiece& piece : group->pieces) {
    FakeComm& comm = *piece.comm;
    if (std::find(launched.begin(), launched.end(), &comm) != launched.end()) continue;
    launched.push_back(&comm);
    if (comm.group == group) comm.group.reset();
    if (comm.aborted || comm.destroyed || comm.state == nccl::kUnhandledCudaError) continue;
    launch_kernel(*group, comm);
    if (comm.state == nccl::kInProgress) comm.state = nccl::kSuccess;
  }
}

void FakeNccl::launch_kernel(NcclGroup& group, FakeComm& comm) {
  const auto kernel = std::make_shared<NcclKernel>();
  kernel->comm = &comm;
  std::vector<FakeStream*> streams;
  std::string what = "NCCL's " + comm.name() + ":";
  for (const NcclPiece& piece : group.pieces) {
    if (piece.comm != &comm) continue;
    kernel->pieces.push_back(piece);
    if (kernel->pieces.size() <= 4) {
      what += (kernel->pieces.size() == 1 ? " " : ", ") + describe(piece);
    }
    if (std::find(streams.begin(), streams.end(), piece.stream) == streams.end()) {
      streams.push_back(piece.stream);
    }
  }
  if (kernel->pieces.size() > 4) what += ", ...";
  const OpPtr op = machine_.make_op(*streams.front(), what);
  op->nccl = kernel;
  kernel->op = op;
  // All streams of the group wait for each other; a communicator is one queue.
  for (std::size_t i = 1; i < streams.size(); ++i) {
    if (streams[i]->tail) op->after.push_back(streams[i]->tail);
  }
  if (comm.last) op->behind.push_back(comm.last);
  comm.last = op;
  comm.kernels.push_back(op);
  machine_.submit(op, group.clock);
  for (std::size_t i = 1; i < streams.size(); ++i) {
    const OpPtr join = machine_.make_op(*streams[i], "wait for a group of NCCL");
    join->after.push_back(op);
    machine_.submit(join, group.clock);
  }
}

// --- transfers ----------------------------------------------------------------------------------

void FakeNccl::kernel_started(const OpPtr& op) {
  FakeComm& comm = *op->nccl->comm;
  comm.running = op->nccl;
  if (comm.aborted) {
    machine_.schedule(machine_.draw(), [this, kernel = op->nccl] { abandon(kernel); });
    return;
  }
  match(*comm.link);
}

void FakeNccl::match(FakeLink& link) {
  if (link.far != nullptr) return match_far(link);
  for (FakeComm* comm : link.rank) {
    FakeComm* const peer = comm == nullptr ? nullptr : comm->peer();
    if (peer == nullptr || !comm->running || !peer->running) continue;
    if (comm->aborted || peer->aborted) continue;
    NcclPiece* const from = comm->running->next(true);
    NcclPiece* const to = peer->running->next(false);
    if (from == nullptr || to == nullptr || from->moving || to->moving) continue;
    from->moving = to->moving = true;
    if (from->bytes != to->bytes) {
      machine_.violation("NCCL's " + comm->name() + " has a " + describe(*from) + " for a " +
                         describe(*to) + ": this hangs or corrupts");
    }
    if (from->total != to->total) {
      machine_.violation("NCCL's " + comm->name() + " has a " + describe(*from) + " grouped with " +
                         std::to_string(from->total - 1) + " others, and its recv with " +
                         std::to_string(to->total - 1) + ": this is undefined");
    }
    move(comm->running, *from, peer->running, *to);
  }
}

void FakeNccl::move(const std::shared_ptr<NcclKernel>& sender, NcclPiece& from,
                    const std::shared_ptr<NcclKernel>& receiver, NcclPiece& to) {
  const std::size_t bytes = std::min(from.bytes, to.bytes);
  machine_.schedule(machine_.draw(bytes), [this, sender, &from, receiver, &to, bytes] {
    // Either may have been aborted or have died meanwhile.
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

void FakeNccl::finish_if_done(const std::shared_ptr<NcclKernel>& kernel) {
  if (!kernel->op || !kernel->finished()) return;
  const OpPtr op = kernel->op;
  FakeComm& comm = *kernel->comm;
  if (comm.running == kernel) comm.running.reset();
  std::erase(comm.kernels, op);
  machine_.finish(op);
  advance_finalize(*comm.link);
}

void FakeNccl::abandon(const std::shared_ptr<NcclKernel>& kernel) {
  if (!kernel->op) return;
  for (NcclPiece& piece : kernel->pieces) {
    if (piece.done) continue;
    piece.done = true;
    if (!piece.send &&
        machine_.memory.access(actor_of(*kernel->op), piece.memory, piece.bytes, true)) {
      machine_.memory.poison(piece.memory, piece.bytes);  // some of it may have come
    }
  }
  finish_if_done(kernel);
}

// --- the end ------------------------------------------------------------------------------------

Result FakeNccl::comm_get_async_error(Caller& caller, nccl::Comm handle, Result* result) {
  const FakeComm* const comm = find(caller, handle, "comm_get_async_error");
  if (comm == nullptr) return nccl::kInvalidArgument;
  *result = comm->state;
  return nccl::kSuccess;
}

void FakeNccl::advance_finalize(FakeLink& link) {
  for (FakeComm* comm : link.rank) {
    if (comm == nullptr || !comm->finalizing || comm->state != nccl::kInProgress) continue;
    if (!comm->kernels.empty() || comm->group) continue;
    machine_.schedule(machine_.draw(), [comm] {
      if (comm->state == nccl::kInProgress) comm->state = nccl::kSuccess;
    });
  }
}

Result FakeNccl::comm_finalize(Caller& caller, nccl::Comm handle) {
  FakeComm* const comm = find(caller, handle, "comm_finalize");
  if (comm == nullptr) return nccl::kInvalidArgument;
  if (comm->state != nccl::kSuccess) return nccl::kInvalidUsage;
  comm->finalizing = true;
  comm->state = nccl::kInProgress;
  advance_finalize(*comm->link);
  if (comm->nonblocking) return nccl::kInProgress;
  if (!machine_.block_until(
          caller, "comm_finalize()", [&] { return comm->state != nccl::kInProgress; },
          [&] { return comm->kernels; })) {
    return nccl::kSystemError;
  }
  return comm->state;
}

Result FakeNccl::wait_for_end(Caller& caller, const std::vector<FakeComm*>& ended,
                              const char* what) {
  const auto left = [&] {
    std::vector<OpPtr> ops;
    for (const FakeComm* comm : ended) {
      ops.insert(ops.end(), comm->kernels.begin(), comm->kernels.end());
    }
    return ops;
  };
  if (!machine_.block_until(
          caller, what, [&] { return left().empty(); }, left)) {
    return nccl::kSystemError;
  }
  for (FakeComm* comm : ended) {
    if (comm->last) machine_.learn(caller, comm->last->clock);
    comm->destroyed = true;
    comm->last.reset();
  }
  return nccl::kSuccess;
}

Result FakeNccl::comm_destroy(Caller& caller, nccl::Comm handle) {
  FakeComm* const comm = find(caller, handle, "comm_destroy");
  if (comm == nullptr) return nccl::kInvalidArgument;
  if (comm->state == nccl::kInProgress) {
    machine_.violation("comm_destroy() of " + comm->name() +
                       " before its last operation was seen to succeed");
    return nccl::kInvalidUsage;
  }
  return wait_for_end(caller, {comm}, "comm_destroy()");
}

void FakeNccl::abort(FakeComm& comm) {
  if (comm.aborted) return;
  comm.aborted = true;
  comm.state = nccl::kInvalidUsage;
  if (comm.link->far != nullptr) comm.link->far->hang_up();
  if (comm.group) advance(comm.group);  // nothing has to connect for it any more
  if (comm.running) {
    machine_.schedule(machine_.draw(), [this, kernel = comm.running] { abandon(kernel); });
  }
  FakeComm* const peer = comm.peer();
  if (machine_.options.network_transport && peer != nullptr && !peer->aborted) {
    machine_.schedule(machine_.draw(), [peer] { peer->state = nccl::kRemoteError; });
  }
}

Result FakeNccl::comm_abort(Caller& caller, nccl::Comm handle) {
  FakeComm* const comm = find(caller, handle, "comm_abort");
  if (comm == nullptr) return nccl::kInvalidArgument;
  if (caller.in.group_depth > 0) {
    caller.in.group->aborts.push_back(comm);
    return nccl::kSuccess;
  }
  abort(*comm);
  return wait_for_end(caller, {comm}, "comm_abort()");
}

void FakeNccl::process_died(int process) {
  for (auto& [handle, comm] : comms) {
    if (comm->process != process || comm->destroyed) continue;
    abort(*comm);
    comm->destroyed = true;
    comm->kernels.clear();
    comm->running.reset();
    comm->last.reset();
  }
}

void FakeNccl::context_broke(int process, int device) {
  for (auto& [handle, comm] : comms) {
    if (comm->process != process || comm->destroyed) continue;
    if (device >= 0 && comm->device != device) continue;
    comm->state = nccl::kUnhandledCudaError;
    comm->kernels.clear();
    comm->running.reset();
  }
}

const char* FakeNccl::get_error_string(Caller&, Result result) {
  switch (result) {
    case nccl::kSuccess:
      return "no error";
    case nccl::kUnhandledCudaError:
      return "unhandled cuda error";
    case nccl::kSystemError:
      return "unhandled system error";
    case nccl::kInternalError:
      return "internal error";
    case nccl::kInvalidArgument:
      return "invalid argument";
    case nccl::kInvalidUsage:
      return "invalid usage";
    case nccl::kRemoteError:
      return "remote process exited or there was a network error";
    case nccl::kInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}

const char* FakeNccl::get_last_error(Caller&, nccl::Comm) { return "an error of the double"; }

}  // namespace stitch::transport::gpu::test
