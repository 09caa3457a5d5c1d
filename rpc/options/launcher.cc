#include "stitch/rpc/options/launcher.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
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

struct Launcher {
  const char* name;
  const char* rank;
  const char* world_size;
};

// The innermost first.
constexpr std::array<Launcher, 4> kLaunchers{
    {{"torchrun", "RANK", "WORLD_SIZE"},
     {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
     {"MPICH", "PMI_RANK", "PMI_SIZE"},
     {"Slurm", "SLURM_PROCID", "SLURM_NTASKS"}}};

const Launcher* find_launcher(const Environment& environment) {
  for (const Launcher& each : kLaunchers) {
    if (!environment(each.rank)) continue;
    // srun sets the variables of PMI, too, and knows more about the hosts.
    const bool by_srun = each.name == std::string_view("MPICH") &&
                         environment("PMI_RANK") == environment("SLURM_PROCID") &&
                         environment("PMI_SIZE") == environment("SLURM_NTASKS");
    if (!by_srun) return &each;
  }
  return nullptr;
}

std::string slurm_job(const Environment& environment) {
  return environment("SLURM_JOB_ID").value_or("0") + '-' +
         environment("SLURM_STEP_ID").value_or("0");
}

std::string slurm_place(const Environment& environment) {
  const std::string job = slurm_job(environment);
  if (read_number(environment, "SLURM_NNODES").value_or(1) == 1)
    return job_file(environment, "slurm-" + job);
  const auto nodes = environment("SLURM_JOB_NODELIST");
  if (!nodes)
    throw Error(ErrorCode::invalid_argument,
                "variable SLURM_JOB_NODELIST is not set, though SLURM_PROCID is; set "
                "MASTER_ADDR and MASTER_PORT");
  // Steps of a job, and jobs that share a node, get different ports with high probability.
  const auto number = std::hash<std::string>{}(job) % 20'000;
  return "tcp://" + first_slurm_host(*nodes) + ':' + std::to_string(20'000 + number);
}

// Where the workers meet, if all of them are on this host.
std::string place_of(const Launcher& launcher, const Environment& environment) {
  const std::string_view name = launcher.name;
  if (name == "Slurm") return slurm_place(environment);
  const auto all = environment(launcher.world_size);
  if (name == "Open MPI") {
    const auto space = environment("PMIX_NAMESPACE");
    if (!space || environment("OMPI_COMM_WORLD_LOCAL_SIZE") != all) return {};
    return job_file(environment,
                    "ompi-" + *space + '-' + environment("OMPI_MCA_orte_hnp_uri").value_or(""));
  }
  if (name != "MPICH" || environment("MPI_LOCALNRANKS") != all) return {};
  return job_file(environment, "mpich-" + std::to_string(getppid()));
}

}  // namespace

std::string master_address(const Environment& environment) {
  const auto address = environment("MASTER_ADDR");
  auto port = environment("MASTER_PORT");
  // Kubernetes sets MASTER_PORT=tcp://10.0.0.6:23456 where there is a service called "master".
  const bool link = port && port->starts_with("tcp://");
  if (link) port.reset();
  if (!address && !port) return {};
  if (!address)
    throw Error(ErrorCode::invalid_argument,
                "variable MASTER_ADDR is not set, though MASTER_PORT is");
  if (!port)
    throw Error(ErrorCode::invalid_argument,
                link ? "variable MASTER_PORT is a link to a service of Kubernetes, and no port, "
                       "though MASTER_ADDR is set"
                     : "variable MASTER_PORT is not set, though MASTER_ADDR is");
  return "tcp://" + *address + ':' + *port;
}

namespace {

// The store of torchrun's agent outlives the workers. It tells restarts apart by their number only,
// which agents of several hosts count apart: these workers meet at a store of their own, behind it.
std::string agent_store(const Environment& environment, const std::string& own) {
  const auto place = parse_tcp_method(own);
  if (!place || environment("TORCHELASTIC_USE_AGENT_STORE").value_or("") != "True") return own;
  const std::string address = own.substr(6, own.rfind(':') - 6) + ':';
  if (read_number(environment, "GROUP_WORLD_SIZE").value_or(1) > 1)
    return "tcp://" + address + std::to_string(place->port + 1);
  return "c10d://" + address + std::to_string(place->port);
}

}  // namespace

std::string launcher_job(const Environment& environment) {
  constexpr std::size_t kMaxBytes = 128;  // keys of stores have a limited length
  std::string job = environment("STITCH_JOB").value_or("");
  const Launcher* const launcher = job.empty() ? find_launcher(environment) : nullptr;
  const std::string_view name = launcher == nullptr ? "" : launcher->name;
  if (name == "torchrun") job = environment("TORCHELASTIC_RUN_ID").value_or("");
  if (name == "Open MPI") job = environment("PMIX_NAMESPACE").value_or("");
  if (name == "Slurm" && environment("SLURM_JOB_ID")) job = slurm_job(environment);
  if (job == "none") return {};  // as torchrun says that it has none
  job.resize(std::min(job.size(), kMaxBytes));
  for (char& c : job) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '-' && c != '_' && c != '.')
      c = '-';
  }
  return job;
}

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
  const bool c10d = method.starts_with("c10d://");
  const std::string_view scheme = c10d ? "c10d://" : "tcp://";
  const auto colon = method.rfind(':');
  if (!method.starts_with(scheme) || colon <= scheme.size()) return std::nullopt;
  TcpPlace place{method.substr(scheme.size(), colon - scheme.size()), 0, c10d};
  const char* const end = method.data() + method.size();
  const auto [stop, error] = std::from_chars(method.data() + colon + 1, end, place.port);
  if (error != std::errc() || stop != end || place.port == 0) return std::nullopt;
  if (place.host.starts_with('[') && place.host.ends_with(']'))
    place.host = place.host.substr(1, place.host.size() - 2);
  if (place.host.empty() || place.host.find_first_of("[]/ ") != std::string::npos)
    return std::nullopt;
  return place;
}

std::optional<LaunchInfo> read_launcher(const Environment& environment,
                                        const LaunchQuestion& question) {
  LaunchInfo info;
  if (question.init_method) info.init_method = master_address(environment);
  const Launcher* const launcher = find_launcher(environment);
  if (launcher == nullptr) return std::nullopt;
  info.launcher = launcher->name;
  info.rank_variable = launcher->rank;
  info.world_size_variable = launcher->world_size;
  if (question.rank) info.rank = *read_number(environment, launcher->rank);
  if (question.world_size)
    info.world_size = require_number(environment, launcher->world_size, launcher->rank);
  if (question.init_method && info.init_method.empty())
    info.init_method = place_of(*launcher, environment);
  if (question.init_method && std::string_view(launcher->name) == "torchrun")
    info.init_method = agent_store(environment, info.init_method);
  return info;
}

}  // namespace stitch::rpc
