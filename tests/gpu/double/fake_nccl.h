#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/double/machine.h"

namespace stitch::transport::gpu::test {

struct FakeComm;

// A send or receive of a group.
struct NcclPiece {
  bool send = false;
  void* memory = nullptr;
  std::size_t bytes = 0;
  bool moving = false, done = false;
};

// What stands between group_start() and group_end(), all for one communicator and on one stream.
// Then what NCCL does for it in the background: connecting, then launching; and then the kernel.
// Sends and receives go on at the same time, each direction in order.
struct NcclGroup {
  FakeComm* comm = nullptr;
  FakeStream* stream = nullptr;
  std::vector<NcclPiece> pieces;
  VectorClock clock;  // of the host at group_end()
  bool scheduled = false;
  OpPtr op;  // of the kernel
  [[nodiscard]] NcclPiece* next(bool send);
  [[nodiscard]] std::size_t count(bool send) const;
  [[nodiscard]] std::string describe() const;
};

struct FakeLink {
  FakeComm* rank[2] = {nullptr, nullptr};
  bool connected[2] = {false, false};  // by the rank that sends
};

struct FakeComm {
  int id = 0, process = 0, device = 0, rank = 0;
  FakeLink* link = nullptr;
  bool aborted = false, destroyed = false;
  nccl::Result state = nccl::kInProgress;
  std::shared_ptr<NcclGroup> group;    // in the background
  std::shared_ptr<NcclGroup> running;  // on the device
  OpPtr last;                          // kernel
  std::vector<OpPtr> kernels;          // unfinished ones
  [[nodiscard]] FakeComm* peer() const { return link->rank[1 - rank]; }
  [[nodiscard]] std::string name() const {
    return "communicator " + std::to_string(id) + " rank " + std::to_string(rank);
  }
};

// The functions of NcclApi over the machine, as stitch uses them: communicators of two ranks that
// do not block. Guarded by the machine's lock.
class FakeNccl {
 public:
  explicit FakeNccl(Machine& machine) : machine_(machine) {}

  nccl::Result get_version(Caller& caller, int* version);
  nccl::Result get_unique_id(Caller& caller, nccl::UniqueId* id);
  nccl::Result comm_init_rank_config(Caller& caller, nccl::Comm* comm, int ranks, nccl::UniqueId id,
                                     int rank, nccl::Config* config);
  nccl::Result comm_get_async_error(Caller& caller, nccl::Comm comm, nccl::Result* result);
  nccl::Result comm_abort(Caller& caller, nccl::Comm comm);
  nccl::Result send(Caller& caller, const void* memory, std::size_t count, nccl::DataType type,
                    int peer, nccl::Comm comm, cuda::Stream stream);
  nccl::Result recv(Caller& caller, void* memory, std::size_t count, nccl::DataType type, int peer,
                    nccl::Comm comm, cuda::Stream stream);
  nccl::Result group_start(Caller& caller);
  nccl::Result group_end(Caller& caller);
  const char* get_error_string(Caller& caller, nccl::Result result);
  const char* get_last_error(Caller& caller, nccl::Comm comm);

  // The kernel of a group.
  void started(const std::shared_ptr<NcclGroup>& group);
  void context_broke(int process, int device);

  std::map<nccl::Comm, std::unique_ptr<FakeComm>> comms;  // gone ones too
  std::map<int, int> versions;                            // by process, where not 2.28.9

 private:
  FakeComm* find(Caller& caller, nccl::Comm comm, const char* function);
  nccl::Result add(Caller& caller, const NcclPiece& piece, int peer, nccl::Comm comm,
                   cuda::Stream stream, const char* function);
  nccl::Result run_group(const std::shared_ptr<NcclGroup>& group);
  void advance(const std::shared_ptr<NcclGroup>& group);
  void launch(const std::shared_ptr<NcclGroup>& group);
  void match(FakeLink& link);
  void move(const std::shared_ptr<NcclGroup>& sender, NcclPiece& from,
            const std::shared_ptr<NcclGroup>& receiver, NcclPiece& to);
  void finish_if_done(const std::shared_ptr<NcclGroup>& group);
  void abandon(const std::shared_ptr<NcclGroup>& group);
  int version_of(int process) const;

  Machine& machine_;
  std::map<std::uint64_t, FakeLink> links_;
  std::uint64_t unique_ids_ = 0;
};

}  // namespace stitch::transport::gpu::test
