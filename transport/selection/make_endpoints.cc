#include "stitch/transport/selection/make_endpoints.h"

#include <utility>

#include "stitch/base/name_list.h"
#include "stitch/transport/ip_address.h"
#include "stitch/transport/self_transfer.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "stitch/transport/tensorpipe/tensorpipe_endpoint.h"

namespace stitch::transport {

std::vector<std::unique_ptr<Endpoint>> make_endpoints(const EndpointOptions& options,
                                                      TransportChoice choice) {
  base::check_names("transport", choice.transports, {"shm", "tcp", "tensorpipe-shm", "uv"});
  check_bind_address(choice.bind_address);
  StreamOptions stream{{}, choice.bind_address, choice.more_addresses};
  TensorPipeOptions tensorpipe{{}, choice.channels, choice.bind_address};
  std::string reasons;
  for (const auto& transport : choice.transports) {
    if (transport == "tensorpipe-shm" || transport == "uv") {
      tensorpipe.transports.push_back(transport);
      continue;
    }
    const std::string key = transport + " " + choice.bind_address;
    const bool passes = passes_once(key, [&] {
      return make_stream_endpoint(self_transfer_options(), {{transport}, choice.bind_address});
    });
    if (passes) {
      stream.transports.push_back(transport);
    } else {
      reasons += "; " + transport + ": " + why_not_passed(key);
    }
  }
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  if (!stream.transports.empty())
    endpoints.push_back(make_stream_endpoint(options, std::move(stream)));
  if (!tensorpipe.transports.empty()) {
    try {
      endpoints.push_back(make_tensorpipe_endpoint(options, std::move(tensorpipe)));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::disconnected || endpoints.empty()) throw;
      // The other endpoints are used. The self-transfer has reported the failure on stderr.
    }
  }
  if (endpoints.empty()) {
    throw Error(ErrorCode::disconnected,
                "no transport passes a transfer from this worker to itself; tried: " +
                    base::join_names(choice.transports) + ", bind address " + choice.bind_address +
                    reasons);
  }
  return endpoints;
}

}  // namespace stitch::transport
