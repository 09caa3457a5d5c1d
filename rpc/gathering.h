#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/calls.h"
#include "stitch/rpc/message/sendable.h"

// How the workers in a barrier or an all_gather get each other's values
// (rpc/agent/gather_exchange.h).
namespace stitch::detail {

// The value that a worker gives to a barrier.
struct Presence {
  template <class Archive>
  void serialize(Archive&) {}
};

// A barrier or all_gather that this worker takes part in, begun by Worker.
struct Gathering {
  std::uint64_t set = 0, number = 0;      // its key
  std::string what;                       // "a barrier", "an all_gather of int"
  std::vector<WorkerInfo> sources;        // by round
  std::vector<std::string> participants;  // in the order of the values of `done`
  Future<std::vector<rpc::OwnedObject>> done;
};

// The values of a round, or why the gathering has failed, on their way out: written as Given is
// read.
struct Posted {
  std::optional<Error> failure;
  std::vector<rpc::OwnedObject> values;
  void save(rpc::OutArchive& archive) const;
  void load(rpc::InArchive& archive);  // throws: the caller reads a Given
};

// The same as its reader gets it.
template <class T>
struct Given {
  std::optional<Error> failure;
  std::vector<rpc::OwnedObject> values;
  void load(rpc::InArchive& archive) {
    archive(failure);
    const std::size_t count = archive.read_count(0);
    for (std::size_t i = 0; i < count; ++i) {
      archive.count_memory(sizeof(T));
      auto value = std::make_shared<T>(rpc::blank<T>());
      archive.read_element(*value);
      values.push_back(rpc::OwnedObject::of(std::move(value)));
    }
  }
};

// Called by the reader of a round: the values, once this worker has those of the rounds before.
[[nodiscard]] Future<Posted> fetch_posted(std::uint64_t set, std::uint64_t number,
                                          std::uint32_t round, std::string what);
// As GatherExchange::standing().
[[nodiscard]] std::pair<std::optional<Error>, std::optional<WorkerInfo>> standing_in(
    std::uint64_t set, std::uint64_t number);

// The request for the values of a round.
struct FetchRequest {
  std::string_view function;  // what its errors name: the member of Worker that the program called
  rpc::Request message;
};
[[nodiscard]] FetchRequest begin_fetch(const Gathering& gathering, std::size_t round);
// Hands what the source of a round has given to the exchange of this worker.
void take_given(const std::weak_ptr<rpc::Agent>& agent, const Gathering& gathering,
                std::size_t round, std::vector<rpc::OwnedObject> values);
// The same of an error: `failure` of the gathering, as the source says, or of the call.
void take_failure(const std::weak_ptr<rpc::Agent>& agent, const Gathering& gathering,
                  std::size_t round, const Error& error, bool of_gathering);
// Waits for the end of the gathering. Throws its error.
[[nodiscard]] std::vector<rpc::OwnedObject> await(const std::shared_ptr<rpc::Agent>& agent,
                                                  const Gathering& gathering);

// The values of all, in the order of `participants`.
template <class T>
std::vector<rpc::OwnedObject> gather(const std::shared_ptr<rpc::Agent>& agent,
                                     const Gathering& begun) {
  const auto gathering = std::make_shared<const Gathering>(begun);
  std::vector<Future<Given<T>>> fetches;
  for (std::size_t round = 0; round < gathering->sources.size(); ++round) {
    auto request = begin_fetch(*gathering, round);
    const auto& fetch = fetches.emplace_back(start_call<Given<T>>(agent, gathering->sources[round],
                                                                  request.function, std::nullopt,
                                                                  std::move(request.message)));
    fetch.on_ready([agent = std::weak_ptr(agent), gathering, round, fetch] {
      if (fetch.has_error()) return take_failure(agent, *gathering, round, fetch.error(), false);
      auto given = fetch.get();
      if (given.failure) return take_failure(agent, *gathering, round, *given.failure, true);
      take_given(agent, *gathering, round, std::move(given.values));
    });
  }
  try {
    return await(agent, *gathering);
  } catch (...) {
    for (const auto& fetch : fetches) fetch.cancel();  // no longer wanted
    throw;
  }
}

}  // namespace stitch::detail
