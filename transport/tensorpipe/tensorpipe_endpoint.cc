#include "stitch/transport/tensorpipe/tensorpipe_endpoint.h"

#include <utility>

#include "stitch/transport/endpoint_shell.h"
#include "stitch/transport/handshaking_connection.h"
#include "stitch/transport/self_transfer.h"
#include "stitch/transport/tensorpipe/tensorpipe_endpoint_state.h"
#include "stitch/transport/tensorpipe/tensorpipe_selection.h"

namespace stitch::transport {

namespace {

[[nodiscard]] std::unique_ptr<Endpoint> make_endpoint(EndpointOptions options,
                                                      TensorPipeOptions tensorpipe) {
  return std::make_unique<EndpointShell<TensorPipeEndpointState>>(
      TensorPipeEndpointState::make(std::move(options), std::move(tensorpipe)));
}

}  // namespace

std::unique_ptr<Endpoint> make_tensorpipe_endpoint(EndpointOptions options,
                                                   TensorPipeOptions tensorpipe) {
  // Reports a name that is too long now, to the caller.
  static_cast<void>(Introduction::encode(options.self));
  TensorPipeOptions usable = select_usable(
      std::move(tensorpipe),
      [](const TensorPipeOptions& trial) { return make_endpoint(self_transfer_options(), trial); });
  return make_endpoint(std::move(options), std::move(usable));
}

}  // namespace stitch::transport
