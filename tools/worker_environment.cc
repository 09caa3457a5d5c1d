#include "worker_environment.h"

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <string_view>
#include <system_error>

#include "stitch/base/own_folder.h"
#include "stitch/base/random.h"
#include "stitch/transport/wire/secret_key.h"

extern char** environ;

namespace stitch_run {
namespace {

// Variables of other launchers, which would contradict ours.
constexpr std::string_view kOthers[] = {"OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "PMIX_RANK",
                                        "SLURM_PROCID",
                                        "SLURM_LOCALID",
                                        "SLURM_NTASKS",
                                        "MPI_LOCALRANKID",
                                        "STITCH_RANK",
                                        "STITCH_WORLD_SIZE"};

int usable_processors() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
}

std::string random_text(std::size_t bytes) {
  std::vector<std::byte> random(bytes);
  stitch::base::fill_random(random);
  std::string text;
  constexpr std::string_view kDigits = "0123456789abcdef";
  for (const std::byte each : random) {
    text += kDigits[std::to_integer<std::size_t>(each >> 4)];
    text += kDigits[std::to_integer<std::size_t>(each & std::byte{15})];
  }
  return text;
}

}  // namespace

RendezvousFolder::RendezvousFolder() : job_(random_text(8)) {
  const char* base = ::getenv("TMPDIR");
  std::string path = std::filesystem::absolute(base != nullptr && *base != '\0' ? base : "/tmp") /
                     "stitch-run-XXXXXX";
  if (::mkdtemp(path.data()) == nullptr) {
    throw std::system_error(errno, std::generic_category(),
                            "cannot make a folder for the rendezvous file, " + path);
  }
  folder_ = path;
  const auto folder = stitch::base::open_own_folder(path);
  if (!stitch::base::write_file(folder.get(), "secret",
                                std::string(stitch::transport::SecretKey::kRandomSecret) +
                                    random_text(stitch::transport::Key::kBytes)))
    throw std::system_error(errno, std::generic_category(), "cannot write the secret of the run");
}

RendezvousFolder::~RendezvousFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::string RendezvousFolder::init_method() const {
  return "file://" + (folder_ / "store").string();
}

std::string RendezvousFolder::secret_file() const { return folder_ / "secret"; }

std::vector<std::string> worker_environment(const RunOptions& options, int rank, int port,
                                            const RendezvousFolder& rendezvous) {
  std::map<std::string, std::string, std::less<>> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string_view::npos)
      variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  for (std::string_view other : kOthers) {
    if (const auto found = variables.find(other); found != variables.end()) variables.erase(found);
  }

  const std::string processes = std::to_string(options.processes);
  variables["RANK"] = std::to_string(rank);
  variables["LOCAL_RANK"] = std::to_string(rank);
  variables["WORLD_SIZE"] = processes;
  variables["LOCAL_WORLD_SIZE"] = processes;
  variables["MASTER_ADDR"] = "127.0.0.1";
  variables["MASTER_PORT"] = std::to_string(port);
  variables["STITCH_NAME"] = options.name + std::to_string(rank);
  variables["STITCH_INIT_METHOD"] = rendezvous.init_method();
  variables["STITCH_JOB"] = rendezvous.job();
  if (!variables.contains("STITCH_SECRET"))
    variables.try_emplace("STITCH_SECRET_FILE", rendezvous.secret_file());
  if (options.elastic) {
    variables["STITCH_WORLD_SIZE"] =
        std::to_string(options.elastic->min) + ':' + std::to_string(options.elastic->max);
  }
  variables.try_emplace("OMP_NUM_THREADS",
                        std::to_string(std::max(1, usable_processors() / options.processes)));
  // OpenMP's threads otherwise spin for a millisecond after each of libtorch's operators, on cores
  // that the other processes need.
  if (options.processes > 1) variables.try_emplace("OMP_WAIT_POLICY", "passive");

  std::vector<std::string> result;
  result.reserve(variables.size());
  for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
  return result;
}

}  // namespace stitch_run
