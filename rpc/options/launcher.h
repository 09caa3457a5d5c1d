#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace stitch::rpc {

// What the program that started this process says about the world.
struct LaunchInfo {
  std::string launcher;       // "torchrun", "Slurm", "Open MPI", "MPICH"
  std::string rank_variable;  // that has its rank, and the size of the world
  std::string world_size_variable;
  int rank = -1;
  int world_size = -1;
  std::string init_method;  // where to meet; empty: it does not say
};

// What the program does not say itself: nothing else of a launcher is read.
struct LaunchQuestion {
  bool rank = true;
  bool world_size = true;
  bool init_method = true;
};

// Reads an environment variable; nullopt when it is not set.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;

// Of the launcher that started this process itself: torchrun's variables (stitch-run sets the
// same), else those of Open MPI, MPICH, Slurm, in whose jobs the others run; nothing when there are
// none. Throws Error(invalid_argument) naming the variable whose value makes no sense, or the one
// that is missing.
[[nodiscard]] std::optional<LaunchInfo> read_launcher(const Environment& environment,
                                                      const LaunchQuestion& question = {});

// "tcp://MASTER_ADDR:MASTER_PORT"; empty where neither is set. Throws as read_launcher().
[[nodiscard]] std::string master_address(const Environment& environment);

// What the launcher calls this job: equal in all processes that it has started together, and
// different in those of another job; empty where it does not say. STITCH_JOB (stitch-run's, or the
// user's) comes first. At most 128 letters, digits, '-', '_', '.'.
[[nodiscard]] std::string launcher_job(const Environment& environment);

// Which run, and which restart of all its workers, this is under torchrun: "<run id>/<restart>".
// Workers of different restarts must not meet. "<run id>" where several agents start the workers
// (GROUP_WORLD_SIZE): each counts only those restarts that its own workers made necessary, so the
// counts of one restart differ; torchrun starts none before all agents that live have ended the
// former ones.
// Empty under other launchers. Throws as read_launcher().
[[nodiscard]] std::string torchrun_restart(const Environment& environment);

// The first host of a Slurm node list: "gpu[03-07,9],login1" -> "gpu03".
[[nodiscard]] std::string first_slurm_host(const std::string& node_list);

// Host and port of "tcp://host:port" or "c10d://host:port"; an IPv6 address may stand in brackets,
// which are taken off. Nothing when it is neither, or the port is not one from 1 to 65535.
struct TcpPlace {
  std::string host;
  std::uint16_t port = 0;
  bool c10d = false;  // a store of torch's, which the launcher serves
};
[[nodiscard]] std::optional<TcpPlace> parse_tcp_method(const std::string& method);

}  // namespace stitch::rpc
