#include "stitch/rpc/world/rendezvous.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/name_list.h"
#include "stitch/base/random.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

namespace {

using std::chrono::steady_clock;
using transport::Store;

// A text from the store, which may end up on a terminal.
std::string shown(std::string text) {
  constexpr std::size_t kMaxShown = 127;
  if (text.size() > kMaxShown) text.resize(kMaxShown);
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

}  // namespace

Rendezvous::Rendezvous(const Options& options, Store& store, bool hosts)
    : options_(options),
      store_(store),
      hosts_(hosts),
      deadline_(steady_clock::now() + options.init_timeout) {}

std::vector<MemberRecord> Rendezvous::meet(MemberRecord self) {
  self.epoch = static_cast<std::uint64_t>(store_.add("epoch/" + self.name, 1));
  const auto slot = store_.add("arrived", 1) - 1;
  store_.set("member/" + std::to_string(slot), self.encode());
  if (slot >= options_.world_size.min()) {
    tell_the_others({});
    throw Error(ErrorCode::invalid_argument, "worker \"" + self.name +
                                                 "\" is one too many: the world of " +
                                                 std::to_string(options_.world_size.min()) +
                                                 " at " + store_.describe() + " is full");
  }
  std::vector<MemberRecord> records;
  try {
    for (const auto& text : read_all("member/")) records.push_back(MemberRecord::decode(text));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::timeout) throw;
    throw Error(ErrorCode::timeout,
                "worker \"" + self.name + "\" waited " +
                    std::to_string(options_.init_timeout / std::chrono::milliseconds(1)) +
                    " ms for a world of " + std::to_string(options_.world_size.min()) + " at " +
                    store_.describe() + ": only these arrived: " + arrived_names());
  }
  try {
    check(records);
  } catch (const Error&) {
    tell_the_others(records);
    throw;
  }
  std::sort(records.begin(), records.end(),
            [](const MemberRecord& a, const MemberRecord& b) { return a.rank < b.rank; });
  return records;
}

std::uint64_t Rendezvous::world_number() {
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

std::vector<std::vector<std::string>> Rendezvous::exchange_addresses(
    const std::vector<std::string>& own) {
  std::string joined;
  for (const auto& address : own) joined += address + '\n';
  store_.set("address/" + std::to_string(options_.rank), joined);
  std::vector<std::vector<std::string>> all;
  for (const auto& text : read_all("address/")) all.push_back(split_lines(text));
  return all;
}

bool Rendezvous::finish() {
  if (store_.add("read", 1) < options_.world_size.min()) return false;
  for (std::int64_t i = 0; i < options_.world_size.min(); ++i) {
    store_.erase("member/" + std::to_string(i));
    store_.erase("address/" + std::to_string(i));
  }
  store_.erase("world");
  store_.erase("read");
  store_.erase("arrived");
  return true;
}

// Key after key: a wait for all of them would have the store keep the keys of all workers for all
// workers.
std::vector<std::string> Rendezvous::read_all(const std::string& prefix) {
  std::vector<std::string> values;
  for (std::int64_t i = 0; i < options_.world_size.min(); ++i)
    values.push_back(store_.get(prefix + std::to_string(i), left()));
  return values;
}

// The records do not form a world. Workers that expect a larger one wait for more records than will
// come: they get one of these in each missing place. The worker that hosts the store keeps it until
// all that arrived have read them, for at most kGracePeriod.
void Rendezvous::tell_the_others(const std::vector<MemberRecord>& records) {
  constexpr std::chrono::seconds kGracePeriod{2};
  constexpr std::chrono::milliseconds kPollInterval{5};
  constexpr std::int64_t kMaxFilled = 4096;
  const auto give_up = std::min(deadline_, steady_clock::now() + kGracePeriod);
  try {
    store_.add("seen", 1);  // how many have read the records: this worker throws after this
    std::int64_t largest = 0;
    for (const auto& record : records) largest = std::max(largest, record.world_size);
    for (std::int64_t i = options_.world_size.min(); i < std::min(largest, kMaxFilled); ++i) {
      store_.compare_and_set("member/" + std::to_string(i), std::nullopt, records.front().encode());
    }
    while (hosts_ && store_.add("seen", 0) < store_.add("arrived", 0) &&
           steady_clock::now() < give_up)
      std::this_thread::sleep_for(kPollInterval);
  } catch (const Error&) {
    // There is an error to be thrown already.
  }
}

Store::Timeout Rendezvous::left() const {
  const auto now = steady_clock::now();
  return now >= deadline_ ? Store::Timeout(0) : std::chrono::ceil<Store::Timeout>(deadline_ - now);
}

std::string Rendezvous::arrived_names() {
  std::vector<std::string> names;
  for (std::int64_t i = 0; i < options_.world_size.min(); ++i) {
    if (const auto text = store_.try_get("member/" + std::to_string(i)))
      names.push_back(MemberRecord::decode(*text).name);
  }
  return base::join_names(names);
}

void Rendezvous::check(const std::vector<MemberRecord>& records) const {
  std::map<std::int64_t, const MemberRecord*> by_rank;
  std::map<std::string, const MemberRecord*> by_name;
  for (const auto& record : records) {
    if (record.rank < 0 || record.rank >= record.world_size || !is_worker_name(record.name)) {
      throw Error(ErrorCode::protocol, "an entry in " + store_.describe() +
                                           " makes no sense: " + "worker \"" + shown(record.name) +
                                           "\", rank " + std::to_string(record.rank) + " of " +
                                           std::to_string(record.world_size));
    }
    if (record.world_size != options_.world_size.min()) {
      throw Error(ErrorCode::invalid_argument,
                  "worker \"" + record.name + "\" (rank " + std::to_string(record.rank) +
                      ") expects a world of " + std::to_string(record.world_size) + ", worker \"" +
                      options_.name + "\" one of " + std::to_string(options_.world_size.min()));
    }
    const auto [same_rank, new_rank] = by_rank.emplace(record.rank, &record);
    if (!new_rank) {
      throw Error(ErrorCode::invalid_argument,
                  "rank " + std::to_string(record.rank) + " is taken twice: by worker \"" +
                      same_rank->second->name + "\" and worker \"" + record.name + "\"");
    }
    const auto [same_name, new_name] = by_name.emplace(record.name, &record);
    if (!new_name) {
      throw Error(ErrorCode::invalid_argument, "worker name \"" + record.name +
                                                   "\" is taken twice: by rank " +
                                                   std::to_string(same_name->second->rank) +
                                                   " and rank " + std::to_string(record.rank));
    }
  }
  std::map<std::string, const WorkerDevices*> devices;
  for (const auto& record : records) devices.emplace(record.name, &record.devices);
  check_device_maps(devices);
}

}  // namespace stitch::rpc
