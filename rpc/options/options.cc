// One file, though long: each option, with its variable and its check, stands in one place.
#include "stitch/rpc/options/options.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/name_list.h"
#include "stitch/base/parse_duration.h"
#include "stitch/rpc/gpu/device_map.h"
#include "stitch/rpc/message/peer_limits.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/rpc/options/launcher.h"
#include "stitch/rpc/options/option_name.h"
#include "stitch/rpc/options/security_options.h"
#include "stitch/transport/faults/fault_plan.h"

extern "C" char** environ;  // NOLINT: POSIX's name

namespace stitch {

using rpc::option_name;

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& value,
                         const std::string& allowed) {
  throw Error(ErrorCode::invalid_argument,
              option_name(what) + " is \"" + value + "\"; allowed: " + allowed);
}

// Runs `check`. Its error names the field, or the variable that has set it.
template <class Check>
void named(const std::string& field, Check&& check) {
  try {
    check();
  } catch (const Error& error) {
    const std::string name = option_name(field);
    if (name == field && std::string_view(error.what()).starts_with(field)) throw;
    throw error.with_prefix(name);
  }
}

// A number and what follows it.
std::pair<double, std::string> split_number(const std::string& what, const std::string& text,
                                            const std::string& allowed) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !(number >= 0)) refuse(what, text, allowed);
  return {number, std::string(end, text.data() + text.size())};
}

std::chrono::nanoseconds parse_duration(const std::string& what, const std::string& text) {
  static const std::string kAllowed = "a duration such as 500ms, 5s, 2m, 0";
  if (const auto duration = base::parse_duration(text)) return *duration;
  refuse(what, text, kAllowed);
}

// "250ms", "-1s", "7ns": as such options are written.
std::string option_text(std::chrono::nanoseconds duration) {
  static constexpr std::array<std::pair<const char*, std::int64_t>, 3> kUnits{
      {{"s", 1'000'000'000}, {"ms", 1'000'000}, {"us", 1'000}}};
  for (const auto& [unit, nanoseconds] : kUnits) {
    if (duration.count() % nanoseconds == 0)
      return std::to_string(duration.count() / nanoseconds) + unit;
  }
  return std::to_string(duration.count()) + "ns";
}

std::size_t parse_bytes(const std::string& what, const std::string& text) {
  static const std::string kAllowed = "a size such as 4096, 64KiB, 64MiB, 4GiB";
  const auto [number, unit] = split_number(what, text, kAllowed);
  static constexpr std::array<std::pair<const char*, double>, 5> kUnits{
      {{"", 1}, {"B", 1}, {"KiB", 1024}, {"MiB", 1048576}, {"GiB", 1073741824}}};
  for (const auto& [name, bytes] : kUnits) {
    if (unit == name && number * bytes < 9e18) return static_cast<std::size_t>(number * bytes);
  }
  refuse(what, text, kAllowed);
}

int parse_int(const std::string& what, const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0)
    refuse(what, text, "a number from 0 on");
  return value;
}

bool parse_flag(const std::string& what, const std::string& text) {
  if (text != "0" && text != "1") refuse(what, text, "0, 1");
  return text == "1";
}

WorldSize parse_world_size(const std::string& text) {
  try {
    return WorldSize(text);
  } catch (const Error&) {
    refuse("STITCH_WORLD_SIZE", text, "a number from 1 on, or a range such as 2:8 or 2:");
  }
}

std::vector<std::string> parse_list(const std::string& text) {
  std::vector<std::string> items;
  for (std::size_t at = 0; at <= text.size();) {
    const auto comma = std::min(text.find(',', at), text.size());
    if (comma > at) items.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return items;
}

// "ps0:cuda:0=cuda:1,ps0:cuda:1=cuda:0,ps1:cuda:0=cpu". Names of workers may have colons in them,
// and no name of a device is the end of another's.
std::map<std::string, std::map<std::string, std::string>> parse_device_maps(
    const std::string& text) {
  std::map<std::string, std::map<std::string, std::string>> maps;
  for (const auto& item : parse_list(text)) {
    const auto equals = item.find('=');
    const std::string left = item.substr(0, equals);
    const bool numbered = !left.ends_with(":cpu") && !left.ends_with(":cuda");
    const auto colon = numbered ? left.rfind(":cuda:") : left.rfind(':');
    if (equals == std::string::npos || colon == std::string::npos || colon == 0) {
      refuse("STITCH_DEVICE_MAPS", text,
             "worker:device=device, several of them with commas, such as ps0:cuda:0=cuda:1");
    }
    auto& map = maps[left.substr(0, colon)];
    if (!map.emplace(left.substr(colon + 1), item.substr(equals + 1)).second)
      refuse("STITCH_DEVICE_MAPS", text,
             "each device of a worker once; " + left + " is there twice");
  }
  return maps;
}

struct Variable {
  const char* name;
  // Whether it has set the field.
  std::function<bool(Options&, const Options& defaults, const std::string& value)> read;
};

template <class T, class Parse>
auto field(T Options::*member, Parse parse) {
  return [member, parse](Options& options, const Options& defaults, const std::string& value) {
    if (options.*member != defaults.*member) return false;
    options.*member = parse(value);
    return true;
  };
}

const std::vector<Variable>& variables() {
  static const std::vector<Variable> list{
      {"STITCH_NAME", field(&Options::name, [](const std::string& v) { return v; })},
      {"STITCH_RANK",
       field(&Options::rank, [](const std::string& v) { return parse_int("STITCH_RANK", v); })},
      {"STITCH_WORLD_SIZE",
       field(&Options::world_size, [](const std::string& v) { return parse_world_size(v); })},
      {"STITCH_INIT_METHOD", field(&Options::init_method, [](const std::string& v) { return v; })},
      {"STITCH_RPC_TIMEOUT",
       field(&Options::rpc_timeout,
             [](const std::string& v) { return parse_duration("STITCH_RPC_TIMEOUT", v); })},
      {"STITCH_INIT_TIMEOUT",
       field(&Options::init_timeout,
             [](const std::string& v) { return parse_duration("STITCH_INIT_TIMEOUT", v); })},
      {"STITCH_SHUTDOWN_TIMEOUT",
       field(&Options::shutdown_timeout,
             [](const std::string& v) { return parse_duration("STITCH_SHUTDOWN_TIMEOUT", v); })},
      {"STITCH_STOP_ON_SIGNALS",
       field(&Options::stop_on_signals,
             [](const std::string& v) { return parse_flag("STITCH_STOP_ON_SIGNALS", v); })},
      {"STITCH_HEARTBEAT_TIMEOUT",
       field(&Options::heartbeat_timeout,
             [](const std::string& v) { return parse_duration("STITCH_HEARTBEAT_TIMEOUT", v); })},
      {"STITCH_RECONNECT_TIMEOUT",
       field(&Options::reconnect_timeout,
             [](const std::string& v) { return parse_duration("STITCH_RECONNECT_TIMEOUT", v); })},
      {"STITCH_NUM_THREADS",
       field(&Options::num_threads,
             [](const std::string& v) { return parse_int("STITCH_NUM_THREADS", v); })},
      {"STITCH_TRANSPORTS", field(&Options::transports, parse_list)},
      {"STITCH_CHANNELS", field(&Options::channels, parse_list)},
      {"STITCH_MAX_FRAME_BYTES",
       field(&Options::max_frame_bytes,
             [](const std::string& v) { return parse_bytes("STITCH_MAX_FRAME_BYTES", v); })},
      {"STITCH_MAX_INFLIGHT_BYTES",
       field(&Options::max_inflight_bytes,
             [](const std::string& v) { return parse_bytes("STITCH_MAX_INFLIGHT_BYTES", v); })},
      {"STITCH_MAX_INFLIGHT_CALLS", field(&Options::max_inflight_calls,
                                          [](const std::string& v) {
                                            return static_cast<std::size_t>(std::max(
                                                0, parse_int("STITCH_MAX_INFLIGHT_CALLS", v)));
                                          })},
      {"STITCH_INLINE_BYTES",
       field(&Options::inline_bytes,
             [](const std::string& v) { return parse_bytes("STITCH_INLINE_BYTES", v); })},
      {"STITCH_RECEIVE_POOL_BYTES",
       field(&Options::receive_pool_bytes,
             [](const std::string& v) { return parse_bytes("STITCH_RECEIVE_POOL_BYTES", v); })},
      {"STITCH_DEVICE_MAPS",
       field(&Options::device_maps, [](const std::string& v) { return parse_device_maps(v); })},
      {"STITCH_GPU_PATHS", field(&Options::gpu_paths, parse_list)},
      {"STITCH_DUMP_DIR", field(&Options::dump_dir, [](const std::string& v) { return v; })},
      {"STITCH_FAULT", field(&Options::fault, [](const std::string& v) { return v; })},
      // Read where they are used.
      {"STITCH_SECRET", nullptr},
      {"STITCH_SECRET_FILE", nullptr},
      {"STITCH_ENCRYPTION", nullptr},
      {"STITCH_SOCKET_IFNAME", nullptr},
      {"STITCH_INSECURE", nullptr},
      {"STITCH_JOB", nullptr},
  };
  return list;
}

// Throws for a misspelt variable. Others may belong to another program: Kubernetes makes such for a
// service that is called "stitch".
void refuse_or_warn_of(const std::string& name) {
  constexpr std::size_t kPrefix = std::string_view("STITCH_").size();
  const std::string rest = name.substr(kPrefix);  // the prefix makes any two alike
  const std::size_t near = std::max<std::size_t>(1, rest.size() / 3);
  for (const auto& variable : variables()) {
    if (base::edit_distance(rest, variable.name + kPrefix, near) > near) continue;
    throw Error(ErrorCode::invalid_argument,
                "variable " + name + " is unknown; did you mean " + variable.name + "?");
  }
  static base::Mutex mutex;
  static std::set<std::string> said;
  const base::MutexLock lock(mutex);
  if (said.insert(name).second)
    std::fprintf(stderr, "stitch: variable %s is unknown, and ignored\n", name.c_str());
}

std::optional<std::string> environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

void read_variables(Options& options) {
  const Options defaults;
  rpc::forget_set_by_variables();
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!text.starts_with("STITCH_")) continue;
    const std::string name = text.substr(0, text.find('='));
    const auto found =
        std::find_if(variables().begin(), variables().end(),
                     [&](const Variable& variable) { return name == variable.name; });
    if (found == variables().end()) {
      refuse_or_warn_of(name);
      continue;
    }
    if (found->read && found->read(options, defaults, environment(name).value_or("")))
      rpc::note_set_by_variable(name);
  }
}

void check_name(const std::string& name) {
  if (!is_worker_name(name))
    refuse("name", name, "1 to 127 of letters, digits, '-', '_', ':', '.'");
}

// "; did you mean shm?", or nothing when no known name is near.
std::string hint(const std::string& wanted, std::vector<std::string> known) {
  const auto near = base::nearest_names(wanted, std::move(known), 1);
  return near.empty() ? "" : "; did you mean " + near.front() + "?";
}

// Also where it is not used, as in a world of one: the program will be started with more.
void check_init_method(const std::string& method) {
  if (method == "env://") return;
  if (method.starts_with("file:///") && method.size() > 8) return;
  if (method.starts_with("file://") && method.size() > 7 && method[7] != '/')
    throw Error(ErrorCode::invalid_argument, option_name("init_method") + " is \"" + method +
                                                 "\": write file:///" + method.substr(7));
  if (rpc::parse_tcp_method(method)) return;
  const std::string scheme = method.substr(0, method.find("://")) + "://";
  const std::vector<std::string> known{"env://", "tcp://", "c10d://", "file://"};
  refuse("init_method", method,
         "env://, tcp://host:port, c10d://host:port, file:///path" +
             (std::ranges::find(known, scheme) != known.end() ? "" : hint(scheme, known)));
}

void check_choices(const std::string& what, const std::vector<std::string>& chosen,
                   const std::vector<std::string>& known) {
  for (const auto& name : chosen) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    refuse(what, name, base::join_names(known) + hint(name, known));
  }
}

// The rank and the size of the world.
void resolve_place_in_world(Options& options, const std::optional<rpc::LaunchInfo>& launch) {
  constexpr int kUnset = Options::kFromLauncher;
  if (launch && launch->rank >= 0) {
    options.rank = launch->rank;
    rpc::note_set_by_variable(launch->rank_variable, "rank");
  }
  if (launch && launch->world_size >= 0) {
    options.world_size = launch->world_size;
    rpc::note_set_by_variable(launch->world_size_variable, "world_size");
  }
  const bool place_is_known = options.init_method != "env://" || options.store != nullptr;
  if (!options.world_size.is_set() && place_is_known) options.world_size = WorldSize::range(1);
  const WorldSize& size = options.world_size;
  if (size == 1 && options.rank == kUnset) options.rank = 0;
  // -1 may be a number that could not be read: treating it as "not set" would hide that.
  if (options.rank < 0 && options.rank != kUnset)
    refuse("rank", std::to_string(options.rank), "a number from 0 on");
  if (size.is_set() && (size.min() < 1 || size.max() < size.min())) {
    refuse("world_size", size.is_elastic() ? size.str() : std::to_string(size.min()),
           size.is_elastic() ? "min:max with a min from 1 on and a max that is not less"
                             : "a number from 1 on");
  }
  if (!size.is_set() || (options.rank == kUnset && !size.is_elastic())) {
    throw Error(ErrorCode::invalid_argument,
                std::string(options.rank == kUnset ? "rank" : "world_size") +
                    " is not known: start the program with stitch-run, torchrun, srun or mpirun, "
                    "set RANK and WORLD_SIZE, or set it in "
                    "stitch::Options");
  }
  if (options.rank >= size.max()) {
    throw Error(ErrorCode::invalid_argument,
                option_name("rank") + ' ' + std::to_string(options.rank) +
                    " does not fit a world of " + size.str() + "; ranks are 0 to " +
                    (size.is_elastic() ? std::to_string(size.max() - 1) : "world_size - 1"));
  }
}

}  // namespace

std::vector<std::string> rpc::known_variables() {
  std::vector<std::string> names;
  for (const auto& variable : variables()) names.push_back(variable.name);
  return names;
}

Options resolve_options(Options options) {
  const rpc::SecretWiper wiper(options.secret);  // once it has been moved to the caller
  read_variables(options);
  rpc::resolve_security(options);
  const rpc::LaunchQuestion question{
      .rank = options.rank == Options::kFromLauncher && options.world_size != 1,
      .world_size = !options.world_size.is_set(),
      .init_method = options.init_method == "env://" && !options.store && options.world_size != 1};
  std::optional<rpc::LaunchInfo> launch;
  if (question.rank || question.world_size || question.init_method)
    launch = rpc::read_launcher(environment, question);
  resolve_place_in_world(options, launch);
  if (question.init_method && options.world_size != 1) {
    options.init_method = launch ? launch->init_method : rpc::master_address(environment);
    if (options.init_method.empty()) {
      throw Error(
          ErrorCode::invalid_argument,
          std::string("init_method env:// needs MASTER_ADDR and MASTER_PORT") +
              (launch ? " where " + launch->launcher + " spreads the workers over hosts" : "") +
              "; or use tcp://host:port or file:///path");
    }
  }
  const bool ranked = options.rank != Options::kFromLauncher;
  if (options.name.empty() && ranked) options.name = "worker" + std::to_string(options.rank);
  if (!options.name.empty() || ranked) check_name(options.name);
  check_init_method(options.init_method);
  named("fault", [&] { static_cast<void>(transport::parse_fault_plan(options.fault)); });
  check_choices("transports", options.transports,
                {"loopback", "shm", "tcp", "tensorpipe-shm", "uv"});
  check_choices("channels", options.channels, {"basic", "cma"});
  check_choices("gpu_paths", options.gpu_paths, {"peer", "nccl", "staging"});
  named("device_maps", [&] { static_cast<void>(rpc::parse_device_maps(options.device_maps)); });
  if (options.num_threads < 0)
    refuse("num_threads", std::to_string(options.num_threads), "a number from 0 on");
  if (options.num_threads == 0)
    options.num_threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 2, 16);
  for (const auto& [name, duration] : {std::pair("rpc_timeout", options.rpc_timeout),
                                       std::pair("init_timeout", options.init_timeout),
                                       std::pair("shutdown_timeout", options.shutdown_timeout),
                                       std::pair("reconnect_timeout", options.reconnect_timeout)}) {
    if (duration.count() < 0) refuse(name, option_text(duration), "durations from 0 on");
  }
  if (options.heartbeat_timeout < std::chrono::milliseconds(40) ||
      options.heartbeat_timeout > std::chrono::hours(24))
    refuse("heartbeat_timeout", option_text(options.heartbeat_timeout), "40ms to 24h");
  options.init_timeout =
      std::min<std::chrono::nanoseconds>(options.init_timeout, std::chrono::hours(24 * 365));
  constexpr std::size_t kMaxInlineBytes = std::size_t{1} << 20;
  if (options.inline_bytes > kMaxInlineBytes)
    refuse("inline_bytes", std::to_string(options.inline_bytes), "sizes up to 1MiB");
  if (options.max_inflight_calls < 1 || options.max_inflight_calls > rpc::PeerLimits::kMaxCalls)
    refuse("max_inflight_calls", std::to_string(options.max_inflight_calls), "1 to 1048576");
  if (options.max_inflight_bytes < 1)
    refuse("max_inflight_bytes", "0", "sizes from 1 byte on: with none, no call could be made");
  if (options.max_frame_bytes < 4096)
    refuse("max_frame_bytes", std::to_string(options.max_frame_bytes), "4096 bytes or more");
  return options;
}

}  // namespace stitch
