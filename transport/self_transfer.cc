#include "stitch/transport/self_transfer.h"

#include <sodium.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <exception>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/base/mutex.h"
#include "stitch/base/random.h"
#include "stitch/transport/wire/secret_key.h"

namespace stitch::transport {

namespace {

constexpr std::size_t kFrameBytes = 1000;
constexpr std::size_t kBufferBytes = 100'000;

// The result that the callbacks pass to the waiting thread; shared with them, as they may run late.
struct Outcome {
  base::Mutex mutex;
  base::CondVar changed;
  bool known STITCH_GUARDED_BY(mutex) = false;
  std::optional<Error> error STITCH_GUARDED_BY(mutex);  // nothing when it passed

  void set(std::optional<Error> value) {
    base::MutexLock lock(mutex);
    if (!known) error = std::move(value);
    known = true;
    changed.notify_all();
  }
};

// Ends `endpoint` without waiting for that.
void end_elsewhere(std::unique_ptr<Endpoint> endpoint) noexcept {
  Endpoint* const left = endpoint.release();
  try {
    std::thread([left] { delete left; }).detach();
  } catch (const std::system_error&) {
    // No thread is available: the endpoint is leaked, which the error text says.
  }
}

[[nodiscard]] bool is_filled(const void* data, std::size_t bytes, unsigned char value) {
  const auto* at = static_cast<const unsigned char*>(data);
  return bytes > 0 && at[0] == value && std::memcmp(at, at + 1, bytes - 1) == 0;
}

constexpr std::chrono::seconds kTrialTimeout{5};

// The results of the trials in this process. Thread contract: any thread.
class Trials {
 public:
  [[nodiscard]] bool passed(const std::string& key) {
    base::MutexLock lock(mutex_);
    return passed_.contains(key);
  }
  void pass(const std::string& key) {
    base::MutexLock lock(mutex_);
    passed_.insert(key);
    reasons_.erase(key);
  }
  void fail(const std::string& key, const std::string& reason) {
    {
      base::MutexLock lock(mutex_);
      ++failed_[name_of(key)];
      if (std::exchange(reasons_[key], reason) == reason) return;
    }
    std::fprintf(stderr, "stitch: transport %s is not used, it fails a transfer to itself: %s\n",
                 name_of(key).c_str(), reason.c_str());
  }
  [[nodiscard]] std::map<std::string, std::int64_t> failed() {
    base::MutexLock lock(mutex_);
    return failed_;
  }
  // Of the last failure under `key`; empty when there was none since it passed.
  [[nodiscard]] std::string reason(const std::string& key) {
    base::MutexLock lock(mutex_);
    const auto found = reasons_.find(key);
    return found == reasons_.end() ? "" : found->second;
  }

 private:
  [[nodiscard]] static std::string name_of(const std::string& key) {
    return key.substr(0, key.rfind(' '));
  }
  base::Mutex mutex_;
  std::set<std::string> passed_ STITCH_GUARDED_BY(mutex_);
  std::map<std::string, std::string> reasons_ STITCH_GUARDED_BY(mutex_);  // of the last failure
  std::map<std::string, std::int64_t> failed_ STITCH_GUARDED_BY(mutex_);  // by name
};

Trials& trials() {
  static auto* const trials = new Trials;  // workers may outlive other static objects
  return *trials;
}

}  // namespace

EndpointOptions self_transfer_options() {
  std::array<char, Key::kBytes> random{};
  base::fill_random(std::as_writable_bytes(std::span(random)));
  EndpointOptions options;
  options.self.name = "self-transfer";
  options.secret = SecretKey::from_random({random.data(), random.size()});
  options.encryption = Encryption::off;
  sodium_memzero(random.data(), random.size());
  return options;
}

std::optional<Error> try_self_transfer(std::unique_ptr<Endpoint> endpoint,
                                       std::chrono::milliseconds limit) {
  const auto outcome = std::make_shared<Outcome>();
  const auto deadline = base::deadline_after(limit);
  try {
    const auto addresses = endpoint->listen([outcome] {
      ConnectionEvents events;
      events.on_message = [outcome](const std::shared_ptr<Connection>&, const Message& message) {
        const bool unharmed = message.frame.size() == kFrameBytes && message.buffers.size() == 1 &&
                              message.buffers[0].bytes == kBufferBytes &&
                              is_filled(message.frame.data(), kFrameBytes, 'f') &&
                              is_filled(message.buffers[0].data, kBufferBytes, 'b');
        outcome->set(unharmed ? std::nullopt
                              : std::optional(Error(ErrorCode::protocol,
                                                    "what arrived is not what was sent")));
      };
      // No on_closed: the connection may be a stranger's. The end of our own is reported to the
      // connecting side.
      return events;
    });
    ConnectionEvents events;
    events.on_closed = [outcome](const std::shared_ptr<Connection>&, const Error& error) {
      outcome->set(error);
    };
    Message message;
    message.frame.resize(kFrameBytes);
    std::memset(message.frame.data(), 'f', kFrameBytes);
    message.buffers.push_back(allocate_buffer(Device{}, kBufferBytes));
    std::memset(message.buffers[0].data, 'b', kBufferBytes);
    endpoint->connect(addresses.front(), {}, std::move(events))->send(std::move(message), nullptr);
  } catch (...) {
    return to_error(std::current_exception());
  }
  bool known = false;
  std::optional<Error> error;
  {
    base::MutexLock lock(outcome->mutex);
    while (!outcome->known && outcome->changed.wait_until(outcome->mutex, deadline)) {
    }
    known = outcome->known;
    error = outcome->error;
  }
  if (known) return error;
  end_elsewhere(std::move(endpoint));
  return Error(ErrorCode::timeout, "nothing arrived within " + std::to_string(limit.count()) +
                                       " ms; its threads are left to end by themselves");
}

bool passes_once(const std::string& key, const std::function<std::unique_ptr<Endpoint>()>& make) {
  if (trials().passed(key)) return true;
  std::optional<Error> error;
  try {
    error = try_self_transfer(make(), kTrialTimeout);
  } catch (const Error& refused) {
    if (refused.code() == ErrorCode::invalid_argument) throw;
    error = refused;
  }
  error ? trials().fail(key, error->what()) : trials().pass(key);
  return !error;
}

std::map<std::string, std::int64_t> failed_trials() { return trials().failed(); }

std::string why_not_passed(const std::string& key) { return trials().reason(key); }

}  // namespace stitch::transport
