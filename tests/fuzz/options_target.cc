// What an environment says: options, the launcher's variables, faults on purpose, secrets in files.
#include "stitch/rpc/options/options.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "stitch/base/descriptor.h"
#include "stitch/rpc/options/launcher.h"
#include "stitch/rpc/options/security_options.h"
#include "stitch/transport/faults/fault_plan.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::environments {

enum Decoder : std::uint8_t {
  kEnvironment,  // lines of a variable's number (from 'A' on) and its value
  kFault,        // STITCH_FAULT
  kSecretFile,   // the file that STITCH_SECRET_FILE names
  kWorldSize,    // "2:8"
  kPlaces,       // "tcp://host:port", and a list of Slurm's hosts
  kDecoders
};

constexpr std::array kVariables{"STITCH_NAME",
                                "STITCH_RANK",
                                "STITCH_WORLD_SIZE",
                                "STITCH_INIT_METHOD",
                                "STITCH_RPC_TIMEOUT",
                                "STITCH_INIT_TIMEOUT",
                                "STITCH_NUM_THREADS",
                                "STITCH_TRANSPORTS",
                                "STITCH_CHANNELS",
                                "STITCH_INLINE_BYTES",
                                "STITCH_DEVICE_MAPS",
                                "STITCH_ENCRYPTION",
                                "STITCH_SECRET",
                                "STITCH_FAULT",
                                "STITCH_MAX_INFLIGHT_CALLS",
                                "RANK",
                                "WORLD_SIZE",
                                "MASTER_ADDR",
                                "MASTER_PORT",
                                "SLURM_PROCID",
                                "SLURM_NTASKS",
                                "SLURM_STEP_NODELIST",
                                "OMPI_COMM_WORLD_RANK",
                                "OMPI_COMM_WORLD_SIZE",
                                "PMI_RANK",
                                "PMI_SIZE",
                                "TORCHELASTIC_RUN_ID",
                                "STITCH_UNKNOWN"};

static void clear_environment() {
  for (const char* name : kVariables) ::unsetenv(name);
}

static bool run_environment(const std::string& text) {
  clear_environment();
  for (std::size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    if (line.empty()) continue;
    const auto number = static_cast<unsigned char>(line[0] - 'A') % kVariables.size();
    ::setenv(kVariables[number], line.c_str() + 1, 1);
  }
  const bool accepted = accepts({ErrorCode::invalid_argument}, [&] {
    const Options options = resolve_options({});
    require(!options.name.empty() || options.rank == Options::kFromLauncher,
            "a worker with a rank has no name");
    require(options.rpc_timeout.count() >= 0 && options.init_timeout.count() >= 0,
            "a time limit is negative");
    return !text.empty();
  });
  clear_environment();
  return accepted;
}

static bool run_fault(const std::string& text) {
  return accepts({ErrorCode::invalid_argument}, [&] {
    const auto plan = transport::parse_fault_plan(text);
    if (!plan) return false;
    for (const double chance : {plan->drop, plan->duplicate, plan->reorder})
      require(chance >= 0 && chance <= 1, "a probability of a fault is none");
    require(plan->delay_from <= plan->delay_to && plan->cut.count() >= 0,
            "a time of a fault is negative");
    for (const auto& each : plan->partitions)
      require(each.from <= each.until, "a partition ends before it begins");
    return true;
  });
}

static bool run_secret_file(Bytes bytes) {
  static const std::string kPath = (std::filesystem::temp_directory_path() /
                                    ("stitch-fuzz-secret-" + std::to_string(::getpid())))
                                       .string();
  std::filesystem::remove(kPath);
  {
    const base::Descriptor file(
        ::open(kPath.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
    require(::write(file.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
            "a file cannot be written");
  }
  bool accepted = false;
  try {
    const std::string secret = rpc::read_secret_file(kPath);
    require(
        !secret.empty() && text_of(bytes).starts_with(secret) && secret.size() + 2 >= bytes.size(),
        "a secret is not what its file says");
    accepted = true;
  } catch (const Error& error) {
    require_code(error, {ErrorCode::invalid_argument});
    const bool told = std::string(error.what()).find(text_of(bytes)) != std::string::npos;
    require(bytes.size() < 16 || !told, "an error tells the secret");
  }
  std::filesystem::remove(kPath);
  return accepted;
}

static bool run_world_size(const std::string& text) {
  return accepts({ErrorCode::invalid_argument}, [&] {
    const WorldSize size(text);
    require(WorldSize(size.str()).str() == size.str(), "the size of a world, written again");
  });
}

static bool run_places(const std::string& text) {
  const std::string host = rpc::first_slurm_host(text);
  require(host.size() <= text.size() + 32, "the name of a host is longer than the list");
  const auto place = rpc::parse_tcp_method(text);
  require(!place || place->port > 0, "a port is zero");
  return place.has_value();
}

static bool run(Bytes input) {
  Choices choices(input);
  switch (choices.byte() % kDecoders) {
    case kEnvironment:
      return run_environment(text_of(choices.rest()));
    case kFault:
      return run_fault(text_of(choices.rest()));
    case kSecretFile:
      return run_secret_file(choices.rest());
    case kWorldSize:
      return run_world_size(text_of(choices.rest()));
    default:
      return run_places(text_of(choices.rest()));
  }
}

static Seeds seeds() {
  Seeds list;
  const auto add = [&](const char* name, Decoder decoder, std::string_view text) {
    list.push_back({name, seed_for(decoder, std::as_bytes(std::span(text)))});
  };
  add("environment", kEnvironment,
      "Aps0\nB1\nC4\nDtcp://127.0.0.1:29500\nE500ms\nF2m\nG3\nHshm,tcp\nJ64KiB\nO100");
  add("faulty", kEnvironment, "Aps0\nB0\nC2\nDtcp://127.0.0.1:29500\nNseed=7,drop=0.01");
  add("secret", kEnvironment, "Aps0\nB0\nC2\nDtcp://127.0.0.1:29500\nLintegrity\nMa long secret");
  add("torchrun", kEnvironment, "P1\nQ4\nRlocalhost\nS29500\n[run");
  add("slurm", kEnvironment, "T1\nU4\nVgpu[03-07,9],login1\nDtcp://127.0.0.1:29500");
  add("fault", kFault,
      "seed=7,drop=0.01,delay=10ms-50ms,duplicate=0.5,reorder=0.1,cut=2s,kill=ps0@step10");
  add("partition", kFault, "partition=a|b@1s-5s,stop=ps1@time3s");
  add("secret-file", kSecretFile, "correct horse battery staple\n");
  add("world-size", kWorldSize, "2:8");
  add("world-size-open", kWorldSize, "1:");
  add("place", kPlaces, "tcp://[::1]:29500");
  return list;
}

}  // namespace stitch::fuzz::environments

namespace stitch::fuzz {
const Target options{"options", environments::run, environments::seeds, 256, std::size_t{2} << 20};
}  // namespace stitch::fuzz
