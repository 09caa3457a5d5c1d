#include "stitch/rpc/world/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/event_loop.h"
#include "stitch/base/name_list.h"
#include "stitch/base/random.h"
#include "stitch/rpc/options/launcher.h"
#include "stitch/rpc/options/security_options.h"
#include "stitch/transport/loopback/loopback_endpoint.h"
#include "stitch/transport/selection/interfaces.h"
#include "stitch/transport/selection/make_endpoints.h"
#include "stitch/transport/self_transfer.h"
#include "stitch/transport/store/file_store.h"
#include "stitch/transport/store/hash_store.h"
#include "stitch/transport/store/prefix_store.h"
#include "stitch/transport/store/tcp_store.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "stitch/transport/trimmed_pool.h"
#include "stitch/transport/wire/secret_key.h"

namespace stitch::rpc {

namespace {

using std::chrono::steady_clock;
using transport::Store;

constexpr const char* kLoopback = "loopback";
constexpr const char* kSharedMemory = "shm";

// "net:[4026531840]"; empty where /proc is not mounted.
std::string namespace_of_this_process(const char* kind) {
  char text[128] = {};
  const std::string path = std::string("/proc/self/ns/") + kind;
  return readlink(path.c_str(), text, sizeof(text) - 1) < 0 ? "" : text;
}

// Equal for workers of one process, and for nobody else. Asked for anew each time: children that
// were forked share the number, and are told apart by their ids (and by the namespace of these).
std::string process_token() {
  static const std::string number = std::to_string(base::random_number());
  return std::to_string(getpid()) + '-' + namespace_of_this_process("pid") + '-' + number;
}

// Equal for workers that reach one another on 127.0.0.1: one kernel, one network namespace.
std::string host_token() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  if (boot.empty()) {
    char name[256] = {};
    if (gethostname(name, sizeof(name) - 1) == 0) boot = name;
  }
  return boot + namespace_of_this_process("net");
}

// As make_endpoints() finds it out.
bool shared_memory_passes() {
  const transport::TransportChoice choice;
  try {
    return transport::passes_once(std::string(kSharedMemory) + ' ' + choice.bind_address, [&] {
      return transport::make_stream_endpoint(transport::self_transfer_options(),
                                             {{kSharedMemory}, choice.bind_address});
    });
  } catch (const Error&) {
    return false;  // it is tried again, and then said, when it is asked for
  }
}

// Equal for workers that can meet over shared memory: on one host, of one user, who is another in
// another user namespace. Empty for one that cannot or may not use it.
std::string memory_token(const Options& options) {
  const auto& names = options.transports;
  const bool wanted =
      names.empty() || std::find(names.begin(), names.end(), kSharedMemory) != names.end();
  const std::string users = namespace_of_this_process("user");
  if (!wanted || options.world_size == 1 || users.empty() || !shared_memory_passes()) return {};
  return host_token() + users + ':' + std::to_string(geteuid());
}

// Whether nothing is preferred to shared memory, but loopback within a process.
bool prefers_memory(const Options& options) {
  const auto& names = options.transports;
  const auto first = std::find_if(names.begin(), names.end(),
                                  [](const std::string& name) { return name != kLoopback; });
  return names.empty() || (first != names.end() && *first == kSharedMemory);
}

// What stands in the store may end up on a terminal.
std::string shown(std::string text) {
  constexpr std::size_t kMost = 127;
  if (text.size() > kMost) text.resize(kMost);
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

// One worker's entry in the store.
struct Entry {
  std::string name;
  std::int64_t rank = 0;
  std::int64_t world_size = 0;
  std::uint64_t epoch = 0;
  std::string process;
  std::string host;
  std::string memory;           // as memory_token()
  bool prefers_memory = false;  // as prefers_memory()

  [[nodiscard]] std::string encode() const {
    base::Bytes bytes;
    base::ByteWriter out(bytes);
    out.write_string(name);
    out.write(rank);
    out.write(world_size);
    out.write(epoch);
    out.write_string(process);
    out.write_string(host);
    out.write_string(memory);
    out.write(static_cast<std::uint8_t>(prefers_memory));
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  [[nodiscard]] static Entry decode(const std::string& text) {
    base::ByteReader in(std::as_bytes(std::span(text)), "member entry");
    Entry entry;
    entry.name = in.read_string();
    entry.rank = in.read<std::int64_t>();
    entry.world_size = in.read<std::int64_t>();
    entry.epoch = in.read<std::uint64_t>();
    entry.process = in.read_string();
    entry.host = in.read_string();
    entry.memory = in.read_string();
    entry.prefers_memory = in.read<std::uint8_t>() != 0;
    in.expect_end();
    return entry;
  }
};

struct Meeting {
  std::shared_ptr<Store> store;
  std::shared_ptr<void> server{};  // on the worker that hosts the store
};

// Whoever can reach an open port could call any registered function.
void check_open_network(const std::string& name, bool has_secret, const std::string& address) {
  if (address == "127.0.0.1" || address == "localhost" || address == "::1" || has_secret ||
      insecure_is_allowed())
    return;
  throw Error(ErrorCode::invalid_argument,
              "worker \"" + name + "\" would listen on " + address +
                  " without a secret: set STITCH_SECRET to the same value on all workers, or "
                  "STITCH_INSECURE=1 to let anyone in");
}

// Whether the store of this very job is at one of the ports before `own`, which were taken.
bool another_rank_0_hosts(base::EventLoop& loop, transport::TcpStoreOptions tcp,
                          std::uint16_t own) {
  constexpr std::chrono::milliseconds kPatience{500};
  if (tcp.port == 0 || own == tcp.port) return false;
  tcp.port_span = own - tcp.port;
  tcp.one_round = true;
  tcp.connect_timeout = kPatience;
  try {
    return transport::make_tcp_store(loop, tcp) != nullptr;
  } catch (const Error&) {
    return false;  // something else is there: a launcher's own store, perhaps
  }
}

Meeting open_store(const Options& options, std::shared_ptr<const transport::SecretKey> key,
                   base::EventLoop& loop) {
  if (options.store) return {options.store, nullptr};
  if (options.world_size == 1) return {transport::make_hash_store(), nullptr};
  const std::string& method = options.init_method;
  if (method.starts_with("file://")) return {transport::make_file_store(method.substr(7)), nullptr};
  const auto place = parse_tcp_method(method).value();  // checked by resolve_options()
  transport::TcpStoreOptions tcp;
  tcp.host = place.host;
  tcp.port = place.port;
  tcp.port_span = 16;
  tcp.job = method;
  tcp.key = std::move(key);
  tcp.connect_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.init_timeout);
  Meeting meeting;
  if (options.rank == 0) {
    check_open_network(options.name, tcp.key != nullptr, tcp.host);
    auto server = std::make_shared<transport::TcpStoreServer>(loop, tcp);
    // If there are two of rank 0, they and everybody else are to be told so in one place.
    if (!another_rank_0_hosts(loop, tcp, server->port())) {
      meeting.server = server;
      tcp.port = server->port();
      tcp.port_span = 1;
    }
  }
  meeting.store = transport::make_tcp_store(loop, tcp);
  return meeting;
}

// Whether `self` can connect to an address of `other`, as far as hosts and users decide.
bool within_reach(const std::string& address, const Entry& self, const Entry& other) {
  if (address.starts_with("shm:")) return !self.memory.empty() && self.memory == other.memory;
  return !address.starts_with("tensorpipe-shm:") || self.host == other.host;
}

class Rendezvous {
 public:
  // `hosts`: the store goes with this worker.
  Rendezvous(const Options& options, Store& store, bool hosts)
      : options_(options),
        store_(store),
        hosts_(hosts),
        deadline_(steady_clock::now() + options.init_timeout) {}

  // Everybody's entries, by rank; `self` says who this worker is. Throws when they do not make a
  // world; those who came are told.
  std::vector<Entry> meet(Entry self) {
    self.epoch = static_cast<std::uint64_t>(store_.add("epoch/" + self.name, 1));
    const auto slot = store_.add("arrived", 1) - 1;
    store_.set("member/" + std::to_string(slot), self.encode());
    if (slot >= options_.world_size) {
      tell_the_others({});
      throw Error(ErrorCode::invalid_argument, "worker \"" + self.name +
                                                   "\" is one too many: the world of " +
                                                   std::to_string(options_.world_size) + " at " +
                                                   store_.describe() + " is full");
    }
    std::vector<Entry> entries;
    try {
      for (const auto& text : read_all("member/")) entries.push_back(Entry::decode(text));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::timeout) throw;
      throw Error(ErrorCode::timeout,
                  "worker \"" + self.name + "\" waited " +
                      std::to_string(options_.init_timeout / std::chrono::milliseconds(1)) +
                      " ms for a world of " + std::to_string(options_.world_size) + " at " +
                      store_.describe() + ": only these arrived: " + arrived_names());
    }
    try {
      check(entries);
    } catch (const Error&) {
      tell_the_others(entries);
      throw;
    }
    std::sort(entries.begin(), entries.end(),
              [](const Entry& a, const Entry& b) { return a.rank < b.rank; });
    return entries;
  }

  std::uint64_t world_number() {
    const std::string text =
        store_.compare_and_set("world", std::nullopt, std::to_string(base::random_number()));
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) {
      throw Error(ErrorCode::protocol, "the number of the world is \"" + shown(text) + "\" in " +
                                           store_.describe() + ", not a number from 0 on");
    }
    return number;
  }

  // Everybody's addresses, by rank.
  std::vector<std::vector<std::string>> exchange_addresses(const std::vector<std::string>& mine) {
    std::string joined;
    for (const auto& address : mine) joined += address + '\n';
    store_.set("address/" + std::to_string(options_.rank), joined);
    std::vector<std::vector<std::string>> all;
    for (const auto& text : read_all("address/")) {
      all.push_back(split_lines(text));
    }
    return all;
  }

  // To be called when everything has been read. True for the last worker, which has cleaned up.
  bool finish() {
    if (store_.add("read", 1) < options_.world_size) return false;
    for (std::int64_t i = 0; i < options_.world_size; ++i) {
      store_.erase("member/" + std::to_string(i));
      store_.erase("address/" + std::to_string(i));
    }
    store_.erase("world");
    store_.erase("read");
    store_.erase("arrived");
    return true;
  }

 private:
  // Key after key: a wait for all of them would have the store keep the keys of all workers for
  // all workers.
  std::vector<std::string> read_all(const std::string& prefix) {
    std::vector<std::string> values;
    for (std::int64_t i = 0; i < options_.world_size; ++i)
      values.push_back(store_.get(prefix + std::to_string(i), left()));
    return values;
  }
  // Somebody is wrong here. Those who expect a larger world wait for more than will come: they are
  // shown what is there. Who hosts the store keeps it until everybody who came has seen it, for a
  // moment at most.
  void tell_the_others(const std::vector<Entry>& entries) {
    constexpr std::chrono::seconds kPatience{2};
    constexpr std::chrono::milliseconds kPause{5};
    constexpr std::int64_t kMostShown = 4096;
    const auto give_up = std::min(deadline_, steady_clock::now() + kPatience);
    try {
      store_.add("seen", 1);  // how many have seen it: before this one can be told no more
      std::int64_t largest = 0;
      for (const auto& entry : entries) largest = std::max(largest, entry.world_size);
      for (std::int64_t i = options_.world_size; i < std::min(largest, kMostShown); ++i) {
        store_.compare_and_set("member/" + std::to_string(i), std::nullopt,
                               entries.front().encode());
      }
      while (hosts_ && store_.add("seen", 0) < store_.add("arrived", 0) &&
             steady_clock::now() < give_up)
        std::this_thread::sleep_for(kPause);
    } catch (const Error&) {
      // There is an error to be thrown already.
    }
  }
  [[nodiscard]] Store::Timeout left() const {
    const auto now = steady_clock::now();
    return now >= deadline_ ? Store::Timeout(0)
                            : std::chrono::ceil<Store::Timeout>(deadline_ - now);
  }
  std::string arrived_names() {
    std::vector<std::string> names;
    for (std::int64_t i = 0; i < options_.world_size; ++i) {
      if (const auto text = store_.try_get("member/" + std::to_string(i)))
        names.push_back(Entry::decode(*text).name);
    }
    return base::join_names(names);
  }
  void check(const std::vector<Entry>& entries) const {
    std::map<std::int64_t, const Entry*> by_rank;
    std::map<std::string, const Entry*> by_name;
    for (const auto& entry : entries) {
      if (entry.rank < 0 || entry.rank >= entry.world_size || !is_worker_name(entry.name)) {
        throw Error(ErrorCode::protocol, "an entry in " + store_.describe() +
                                             " makes no sense: " + "worker \"" + shown(entry.name) +
                                             "\", rank " + std::to_string(entry.rank) + " of " +
                                             std::to_string(entry.world_size));
      }
      if (entry.world_size != options_.world_size) {
        throw Error(ErrorCode::invalid_argument,
                    "worker \"" + entry.name + "\" (rank " + std::to_string(entry.rank) +
                        ") expects a world of " + std::to_string(entry.world_size) + ", worker \"" +
                        options_.name + "\" one of " + std::to_string(options_.world_size));
      }
      const auto [same_rank, new_rank] = by_rank.emplace(entry.rank, &entry);
      if (!new_rank) {
        throw Error(ErrorCode::invalid_argument,
                    "rank " + std::to_string(entry.rank) + " is taken twice: by worker \"" +
                        same_rank->second->name + "\" and worker \"" + entry.name + "\"");
      }
      const auto [same_name, new_name] = by_name.emplace(entry.name, &entry);
      if (!new_name) {
        throw Error(ErrorCode::invalid_argument, "worker name \"" + entry.name +
                                                     "\" is taken twice: by rank " +
                                                     std::to_string(same_name->second->rank) +
                                                     " and rank " + std::to_string(entry.rank));
      }
    }
  }

  const Options& options_;
  Store& store_;
  const bool hosts_;
  const steady_clock::time_point deadline_;
};

}  // namespace

std::shared_ptr<Agent> join_world(Options options) {
  const SecretWiper wiper(options.secret);
  auto loop = std::make_shared<base::EventLoop>("stitch-loop");
  // Stretched once, for the store and all connections.
  const std::shared_ptr<const transport::SecretKey> key =
      options.secret.empty() ? nullptr : transport::SecretKey::stretch(options.secret);
  wipe(options.secret);  // nobody needs its text any more
  Meeting meeting = open_store(options, key, *loop);
  const auto store = transport::make_prefix_store("stitch", meeting.store);
  Rendezvous rendezvous(options, *store, meeting.server != nullptr);
  const auto entries =
      rendezvous.meet({options.name, options.rank, options.world_size, 0, process_token(),
                       host_token(), memory_token(options), prefers_memory(options)});
  const Entry& self = entries[static_cast<std::size_t>(options.rank)];

  transport::EndpointOptions endpoint_options;
  endpoint_options.self.id = static_cast<std::uint32_t>(options.rank);
  endpoint_options.self.epoch = self.epoch;
  endpoint_options.self.name = options.name;
  endpoint_options.self.world = rendezvous.world_number();
  endpoint_options.secret = key;
  endpoint_options.encryption = options.encryption.value_or(Encryption::on);
  endpoint_options.max_frame_bytes = options.max_frame_bytes;
  // A message that is larger comes in alone.
  endpoint_options.max_receiving_bytes = options.max_inflight_bytes;

  const auto receive_pool = transport::make_trimmed_pool(options.receive_pool_bytes, loop);
  endpoint_options.allocator = [receive_pool](transport::Device device, std::size_t bytes) {
    return receive_pool->allocate(device, bytes);
  };

  // Listen only where somebody will call from: in process always (calls to self go there, too).
  // Workers of one process meet there unless the user names transports and this is not among them.
  const auto& wanted_transports = options.transports;
  const bool use_loopback =
      wanted_transports.empty() || std::find(wanted_transports.begin(), wanted_transports.end(),
                                             kLoopback) != wanted_transports.end();
  const auto by_loopback = [&](const Entry& entry) {
    return entry.process == self.process && (use_loopback || entry.rank == self.rank);
  };
  auto peers = std::make_unique<PeerTable>();
  auto addresses = peers->listen(transport::make_loopback_endpoint(
      endpoint_options, transport::LoopbackNetwork::process_wide()));
  const bool transports_needed = !std::all_of(entries.begin(), entries.end(), by_loopback);
  const bool other_hosts = std::any_of(entries.begin(), entries.end(),
                                       [&](const Entry& entry) { return entry.host != self.host; });
  // Any user of this host could connect to a port: it is left out where all meet in shared memory.
  const bool memory_is_enough =
      !self.memory.empty() && std::all_of(entries.begin(), entries.end(), [&](const Entry& entry) {
        return entry.memory == self.memory && entry.prefers_memory;
      });
  if (transports_needed) {
    transport::TransportChoice choice;
    if (!wanted_transports.empty()) choice.transports = wanted_transports;
    std::erase(choice.transports, kLoopback);
    if (!options.channels.empty()) choice.channels = options.channels;
    if (memory_is_enough) {
      choice.transports = {kSharedMemory};
    } else {
      const auto wanted = transport::wanted_interfaces_from_environment();
      choice.bind_address =
          transport::choose_address(transport::list_interfaces(), wanted, !other_hosts);
      check_open_network(options.name, key != nullptr, choice.bind_address);
      check_tensorpipe_address(choice.transports, choice.bind_address);
    }
    endpoint_options.refuse_own_id = true;  // calls to oneself stay in the process
    for (auto& endpoint : transport::make_endpoints(endpoint_options, choice)) {
      for (auto& address : peers->listen(std::move(endpoint)))
        addresses.push_back(std::move(address));
    }
  }

  const auto all_addresses = rendezvous.exchange_addresses(addresses);
  std::vector<Member> members;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const Entry& entry = entries[i];
    Member member{{entry.name, WorkerId(static_cast<std::uint32_t>(i)), entry.epoch},
                  entry.process,
                  entry.host,
                  {}};
    for (const auto& address : all_addresses[i]) {
      const bool usable = address.starts_with("loopback:")
                              ? by_loopback(entry)
                              : !by_loopback(entry) && within_reach(address, self, entry);
      if (usable) member.addresses.push_back(address);
    }
    members.push_back(std::move(member));
  }

  auto agent = std::make_shared<Agent>(
      options, members[static_cast<std::size_t>(options.rank)].info, loop, receive_pool);
  agent->set_world(endpoint_options.self.world);
  agent->start(std::move(peers), members, std::make_shared<Meeting>(std::move(meeting)));
  try {
    rendezvous.finish();
  } catch (...) {
    // It serves already, and nobody will have it.
    static_cast<void>(agent->shutdown(false, std::chrono::nanoseconds(0)));
    throw;
  }
  return agent;
}

}  // namespace stitch::rpc
