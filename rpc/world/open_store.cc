#include "stitch/rpc/world/open_store.h"

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/rpc/options/launcher.h"
#include "stitch/rpc/options/security_options.h"
#include "stitch/rpc/world/c10d_store.h"
#include "stitch/transport/store/file_store.h"
#include "stitch/transport/store/hash_store.h"
#include "stitch/transport/store/prefix_store.h"
#include "stitch/transport/store/tcp_store.h"

namespace stitch::rpc {

namespace {

std::optional<std::string> environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace

void check_open_network(const std::string& name, bool has_secret, const std::string& address) {
  if (address == "127.0.0.1" || address == "localhost" || address == "::1" || has_secret ||
      insecure_is_allowed())
    return;
  throw Error(ErrorCode::invalid_argument,
              "worker \"" + name + "\" would listen on " + address +
                  " without a secret: set STITCH_SECRET to the same value on all workers, or "
                  "STITCH_INSECURE=1 to let anyone in");
}

OpenStore open_store(const Options& options, std::shared_ptr<const transport::SecretKey> key,
                     std::chrono::steady_clock::time_point deadline) {
  // Both parts always, so that no name of a job is taken for a key of workers without one.
  const std::string prefix =
      "stitch/" + launcher_job(environment) + '/' + torchrun_restart(environment);
  OpenStore opened;
  const auto own_keys = [prefix](std::shared_ptr<transport::Store> store) {
    return transport::make_prefix_store(prefix, std::move(store));
  };
  const std::string& method = options.init_method;
  if (options.store) {
    opened.store = own_keys(options.store);
    return opened;
  }
  if (options.world_size == 1) {
    opened.store = own_keys(transport::make_hash_store());
    opened.alone = true;
    return opened;
  }
  if (method.starts_with("file://")) {
    // By its full name: the program may change its folder.
    const std::string path = std::filesystem::absolute(method.substr(7));
    opened.store = own_keys(transport::make_file_store(method.substr(7)));
    opened.reopen = [path, own_keys] { return own_keys(transport::make_file_store(path)); };
    return opened;
  }
  const auto place = parse_tcp_method(method).value();  // checked by resolve_options()
  const auto init_timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(options.init_timeout);
  if (place.c10d) {
    opened.store = own_keys(make_c10d_store(place.host, place.port, key, init_timeout));
    opened.reopen = [place, key, own_keys] {
      return own_keys(make_c10d_store(place.host, place.port, key, OpenStore::kStoreTimeout));
    };
    return opened;
  }
  transport::TcpStoreOptions tcp;
  tcp.host = place.host;
  tcp.port = place.port;
  tcp.key = std::move(key);
  tcp.encryption = options.encryption.value_or(transport::Encryption::on);
  tcp.connect_timeout = init_timeout;
  transport::TcpStoreOptions again = tcp;
  again.one_round = true;
  again.connect_timeout = OpenStore::kStoreTimeout;
  // A server that hangs costs no request after the deadline a time limit of its own.
  if (deadline < deadline.max() - OpenStore::kGraceTime)
    tcp.deadline = deadline + OpenStore::kGraceTime;
  opened.served = true;
  opened.reopen = [again, own_keys] { return own_keys(transport::make_tcp_store(again)); };
  if (options.rank == 0) {
    check_open_network(options.name, tcp.key != nullptr, tcp.host);
    opened.server = std::make_shared<transport::TcpStoreServer>(tcp);
  }
  opened.store = own_keys(transport::make_tcp_store(tcp));
  return opened;
}

}  // namespace stitch::rpc
