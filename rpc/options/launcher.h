#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace stitch::rpc {

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

// Which run, and which restart of all its workers, this is under torchrun: "<run id>/<restart>".
// Workers of different restarts must not meet. "<run id>" where several agents start the workers
// (GROUP_WORLD_SIZE): each counts only those restarts that its own workers made necessary, so the
// counts of one restart differ; torchrun starts none before all agents that live have ended the
// former ones.
// Empty under other launchers. Throws as read_launcher().
[[nodiscard]] std::string torchrun_restart(const Environment& environment);

// The first host of a Slurm node list: "gpu[03-07,9],login1" -> "gpu03".
[[nodiscard]] std::string first_slurm_host(const std::string& node_list);

// Host and port of "tcp://host:port"; an IPv6 address may stand in brackets, which are taken off.
// Nothing when it is none, or the port is not one from 1 to 65535.
struct TcpPlace {
  std::string host;
  std::uint16_t port = 0;
};
[[nodiscard]] std::optional<TcpPlace> parse_tcp_method(const std::string& method);

}  // namespace stitch::rpc
