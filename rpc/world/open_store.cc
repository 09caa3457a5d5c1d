#include "stitch/rpc/world/open_store.h"

#include <chrono>
#include <cstdint>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/rpc/options/launcher.h"
#include "stitch/rpc/options/security_options.h"
#include "stitch/transport/store/file_store.h"
#include "stitch/transport/store/hash_store.h"
#include "stitch/transport/store/tcp_store.h"

namespace stitch::rpc {

namespace {

// Whether the store of this very job is at one of the ports before `own`, which were taken.
bool another_rank_0_hosts(base::EventLoop& loop, transport::TcpStoreOptions tcp,
                          std::uint16_t own) {
  constexpr std::chrono::milliseconds kStoreProbeTimeout{500};
  if (tcp.port == 0 || own == tcp.port) return false;
  tcp.port_span = own - tcp.port;
  tcp.one_round = true;
  tcp.connect_timeout = kStoreProbeTimeout;
  try {
    return transport::make_tcp_store(loop, tcp) != nullptr;
  } catch (const Error&) {
    return false;  // another service uses the port: a launcher's own store, perhaps
  }
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
  OpenStore opened;
  if (options.rank == 0) {
    check_open_network(options.name, tcp.key != nullptr, tcp.host);
    auto server = std::make_shared<transport::TcpStoreServer>(loop, tcp);
    // If two workers claim rank 0, all workers meet in one store, where each sees both.
    if (!another_rank_0_hosts(loop, tcp, server->port())) {
      opened.server = server;
      tcp.port = server->port();
      tcp.port_span = 1;
    }
  }
  opened.store = transport::make_tcp_store(loop, tcp);
  return opened;
}

}  // namespace stitch::rpc
