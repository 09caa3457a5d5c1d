#include "stitch/transport/self_transfer.h"

#include <cstring>
#include <exception>
#include <utility>

#include "stitch/transport/mutex.h"

namespace stitch::transport {

namespace {

constexpr std::size_t kFrameBytes = 1000;
constexpr std::size_t kBufferBytes = 100'000;

// What the callbacks tell the waiting thread; shared with them, because they may come late.
struct Outcome {
  Mutex mutex;
  CondVar changed;
  std::optional<bool> passed STITCH_GUARDED_BY(mutex);

  void set(bool value) {
    MutexLock lock(mutex);
    if (!passed) passed = value;
    changed.notify_all();
  }
};

[[nodiscard]] bool is_filled(const void* data, std::size_t bytes, unsigned char value) {
  const auto* at = static_cast<const unsigned char*>(data);
  return bytes > 0 && at[0] == value && std::memcmp(at, at + 1, bytes - 1) == 0;
}

}  // namespace

bool passes_self_transfer(std::unique_ptr<Endpoint> endpoint, std::chrono::milliseconds limit) {
  const auto outcome = std::make_shared<Outcome>();
  const auto deadline = std::chrono::steady_clock::now() + limit;
  try {
    const auto fail = [outcome](const std::shared_ptr<Connection>&, const Error&) {
      outcome->set(false);
    };
    const auto addresses = endpoint->listen([outcome, fail] {
      ConnectionEvents events;
      events.on_message = [outcome](const std::shared_ptr<Connection>&, const Message& message) {
        outcome->set(message.frame.size() == kFrameBytes && message.buffers.size() == 1 &&
                     message.buffers[0].bytes == kBufferBytes &&
                     is_filled(message.frame.data(), kFrameBytes, 'f') &&
                     is_filled(message.buffers[0].data, kBufferBytes, 'b'));
      };
      events.on_closed = fail;
      return events;
    });
    ConnectionEvents events;
    events.on_closed = fail;
    Message message;
    message.frame.resize(kFrameBytes);
    std::memset(message.frame.data(), 'f', kFrameBytes);
    message.buffers.push_back(allocate_buffer(Device{}, kBufferBytes));
    std::memset(message.buffers[0].data, 'b', kBufferBytes);
    endpoint->connect(addresses.front(), std::move(events))->send(std::move(message), nullptr);
  } catch (const Error&) {
    return false;
  }
  bool answered = false;
  bool passed = false;
  {
    MutexLock lock(outcome->mutex);
    while (!outcome->passed && outcome->changed.wait_until(outcome->mutex, deadline)) {
    }
    answered = outcome->passed.has_value();
    passed = outcome->passed.value_or(false);
  }
  if (!answered) static_cast<void>(endpoint.release());
  return passed;
}

}  // namespace stitch::transport
