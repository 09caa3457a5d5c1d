#include "stitch/rpc/options/options.h"

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "stitch/base/error.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {
namespace {

constexpr std::array kVariables{"STITCH_NAME",
                                "STITCH_RANK",
                                "STITCH_WORLD_SIZE",
                                "STITCH_INIT_METHOD",
                                "STITCH_RPC_TIMEOUT",
                                "STITCH_INIT_TIMEOUT",
                                "STITCH_NUM_THREADS",
                                "STITCH_TRANSPORTS",
                                "STITCH_CHANNELS",
                                "STITCH_MAX_FRAME_BYTES",
                                "STITCH_INLINE_BYTES",
                                "STITCH_DEVICE_MAPS",
                                "STITCH_ENCRYPTION",
                                "STITCH_SECRET",
                                "STITCH_SHUTDOWN_TIMEOUT",
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

// The input: an environment, as lines of a variable's number (a letter) and its value.
bool run(Bytes input) {
  for (const char* name : kVariables) ::unsetenv(name);
  const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  for (std::size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    if (line.empty()) continue;
    const auto number = static_cast<unsigned char>(line[0] - 'A') % kVariables.size();
    ::setenv(kVariables[number], line.substr(1).c_str(), 1);
  }
  bool accepted = false;
  try {
    static_cast<void>(resolve_options({}));
    accepted = !text.empty();
  } catch (const Error&) {
  }
  for (const char* name : kVariables) ::unsetenv(name);
  return accepted;
}

std::vector<base::Bytes> seeds() {
  std::vector<base::Bytes> list;
  list.push_back(
      bytes_of("Aps0\nB1\nC4\nDtcp://127.0.0.1:29500\nE500ms\nHshm,tcp\nJ64MiB"
               "\nLps1:cuda:0=cuda:1\nG3"));
  return list;
}

}  // namespace

const Target options{"options", run, seeds};

}  // namespace stitch::fuzz
