#include "stitch/rpc/options/launcher.h"

#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "stitch/base/error.h"

namespace stitch::rpc {

namespace {

std::optional<int> read_number(const Environment& environment, const std::string& name) {
  const auto text = environment(name);
  if (!text) return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size() || value < 0) {
    throw Error(ErrorCode::invalid_argument,
                "variable " + name + " is \"" + *text + "\", not a number from 0 on");
  }
  return value;
}

int require_number(const Environment& environment, const std::string& name,
                   const std::string& because) {
  const auto value = read_number(environment, name);
  if (!value)
    throw Error(ErrorCode::invalid_argument,
                "variable " + name + " is not set, though " + because + " is");
  return *value;
}

// Whether other users cannot create files there. The environment may come from another host, where
// the folder exists.
bool is_private_folder(const std::string& path) {
  struct stat state {};
  return path.starts_with('/') && stat(path.c_str(), &state) == 0 && S_ISDIR(state.st_mode) &&
         state.st_uid == geteuid() && (state.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// A file on which only the processes of one job on this host, started by one user, agree. In a
// folder shared with other users another user may create it first; the file store then refuses it.
std::string job_file(const Environment& environment, const std::string& job) {
  std::string safe;
  for (const char c : job) safe += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '-';
  const std::string own = environment("XDG_RUNTIME_DIR").value_or("");
  std::error_code none;
  std::filesystem::path folder = own;
  if (!is_private_folder(own)) folder = std::filesystem::temp_directory_path(none);
  if (folder.empty()) folder = "/tmp";
  return "file://" + (folder / ("stitch-" + std::to_string(geteuid()) + '-' + safe)).string();
}

std::string master_address(const Environment& environment) {
  const auto address = environment("MASTER_ADDR");
  const auto port = environment("MASTER_PORT");
  if (!address && !port) return {};
  if (!address)
    throw Error(ErrorCode::invalid_argument,
                "variable MASTER_ADDR is not set, though MASTER_PORT is");
  if (!port)
    throw Error(ErrorCode::invalid_argument,
                "variable MASTER_PORT is not set, though MASTER_ADDR is");
  return "tcp://" + *address + ':' + *port;
}

}  // namespace

std::string torchrun_restart(const Environment& environment) {
  const auto run = environment("TORCHELASTIC_RUN_ID");
  const auto restart = environment("TORCHELASTIC_RESTART_COUNT");
  if (!run && !restart) return {};
  // Keys have a limited length.
  constexpr std::size_t kMaxRunId = 128;
  const std::string name = run.value_or("none").substr(0, kMaxRunId);
  if (read_number(environment, "GROUP_WORLD_SIZE").value_or(1) > 1) return name;
  return name + '/' + restart.value_or("0");
}

std::string first_slurm_host(const std::string& node_list) {
  const auto bracket = node_list.find('[');
  const auto comma = node_list.find(',');
  if (bracket == std::string::npos || comma < bracket) return node_list.substr(0, comma);
  return node_list.substr(0, bracket) +
         node_list.substr(bracket + 1, node_list.find_first_of(",-]", bracket) - bracket - 1);
}

std::optional<TcpPlace> parse_tcp_method(const std::string& method) {
  constexpr std::string_view kScheme = "tcp://";
  const auto colon = method.rfind(':');
  if (!method.starts_with(kScheme) || colon <= kScheme.size()) return std::nullopt;
  TcpPlace place{method.substr(kScheme.size(), colon - kScheme.size())};
  const char* const end = method.data() + method.size();
  const auto [stop, error] = std::from_chars(method.data() + colon + 1, end, place.port);
  if (error != std::errc() || stop != end || place.port == 0) return std::nullopt;
  if (place.host.starts_with('[') && place.host.ends_with(']'))
    place.host = place.host.substr(1, place.host.size() - 2);
  if (place.host.empty() || place.host.find_first_of("[]/ ") != std::string::npos)
    return std::nullopt;
  return place;
}

std::optional<LaunchInfo> read_launcher(const Environment& environment) {
  LaunchInfo info;
  info.init_method = master_address(environment);
  if (const auto rank = read_number(environment, "RANK")) {
    info.launcher = "torchrun";
    info.rank = *rank;
    info.world_size = require_number(environment, "WORLD_SIZE", "RANK");
    return info;
  }
  if (const auto rank = read_number(environment, "SLURM_PROCID")) {
    info.launcher = "Slurm";
    info.rank = *rank;
    info.world_size = require_number(environment, "SLURM_NTASKS", "SLURM_PROCID");
    const auto job = environment("SLURM_JOB_ID").value_or("0") + '-' +
                     environment("SLURM_STEP_ID").value_or("0");
    if (info.init_method.empty() && read_number(environment, "SLURM_NNODES").value_or(1) == 1) {
      info.init_method = job_file(environment, "slurm-" + job);
    } else if (info.init_method.empty()) {
      const auto nodes = environment("SLURM_JOB_NODELIST");
      if (!nodes)
        throw Error(ErrorCode::invalid_argument,
                    "variable SLURM_JOB_NODELIST is not set, though SLURM_PROCID is; set "
                    "MASTER_ADDR and MASTER_PORT");
      // Steps of a job, and jobs that share a node, get different ports with high probability.
      const auto number = std::hash<std::string>{}(job) % 20'000;
      info.init_method =
          "tcp://" + first_slurm_host(*nodes) + ':' + std::to_string(20'000 + number);
    }
    return info;
  }
  if (const auto rank = read_number(environment, "OMPI_COMM_WORLD_RANK")) {
    info.launcher = "Open MPI";
    info.rank = *rank;
    info.world_size = require_number(environment, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK");
    const auto space = environment("PMIX_NAMESPACE");
    const bool one_host =
        read_number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE").value_or(0) == info.world_size;
    if (info.init_method.empty() && one_host && space)
      info.init_method = job_file(
          environment, "ompi-" + *space + '-' + environment("OMPI_MCA_orte_hnp_uri").value_or(""));
    return info;
  }
  if (const auto rank = read_number(environment, "PMI_RANK")) {
    info.launcher = "MPICH";
    info.rank = *rank;
    info.world_size = require_number(environment, "PMI_SIZE", "PMI_RANK");
    const auto local = read_number(environment, "MPI_LOCALNRANKS");
    if (info.init_method.empty() && local == info.world_size)
      info.init_method = job_file(environment, "mpich-" + std::to_string(getppid()));
    return info;
  }
  return std::nullopt;
}

}  // namespace stitch::rpc
