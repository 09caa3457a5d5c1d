#include "stitch/transport/gpu/path_choice.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "stitch/base/deadline.h"
#include "stitch/base/forked.h"
#include "stitch/base/hash.h"
#include "stitch/base/mutex.h"
#include "stitch/base/random.h"

namespace stitch::transport::gpu {
namespace {

constexpr int kFirstFiveDigitVersion = 10000;  // NCCL 2.9 and later: major * 10000 + minor * 100

// Of the boot, and of the namespace whose steady clock the process has: processes of one host
// compare readings of it (IpcSlotFrame).
std::array<std::uint64_t, 2> host_id() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  std::error_code none;  // of a kernel without them
  text += std::filesystem::read_symlink("/proc/self/ns/time", none).string();
  std::array<std::uint64_t, 2> id{0, 1};
  for (const char letter : text) {
    id[0] = base::mix_bits(id[0] + static_cast<unsigned char>(letter));
    id[1] = base::mix_bits(id[1] ^ id[0]);
  }
  return id;
}

}  // namespace

std::string_view to_string(Path path) noexcept {
  switch (path) {
    case Path::staging:
      return "staging";
    case Path::local:
      return "local copy";
    case Path::peer:
      return "peer copy";
    case Path::nccl:
      return "NCCL";
    case Path::ipc:
      return "IPC";
  }
  return "unknown path";
}

std::string_view short_name(Path path) noexcept {
  switch (path) {
    case Path::staging:
      return "staging";
    case Path::local:
      return "local";
    case Path::peer:
      return "peer";
    case Path::nccl:
      return "nccl";
    case Path::ipc:
      return "ipc";
  }
  return "unknown";
}

ProcessIdentity this_process() {
  static base::Mutex mutex;
  static ProcessIdentity identity;
  static std::uint32_t forks = ~0U;
  const base::MutexLock lock(mutex);
  if (forks != base::fork_count()) {
    identity = {host_id(), base::random_number()};
    forks = base::fork_count();
  }
  return identity;
}

void PathPause::failure(std::chrono::nanoseconds first) {
  length_ = std::clamp(2 * length_, first, std::max(first, kLongest));
  until_ = base::deadline_after(length_);
}

bool nccl_versions_match(int one, int other) noexcept {
  return one >= kFirstFiveDigitVersion && other >= kFirstFiveDigitVersion &&
         one / 100 == other / 100;
}

PathChoice choose_path(const PathEnd& source, const PathEnd& destination, PathState peer,
                       PathState nccl, std::size_t bytes, PathState ipc) {
  PathChoice choice;
  if (bytes == 0) return choice;
  if (source.process == destination.process) {
    if (source.device == destination.device) {
      choice.path = Path::local;
    } else if (peer == PathState::open) {
      choice.path = Path::peer;
    } else {
      choice.test_peer = peer == PathState::untried;
    }
    return choice;
  }
  // NCCL refuses two ranks on one GPU.
  const bool one_gpu = source.process.host == destination.process.host &&
                       source.device_uuid == destination.device_uuid;
  if (one_gpu) {
    if (ipc == PathState::open) choice.path = Path::ipc;
    choice.open_ipc = ipc == PathState::untried;
    return choice;
  }
  choice.versions_differ = !nccl_versions_match(source.nccl_version, destination.nccl_version);
  if (choice.versions_differ) return choice;
  if (nccl == PathState::open) {
    choice.path = Path::nccl;
  } else {
    choice.open_nccl = nccl == PathState::untried;
  }
  return choice;
}

}  // namespace stitch::transport::gpu
