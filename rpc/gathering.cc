#include "stitch/rpc/gathering.h"

#include <chrono>
#include <stop_token>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/gather_exchange.h"
#include "stitch/rpc/calls/incoming_call.h"

namespace stitch::detail {

namespace {

using Key = rpc::GatherExchange::Key;

// Inline: a barrier must pass even while every user-function thread is taken.
[[maybe_unused]] const bool fetch_is_inline =
    (rpc::FunctionRegistry::instance().mark_inline(kFunction<&fetch_posted>, true),
     rpc::FunctionRegistry::instance().mark_inline(kFunction<&standing_in>, true), true);

std::string_view called(const Gathering& gathering) {
  return gathering.what == "a barrier" ? "stitch::Worker::barrier" : "stitch::Worker::all_gather";
}

Error no_answer(const WorkerInfo& from, ErrorCode code, const std::string& why) {
  return Error(code, "no answer from " + to_string(from) + ": " + why).with_worker(from.name);
}

// Of a timeout: `asked` has not answered in time. Follows who waits for whom, so that the error
// names a worker that has not arrived.
void find_absent(const std::weak_ptr<rpc::Agent>& weak, const Gathering& gathering,
                 const WorkerInfo& asked, const std::string& why, std::size_t steps) {
  constexpr std::size_t kMaxSteps = 64;
  constexpr std::chrono::seconds kTimeout{1};
  const auto agent = weak.lock();
  if (!agent) return;
  rpc::Request message = rpc::begin_request(kFunction<&standing_in>.id);
  encode_arguments<rpc::TraitsOf<&standing_in>>(*message, gathering.set, gathering.number);
  message->ahead = true;
  const auto next = start_call<rpc::GatherExchange::Standing>(agent, asked, called(gathering),
                                                              kTimeout, std::move(message));
  next.on_ready([weak, gathering, asked, why, steps, next] {
    const auto there = weak.lock();
    if (!there) return;
    const auto [failure, awaited] = next.has_error() ? rpc::GatherExchange::Standing() : next.get();
    const WorkerInfo* const further = awaited ? &*awaited : nullptr;
    if (steps < kMaxSteps && further != nullptr && *further != there->self() &&
        !base::failure_of([&] { static_cast<void>(there->peers().find(*further)); })) {
      return find_absent(weak, gathering, *further, to_string(asked) + " waits for it, too",
                         steps + 1);
    }
    there->gather_exchange().fail({gathering.set, gathering.number},
                                  failure ? *failure : no_answer(asked, ErrorCode::timeout, why));
  });
}

}  // namespace

void Posted::save(rpc::OutArchive& archive) const {
  archive(failure);
  archive.write_size(values.size());
  for (const auto& value : values) value.encode(archive, value.object.get());
}

void Posted::load(rpc::InArchive&) {
  throw Error(ErrorCode::internal, "what is in the exchange cannot be read without its type");
}

Future<Posted> fetch_posted(std::uint64_t set, std::uint64_t number, std::uint32_t round,
                            std::string what) {
  // Ends the wait of a caller that has given up.
  struct StopWaiting {
    std::weak_ptr<rpc::Agent> agent;
    Key key;
    std::uint64_t wait = 0;
    void operator()() const noexcept {
      if (const auto alive = agent.lock()) alive->gather_exchange().stop_waiting(key, wait);
    }
  };
  const Promise<Posted> promise;
  const auto agent = rpc::current_agent();
  const Key key{set, number};
  const auto fetched =
      agent->gather_exchange().fetch(key, round, what, rpc::IncomingCall::caller_here());
  std::shared_ptr<std::stop_callback<StopWaiting>> stop;
  if (!fetched.given.ready()) {
    stop = std::make_shared<std::stop_callback<StopWaiting>>(current_stop_token(),
                                                             StopWaiting{agent, key, fetched.wait});
  }
  fetched.given.on_ready([promise, given = fetched.given, stop = std::move(stop)] {
    promise.fulfil([&] {
      if (given.has_error()) throw rpc::CallRefused(given.error());
      return Posted{given.get().failure, given.get().values};
    });
  });
  return promise.future();
}

std::pair<std::optional<Error>, std::optional<WorkerInfo>> standing_in(std::uint64_t set,
                                                                       std::uint64_t number) {
  return rpc::current_agent()->gather_exchange().standing({set, number});
}

FetchRequest begin_fetch(const Gathering& gathering, std::size_t round) {
  FetchRequest request{called(gathering), rpc::begin_request(kFunction<&fetch_posted>.id)};
  encode_arguments<rpc::TraitsOf<&fetch_posted>>(*request.message, gathering.set, gathering.number,
                                                 static_cast<std::uint32_t>(round), gathering.what);
  request.message->ahead = true;  // a barrier does not wait behind calls
  return request;
}

void take_given(const std::weak_ptr<rpc::Agent>& agent, const Gathering& gathering,
                std::size_t round, std::vector<rpc::OwnedObject> values) {
  if (const auto alive = agent.lock())
    alive->gather_exchange().add({gathering.set, gathering.number}, round, std::move(values));
}

void take_failure(const std::weak_ptr<rpc::Agent>& agent, const Gathering& gathering,
                  std::size_t round, const Error& error, bool of_gathering) {
  const WorkerInfo& source = gathering.sources[round];
  if (!of_gathering && error.code() == ErrorCode::timeout)
    return find_absent(agent, gathering, source, error.what(), 0);
  const auto alive = agent.lock();
  if (!alive) return;
  // A program that has to do without a worker needs no second code for one that leaves.
  const bool gone = error.code() == ErrorCode::shutting_down && error.remote();
  alive->gather_exchange().fail(
      {gathering.set, gathering.number},
      of_gathering
          ? error
          : no_answer(source, gone ? ErrorCode::disconnected : error.code(), error.what()));
}

std::vector<rpc::OwnedObject> await(const std::shared_ptr<rpc::Agent>& agent,
                                    const Gathering& gathering) {
  // A reader that has failed may never fetch.
  constexpr std::chrono::seconds kForErrors{2};
  const Key key{gathering.set, gathering.number};
  const auto timeout = agent->outgoing_calls().effective_timeout(std::nullopt);
  try {
    if (timeout.count() > 0 && timeout < timeout.max() - kForErrors &&
        !gathering.done.wait_for(timeout + kForErrors))
      agent->gather_exchange().end(key);
    return gathering.done.get();
  } catch (...) {
    const Error why = to_error(std::current_exception());  // perhaps this thread was stopped
    agent->gather_exchange().fail(key, no_answer(agent->self(), why.code(), why.what()));
    throw;
  }
}

}  // namespace stitch::detail
