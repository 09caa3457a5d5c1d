#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/double/far_rank.h"
#include "tests/gpu/double/machine.h"

namespace stitch::transport::gpu::test {

struct FakeComm;

// A send or receive of a group.
struct NcclPiece {
  FakeComm* comm = nullptr;
  FakeStream* stream = nullptr;
  bool send = false;
  void* memory = nullptr;
  std::size_t bytes = 0;
  std::size_t index = 0, total = 0;  // among those of its group, communicator and direction
  bool moving = false, done = false;
};

// What NCCL runs on the device for one communicator and one group. Sends and receives go on at the
// same time, each direction in order.
struct NcclKernel {
  FakeComm* comm = nullptr;
  OpPtr op;
  std::vector<NcclPiece> pieces;
  [[nodiscard]] NcclPiece* next(bool send);
  [[nodiscard]] bool finished() const;
};

// What stands between group_start() and group_end(), and then what NCCL does for it in the
// background: connecting, then launching.
struct NcclGroup {
  int process = 0;
  std::vector<NcclPiece> pieces;
  std::vector<FakeComm*> inits, aborts;
  VectorClock clock;  // of the host at group_end()
  bool scheduled = false, done = false;
};

struct FakeLink {
  int id = 0;
  FakeComm* rank[2] = {nullptr, nullptr};
  bool connected[2] = {false, false};  // by the rank that sends
  bool starting = false;
  std::unique_ptr<FarRank> far;  // the rank that is not here
  [[nodiscard]] FakeComm* here() const { return rank[0] != nullptr ? rank[0] : rank[1]; }
};

struct FakeComm {
  int id = 0, process = 0, device = 0, rank = 0;
  FakeLink* link = nullptr;
  bool nonblocking = false, ready = false, aborted = false, finalizing = false, destroyed = false;
  nccl::Result state = nccl::kInProgress;
  std::shared_ptr<NcclGroup> group;  // in the background
  OpPtr last;                        // kernel
  std::shared_ptr<NcclKernel> running;
  std::vector<OpPtr> kernels;  // unfinished ones
  [[nodiscard]] FakeComm* peer() const { return link->rank[1 - rank]; }
  [[nodiscard]] std::string name() const;
};

// The functions of NcclApi over the machine. Guarded by the machine's lock.
class FakeNccl {
 public:
  explicit FakeNccl(Machine& machine) : machine_(machine) {}
  // Without the machine's lock: ends the threads of far ranks.
  ~FakeNccl();

  nccl::Result get_version(Caller& caller, int* version);
  nccl::Result get_unique_id(Caller& caller, nccl::UniqueId* id);
  nccl::Result comm_init_rank_config(Caller& caller, nccl::Comm* comm, int ranks, nccl::UniqueId id,
                                     int rank, nccl::Config* config);
  nccl::Result comm_get_async_error(Caller& caller, nccl::Comm comm, nccl::Result* result);
  nccl::Result comm_finalize(Caller& caller, nccl::Comm comm);
  nccl::Result comm_destroy(Caller& caller, nccl::Comm comm);
  nccl::Result comm_abort(Caller& caller, nccl::Comm comm);
  nccl::Result send(Caller& caller, const void* memory, std::size_t count, nccl::DataType type,
                    int peer, nccl::Comm comm, cuda::Stream stream);
  nccl::Result recv(Caller& caller, void* memory, std::size_t count, nccl::DataType type, int peer,
                    nccl::Comm comm, cuda::Stream stream);
  nccl::Result group_start(Caller& caller);
  nccl::Result group_end(Caller& caller);
  const char* get_error_string(Caller& caller, nccl::Result result);
  const char* get_last_error(Caller& caller, nccl::Comm comm);

  void kernel_started(const OpPtr& op);
  void process_died(int process);
  void context_broke(int process, int device);

  std::map<nccl::Comm, std::unique_ptr<FakeComm>> comms;  // gone ones too
  std::map<int, int> versions;                            // by process, where not the default
  std::map<std::pair<int, int>, std::map<const FakeHost*, int>> launching_hosts;

 private:
  FakeComm* find(Caller& caller, nccl::Comm comm, const char* function);
  nccl::Result add(Caller& caller, NcclPiece piece, int peer, nccl::Comm comm, cuda::Stream stream,
                   const char* function);
  nccl::Result run_group(Caller& caller, const std::shared_ptr<NcclGroup>& group);
  void advance(const std::shared_ptr<NcclGroup>& group);
  void launch(const std::shared_ptr<NcclGroup>& group);
  void launch_kernel(NcclGroup& group, FakeComm& comm);
  void advance_init(FakeLink& link);
  void advance_finalize(FakeLink& link);
  void match(FakeLink& link);
  void move(const std::shared_ptr<NcclKernel>& sender, NcclPiece& from,
            const std::shared_ptr<NcclKernel>& receiver, NcclPiece& to);
  // Communicators with a rank in another process (far_nccl.cc).
  void meet_far(FakeLink& link, const std::string& path);
  void on_far(FakeLink& link, const FarMessage& message);
  void on_far_gone(FakeLink& link);
  // Whether that direction is connected.
  bool connect_far(FakeLink& link, int direction);
  void match_far(FakeLink& link);
  void take_far(FakeLink& link);
  void finish_if_done(const std::shared_ptr<NcclKernel>& kernel);
  void abandon(const std::shared_ptr<NcclKernel>& kernel);
  void abort(FakeComm& comm);
  nccl::Result wait_for_end(Caller& caller, const std::vector<FakeComm*>& comms, const char* what);
  int version_of(int process) const;

  Machine& machine_;
  std::map<int, std::unique_ptr<FakeLink>> links_;
  int unique_ids_ = 0;
  std::map<std::string, int> listeners_;  // by the path in a unique id
};

}  // namespace stitch::transport::gpu::test
