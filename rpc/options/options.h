#pragma once

#include <any>
#include <chrono>
#include <compare>
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "stitch/transport/wire/encryption.h"

namespace stitch {

namespace transport {
class Store;
}  // namespace transport
using transport::Encryption;

// How many workers a world has: a number (a fixed world), or a range "min:max" (an elastic world:
// it starts when `min` workers have arrived, further ones join and leave while it runs, at most
// `max` at a time). Not set: what the launcher says. A plain value; made from an int or from a
// text, so that `options.world_size = 4` and `options.world_size = "2:8"` both do.
class WorldSize {
 public:
  static constexpr int kUnset = std::numeric_limits<int>::min();    // "what the launcher says"
  static constexpr int kNoLimit = std::numeric_limits<int>::max();  // the max of "2:"

  constexpr WorldSize() noexcept = default;
  // A fixed world. resolve_options() refuses numbers below 1.
  constexpr WorldSize(int size) noexcept : min_(size), max_(size) {}  // NOLINT: as an int
  // "4", "2:8", or "2:" for no limit. Throws Error(invalid_argument) for any other text.
  WorldSize(const std::string& text);                            // NOLINT: as a text
  WorldSize(const char* text) : WorldSize(std::string(text)) {}  // NOLINT: as a text
  // The elastic world "min:max". resolve_options() refuses a min below 1 and a max below min.
  [[nodiscard]] static constexpr WorldSize range(int min, int max = kNoLimit) noexcept {
    WorldSize size(min);
    size.max_ = max;
    size.elastic_ = true;
    return size;
  }

  // Whether it says anything.
  [[nodiscard]] constexpr bool is_set() const noexcept { return min_ != kUnset; }
  // Whether workers may join and leave; true also of "4:4".
  [[nodiscard]] constexpr bool is_elastic() const noexcept { return elastic_; }
  // With how many workers the world starts; of a fixed world its size.
  [[nodiscard]] constexpr int min() const noexcept { return min_; }
  // How many there may be at a time; of a fixed world its size.
  [[nodiscard]] constexpr int max() const noexcept { return max_; }
  // "4", "2:8", "2:" or "unset".
  [[nodiscard]] std::string str() const;

  friend constexpr bool operator==(const WorldSize&, const WorldSize&) = default;
  // Equal to a number: a fixed world of that size. Ordered by the number it starts with.
  friend constexpr bool operator==(const WorldSize& size, int number) noexcept {
    return !size.elastic_ && size.min_ == number;
  }
  friend constexpr std::strong_ordering operator<=>(const WorldSize& size, int number) noexcept {
    return size.min_ <=> number;
  }
  friend std::ostream& operator<<(std::ostream& out, const WorldSize& size) {
    return out << size.str();
  }

 private:
  int min_ = kUnset;
  int max_ = kUnset;
  bool elastic_ = false;
};

// What protects traffic over TCP, as an option: an Encryption or its name, so that both
// `options.encryption = Encryption::off` and `options.encryption = "off"` do. Not set:
// what fits the secret. A plain value.
class EncryptionChoice {
 public:
  EncryptionChoice() = default;
  // Not set.
  EncryptionChoice(std::nullopt_t) {}  // NOLINT: as std::optional
  // This one.
  EncryptionChoice(Encryption encryption) : encryption_(encryption) {}  // NOLINT: as a value
  // Set where `choice` is.
  EncryptionChoice(std::optional<Encryption> choice) : encryption_(choice) {}  // NOLINT: the same
  // "on" or "off". Throws Error(invalid_argument) for any other text, and for null.
  EncryptionChoice(const std::string& name);  // NOLINT: as a text
  // The same.
  EncryptionChoice(const char* name)  // NOLINT: as a text
      : EncryptionChoice(std::string(name == nullptr ? "(null)" : name)) {}

  // Whether it is set.
  [[nodiscard]] bool has_value() const noexcept { return encryption_.has_value(); }
  // The same.
  explicit operator bool() const noexcept { return has_value(); }
  // For those who keep it as that.
  operator std::optional<Encryption>() const noexcept { return encryption_; }  // NOLINT: a value
  // REQUIRES: has_value().
  [[nodiscard]] Encryption operator*() const noexcept { return *encryption_; }
  // What it is set to, or `other`.
  [[nodiscard]] Encryption value_or(Encryption other) const noexcept {
    return encryption_.value_or(other);
  }
  // Both are not set, or set to the same.
  friend bool operator==(const EncryptionChoice&, const EncryptionChoice&) = default;

 private:
  std::optional<Encryption> encryption_;
};

// How a worker joins its world. Every field has a default and an environment variable
// STITCH_<FIELD>, which counts where the field was left at its default; durations are written
// "500ms", "5s", "2m", sizes "64MiB", lists with commas.
struct Options {
  std::string name{};                                                    // default "worker<rank>"
  static constexpr int kFromLauncher = std::numeric_limits<int>::min();  // "not set"
  int rank = kFromLauncher;  // default: what the launcher says
                             // An elastic world takes it as the worker's id, and gives a
                             // worker without one the next that is free
  // How many workers: 4, or the range "2:8" of an elastic world, which workers join and leave while
  // it runs. Default: what the launcher says; without a launcher, where init_method or store say
  // where to meet, "1:".
  WorldSize world_size{};
  std::string init_method = "env://";  // where workers meet: "env://", "tcp://host:port",
                                       // "c10d://host:port" (a store of torch's), "file:///path"
  std::chrono::nanoseconds rpc_timeout =
      std::chrono::seconds(60);  // of a call that names none; 0: never
  std::chrono::nanoseconds init_timeout = std::chrono::seconds(60);  // for all workers to arrive
  std::chrono::nanoseconds shutdown_timeout =
      std::chrono::seconds(30);  // for the end of a world, once all its workers have asked to leave
  // SIGTERM and SIGINT set stitch::stop_requested(), from when on a shutdown waits for others no
  // longer than shutdown_timeout; a second signal ends the process as usual.
  bool stop_on_signals = false;
  // A worker that says nothing at all for so long is declared dead. Four times in that, and at
  // least every 0.5 s, each sends a heartbeat over each connection; the same on all workers.
  std::chrono::nanoseconds heartbeat_timeout = std::chrono::seconds(10);
  // For how long a connection that breaks is made again, over any address, before its peer is lost;
  // a peer whose process has ended is lost at once. 0: not at all.
  std::chrono::nanoseconds reconnect_timeout = std::chrono::seconds(10);
  int num_threads = 0;  // threads for user functions; 0: one per core, at least 2, at most 16
  std::vector<std::string>
      transports{};  // of "loopback" (within a process), "shm", "tcp", and TensorPipe's
                     // "tensorpipe-shm", "uv"; best first; default: the first three
  std::vector<std::string> channels{};  // of TensorPipe: "basic", "cma", best first
  std::size_t inline_bytes =
      std::size_t{16}
      << 10;  // tensors up to this size are sent inside the frame; at most 1 MiB; 0: none
  std::size_t receive_pool_bytes =
      std::size_t{1} << 30;  // memory of received tensors kept for reuse; returned after 2 s unused
  // Where my tensors go on other workers: worker -> {my device -> its device}, such as
  // {"ps0", {{"cuda:0", "cuda:1"}}}; "cpu" is a device, too. One-to-one: replies go back by it.
  // A worker that is not named: each CUDA device to the one of the same number.
  std::map<std::string, std::map<std::string, std::string>> device_maps{};
  // The paths that large tensors may take between GPUs, of "peer", "nccl" and "staging"
  // (docs/gpu.md), at both ends. Default: all. Staging is used where no other is.
  std::vector<std::string> gpu_paths{};
  // Shared by all workers; proved on every connection before anything else is read. Also from the
  // file that STITCH_SECRET_FILE names. docs/security.md says what it protects.
  std::optional<std::string> secret{};
  // Of traffic over TCP: "on" or "off"; the same on all workers. Default: `on` with a secret, `off`
  // without one.
  EncryptionChoice encryption{};
  std::size_t max_frame_bytes = std::size_t{64} << 20;  // a longer frame is refused
  std::size_t max_inflight_bytes =
      std::size_t{4} << 30;  // of calls to one peer, and of those from it; then calls wait
  std::size_t max_inflight_calls = std::size_t{64} << 10;  // likewise calls; at most 1 Mi
  // Where dumps of what is stuck are written: on a call's timeout, on SIGUSR1,
  // and by Worker::dump(); docs/diagnosis.md. Default: nowhere.
  std::string dump_dir{};
  // Faults on purpose, such as "seed=7,drop=0.01,delay=50ms,kill=ps0@step10"; docs/reliability.md.
  // Default: none.
  std::string fault{};
  // Whether peers are served from the start. `false`: their calls wait, within their deadlines,
  // until Worker::serve(), so that a program can first make what its functions use.
  bool start_serving = true;
  // A pointer of the program's own, such as a shared_ptr to its model, for the functions that this
  // worker serves: stitch::user_data<T>() returns it. Of any type T that can be copied.
  std::any user_data{};
  // Instead of init_method: a store of the caller's own, for whole worlds in one process.
  std::shared_ptr<transport::Store> store{};
};

// Fills the fields that were left at their defaults from STITCH_* variables and the launcher's
// (torchrun, Slurm, Open MPI, MPICH, in this order), and checks them all. Throws
// Error(invalid_argument) naming the field or variable, the value and what is allowed; an unknown
// STITCH_* variable is an error that names the nearest known one. Not thread-safe against setenv.
[[nodiscard]] Options resolve_options(Options options);

}  // namespace stitch
