#include "stitch/transport/store/store_requests.h"

#include <optional>
#include <string_view>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/transport/store/callback_guard.h"

namespace stitch::transport {

namespace {

constexpr std::size_t kBytesAroundKey = 128;  // the overhead of a key
constexpr std::size_t kMaxWaits = 4096;       // of one client

// The bytes that a key with a value of that size counts in the budget.
std::size_t cost_of(const std::string& key, std::size_t value_bytes) {
  return key.size() + value_bytes + kBytesAroundKey;
}

}  // namespace

void StoreRequests::perform(const std::shared_ptr<StoreSession>& session,
                            std::span<const std::byte> frame) {
  base::ByteReader reader(frame, "request to a tcp store");
  const auto request = reader.read<std::uint64_t>();
  const auto operation = reader.read<StoreOperation>();
  const auto read_timeout = [&] {
    const Store::Timeout timeout(reader.read<std::int64_t>());
    reader.expect_end();
    return timeout;
  };
  base::Bytes answer;
  try {
    if (operation == StoreOperation::wait) {
      const std::uint32_t count = reader.read_count(sizeof(std::uint32_t));
      if (count > kMaxKeysOfAWait) {
        throw Error(ErrorCode::out_of_range,
                    "a wait for " + std::to_string(count) + " keys, more than the " +
                        std::to_string(kMaxKeysOfAWait) + " allowed, cannot be asked for");
      }
      std::vector<std::string> keys(count);
      for (std::string& key : keys) key = reader.read_string();
      const Store::Timeout timeout = read_timeout();
      check_keys(keys);
      wait_for(session, request, false, std::move(keys), timeout);
      return;
    }
    std::string key = reader.read_string();
    if (operation == StoreOperation::get) {
      const Store::Timeout timeout = read_timeout();
      check_key(key);
      wait_for(session, request, true, {std::move(key)}, timeout);
      return;
    }
    answer = encode_accepted(reply_now(operation, key, reader));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::protocol) throw;  // malformed
    session->reply(request, encode_refused(error.code(), error.what()));
    return;
  }
  wake_waiting();
  // The change has been made and must not be reported as refused: where the reply cannot be sent,
  // the stream ends.
  guard_callback([&] { session->reply(request, answer); },
                 [&](const Error& error) { session->close(error); });
}

void StoreRequests::forget(const StoreSession& session) {
  if (session.waits == 0) return;
  std::erase_if(waiting_, [&](const auto& entry) {
    if (entry.second.session.lock().get() != &session) return false;
    loop_.cancel(entry.second.timer);
    map_.cancel(entry.first);
    return true;
  });
}

base::Bytes StoreRequests::reply_now(StoreOperation operation, const std::string& key,
                                     base::ByteReader& arguments) {
  base::Bytes result;
  base::ByteWriter writer(result);
  switch (operation) {
    case StoreOperation::set: {
      std::string value = arguments.read_string();
      arguments.expect_end();
      check_key(key);
      check_value(key, value);
      make_room(key, value.size());
      map_.set(key, std::move(value));
      return result;
    }
    case StoreOperation::try_get: {
      arguments.expect_end();
      check_key(key);
      const std::string* value = map_.find(key);
      writer.write(static_cast<std::uint8_t>(value != nullptr));
      writer.write_string(value == nullptr ? std::string_view() : *value);
      return result;
    }
    case StoreOperation::add: {
      const auto delta = arguments.read<std::int64_t>();
      arguments.expect_end();
      check_key(key);
      const std::int64_t sum = map_.sum(key, delta);
      make_room(key, std::to_string(sum).size());
      map_.set(key, std::to_string(sum));
      writer.write(sum);
      return result;
    }
    case StoreOperation::compare_and_set: {
      const bool is_expected = arguments.read<std::uint8_t>() != 0;
      std::optional<std::string> expected = arguments.read_string();
      if (!is_expected) expected.reset();
      const std::string desired = arguments.read_string();
      arguments.expect_end();
      check_compare(key, expected, desired);
      if (map_.matches(key, expected)) make_room(key, desired.size());
      writer.write_string(map_.compare_and_set(key, expected, desired));
      return result;
    }
    case StoreOperation::erase:
      arguments.expect_end();
      check_key(key);
      give_room_of(key);
      writer.write(static_cast<std::uint8_t>(map_.erase(key)));
      return result;
    case StoreOperation::get:
    case StoreOperation::wait:
      break;
  }
  throw Error(ErrorCode::protocol, "request to a tcp store has an unknown operation " +
                                       std::to_string(static_cast<int>(operation)));
}

void StoreRequests::wait_for(const std::shared_ptr<StoreSession>& session, std::uint64_t request,
                             bool wants_value, std::vector<std::string> keys,
                             Store::Timeout timeout) {
  if (session->waits >= kMaxWaits) {
    throw Error(ErrorCode::overloaded,
                "a client already waits " + std::to_string(kMaxWaits) + " times");
  }
  BudgetShare share(budget_);
  std::size_t bytes = 0;  // the keys are kept here and in the map
  for (const std::string& key : keys) bytes += 2 * cost_of(key, 0);
  share.resize(bytes);
  const StoreMap::WaitId wait = map_.wait(keys);
  if (wait != 0 && timeout <= Store::Timeout::zero()) {
    map_.cancel(wait);
    throw not_set_error(map_.missing(keys), timeout);
  }
  if (wait == 0) {
    base::Bytes result;
    if (wants_value) base::ByteWriter(result).write_string(*map_.find(keys[0]));
    session->reply(request, encode_accepted(result));
    return;
  }
  const base::EventLoop::TimerId timer =
      loop_.call_at(base::deadline_after(timeout), [weak = weak_from_this(), wait, timeout] {
        if (const auto self = weak.lock()) self->on_timeout(wait, timeout);
      });
  waiting_.emplace(
      wait, Waiting{session, request, wants_value, std::move(keys), std::move(share), timer});
  ++session->waits;
}

void StoreRequests::on_timeout(StoreMap::WaitId wait, Store::Timeout timeout) {
  auto node = waiting_.extract(wait);
  if (node.empty()) return;
  map_.cancel(wait);
  const auto session = node.mapped().session.lock();
  if (!session) return;
  --session->waits;
  guard_callback(
      [&] {
        const Error error = not_set_error(map_.missing(node.mapped().keys), timeout);
        session->reply(node.mapped().request, encode_refused(error.code(), error.what()));
      },
      [&](const Error& error) { session->close(error); });
}

void StoreRequests::wake_waiting() {
  for (const StoreMap::WaitId wait : map_.take_ready()) {
    auto node = waiting_.extract(wait);
    if (node.empty()) continue;
    loop_.cancel(node.mapped().timer);
    const auto session = node.mapped().session.lock();
    if (!session) continue;
    --session->waits;
    // An error must end this session, not the one whose request set the key.
    guard_callback([&] { reply_to(node.mapped()); },
                   [&](const Error& error) { session->close(error); });
  }
}

void StoreRequests::reply_to(const Waiting& waiting) {
  base::Bytes result;
  if (waiting.wants_value) {
    const std::string* value = map_.find(waiting.keys[0]);
    if (value == nullptr) throw not_set_error(waiting.keys, {});  // memory ran out in between
    base::ByteWriter(result).write_string(*value);
  }
  waiting.session.lock()->reply(waiting.request, encode_accepted(result));
}

void StoreRequests::make_room(const std::string& key, std::size_t value_bytes) {
  const std::string* value = map_.find(key);
  const std::size_t before = value == nullptr ? 0 : cost_of(key, value->size());
  const std::size_t after = cost_of(key, value_bytes);
  if (after > before) budget_->take(after - before);
  if (after < before) budget_->give(before - after);
}

void StoreRequests::give_room_of(const std::string& key) noexcept {
  const std::string* value = map_.find(key);
  if (value != nullptr) budget_->give(cost_of(key, value->size()));
}

}  // namespace stitch::transport
