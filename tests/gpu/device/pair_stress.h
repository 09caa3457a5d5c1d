#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/device/pair_end.h"

namespace stitch::transport::gpu::check {

// Some processes on one GPU, all of which send each other bytes of random sizes by one path at the
// same time, while each allocates and frees memory of the device: nothing waits for another that
// waits for it, and no communicator breaks.
struct Stress {
  Path path = Path::nccl;
  std::chrono::seconds time{0};
  int processes = 2;
  int number = 0;         // of this one
  std::string peers{};    // of the others: "NUMBER:SOCKET,..."; empty: it starts the others
  std::string meeting{};  // as in pair_check
};

// The others, started by process 0, and its sockets to them. Kills those that have not ended.
class OtherProcesses {
 public:
  explicit OtherProcesses(const Stress& stress);
  ~OtherProcesses();
  OtherProcesses(const OtherProcesses&) = delete;
  OtherProcesses& operator=(const OtherProcesses&) = delete;
  [[nodiscard]] const std::string& peers() const noexcept { return peers_; }
  // Waits for their ends; whether all have passed.
  [[nodiscard]] bool end();

 private:
  std::vector<int> processes_;
  std::string peers_;
};

// Throws std::runtime_error for what goes wrong. `peers` as in Stress.
void run_stress(const Stress& stress, const std::string& peers,
                const std::shared_ptr<Lanes>& lanes);

}  // namespace stitch::transport::gpu::check
