#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/device/pair_end.h"

namespace stitch::transport::gpu::check {

// This program, started again as processes 1 and up of so many, with `words` and its number and
// sockets to all others, which process 0 has, too. Those that have not ended are killed. Thread
// contract: one thread.
class OtherProcesses {
 public:
  OtherProcesses(std::vector<std::string> words, int processes);
  ~OtherProcesses() { kill_all(); }
  OtherProcesses(const OtherProcesses&) = delete;
  OtherProcesses& operator=(const OtherProcesses&) = delete;
  // Of process 0, as peers_of() reads them.
  [[nodiscard]] const std::string& peers() const noexcept { return peers_; }
  // Waits for their ends; whether all have passed.
  [[nodiscard]] bool end();
  void kill_all();

 private:
  std::vector<int> processes_;
  std::string peers_;
};

// "NUMBER:SOCKET,...": sockets to other processes by their numbers.
[[nodiscard]] std::map<int, int> peers_of(const std::string& text);

// Process `number` of some on one GPU, all of which send each other bytes of random sizes by one
// path at the same time, while each allocates and frees memory of the device: nothing waits for
// another that waits for it, and no communicator breaks. Throws std::runtime_error for what goes
// wrong.
void run_stress(Path path, std::chrono::seconds time, int number, const std::string& peers,
                const std::shared_ptr<Lanes>& lanes);

}  // namespace stitch::transport::gpu::check
