#include "stitch/transport/selection.h"

#include <chrono>
#include <set>
#include <utility>

#include "stitch/transport/ip_address.h"
#include "stitch/transport/mutex.h"
#include "stitch/transport/names.h"
#include "stitch/transport/self_transfer.h"
#include "stitch/transport/stream_endpoint.h"
#include "stitch/transport/tensorpipe_endpoint.h"

namespace stitch::transport {

namespace {
constexpr std::chrono::seconds kTrialTime{5};
}

bool passes_once(const std::string& key, const std::function<std::unique_ptr<Endpoint>()>& make) {
  static Mutex mutex;
  static std::set<std::string> passed;  // guarded by mutex
  {
    MutexLock lock(mutex);
    if (passed.contains(key)) return true;
  }
  if (!passes_self_transfer(make(), kTrialTime)) return false;
  MutexLock lock(mutex);
  passed.insert(key);
  return true;
}

std::vector<std::unique_ptr<Endpoint>> make_endpoints(const EndpointOptions& options,
                                                      TransportChoice choice) {
  check_names("transport", choice.transports, {"shm", "tcp", "tensorpipe-shm", "uv"});
  check_bind_address(choice.bind_address);
  StreamOptions stream{{}, choice.bind_address};
  TensorPipeOptions tensorpipe{{}, choice.channels, choice.bind_address};
  for (const auto& transport : choice.transports) {
    if (transport == "tensorpipe-shm" || transport == "uv") {
      tensorpipe.transports.push_back(transport);
      continue;
    }
    const bool passes = passes_once(transport + " " + choice.bind_address, [&] {
      EndpointOptions trial;
      trial.self.name = "self-transfer";
      return make_stream_endpoint(std::move(trial), {{transport}, choice.bind_address});
    });
    if (passes) stream.transports.push_back(transport);
  }
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  if (!stream.transports.empty())
    endpoints.push_back(make_stream_endpoint(options, std::move(stream)));
  if (!tensorpipe.transports.empty()) {
    try {
      endpoints.push_back(make_tensorpipe_endpoint(options, std::move(tensorpipe)));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::disconnected || endpoints.empty()) throw;
    }
  }
  if (endpoints.empty()) {
    throw Error(ErrorCode::disconnected,
                "no transport passes a transfer from this worker to itself; tried: " +
                    join_names(choice.transports) + ", bind address " + choice.bind_address);
  }
  return endpoints;
}

}  // namespace stitch::transport
