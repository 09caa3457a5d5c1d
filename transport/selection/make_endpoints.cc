#include "stitch/transport/selection/make_endpoints.h"

#include <chrono>
#include <cstdio>
#include <optional>
#include <set>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/base/name_list.h"
#include "stitch/transport/ip_address.h"
#include "stitch/transport/self_transfer.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "stitch/transport/tensorpipe/tensorpipe_endpoint.h"

namespace stitch::transport {

namespace {

constexpr std::chrono::seconds kTrialTime{5};

// What trials have shown in this process. Thread contract: any thread.
class Trials {
 public:
  [[nodiscard]] bool passed(const std::string& key) {
    MutexLock lock(mutex_);
    return passed_.contains(key);
  }
  void pass(const std::string& key) {
    MutexLock lock(mutex_);
    passed_.insert(key);
    reasons_.erase(key);
  }
  void fail(const std::string& key, const std::string& reason) {
    {
      MutexLock lock(mutex_);
      ++failed_[name_of(key)];
      if (std::exchange(reasons_[key], reason) == reason) return;
    }
    std::fprintf(stderr, "stitch: transport %s is not used, it fails a transfer to itself: %s\n",
                 name_of(key).c_str(), reason.c_str());
  }
  [[nodiscard]] std::map<std::string, std::int64_t> failed() {
    MutexLock lock(mutex_);
    return failed_;
  }
  // Why what is tried under `key` does not pass.
  [[nodiscard]] std::string reason(const std::string& key) {
    MutexLock lock(mutex_);
    const auto found = reasons_.find(key);
    return found == reasons_.end() ? "" : found->second;
  }

 private:
  [[nodiscard]] static std::string name_of(const std::string& key) {
    return key.substr(0, key.rfind(' '));
  }
  Mutex mutex_;
  std::set<std::string> passed_ STITCH_GUARDED_BY(mutex_);
  std::map<std::string, std::string> reasons_ STITCH_GUARDED_BY(mutex_);  // of the last failure
  std::map<std::string, std::int64_t> failed_ STITCH_GUARDED_BY(mutex_);  // by name
};

Trials& trials() {
  static auto* const trials = new Trials;  // workers may outlive other static objects
  return *trials;
}

}  // namespace

bool passes_once(const std::string& key, const std::function<std::unique_ptr<Endpoint>()>& make) {
  if (trials().passed(key)) return true;
  std::optional<Error> error;
  try {
    error = try_self_transfer(make(), kTrialTime);
  } catch (const Error& refused) {
    if (refused.code() == ErrorCode::invalid_argument) throw;
    error = refused;
  }
  error ? trials().fail(key, error->what()) : trials().pass(key);
  return !error;
}

std::map<std::string, std::int64_t> failed_trials() { return trials().failed(); }

std::vector<std::unique_ptr<Endpoint>> make_endpoints(const EndpointOptions& options,
                                                      TransportChoice choice) {
  check_names("transport", choice.transports, {"shm", "tcp", "tensorpipe-shm", "uv"});
  check_bind_address(choice.bind_address);
  StreamOptions stream{{}, choice.bind_address};
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
      reasons += "; " + transport + ": " + trials().reason(key);
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
      // The others do. Which of its transports failed, and why, has been said.
    }
  }
  if (endpoints.empty()) {
    throw Error(ErrorCode::disconnected,
                "no transport passes a transfer from this worker to itself; tried: " +
                    join_names(choice.transports) + ", bind address " + choice.bind_address +
                    reasons);
  }
  return endpoints;
}

}  // namespace stitch::transport
