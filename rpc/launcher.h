#pragma once

#include <functional>
#include <optional>
#include <string>

namespace stitch {

// What the program that started this process says about the world.
struct LaunchInfo {
  std::string launcher;  // "torchrun", "Slurm", "Open MPI", "MPICH"
  int rank = -1;
  int world_size = -1;
  std::string init_method;  // where to meet; empty: it does not say
};

// Reads an environment variable; nullopt when it is not set.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;

// torchrun's variables (stitch-run sets the same), else Slurm's, Open MPI's, MPICH's; nothing when
// there are none. Throws Error(invalid_argument) naming the variable whose value makes no sense, or
// the one that is missing.
[[nodiscard]] std::optional<LaunchInfo> read_launcher(const Environment& environment);

// The first host of a Slurm node list: "gpu[03-07,9],login1" -> "gpu03".
[[nodiscard]] std::string first_slurm_host(const std::string& node_list);

}  // namespace stitch
