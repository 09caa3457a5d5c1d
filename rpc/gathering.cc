#include "stitch/rpc/gathering.h"

#include <memory>
#include <stop_token>
#include <utility>

#include "stitch/base/demangle.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/gather_exchange.h"
#include "stitch/rpc/agent/incoming_call.h"
#include "stitch/rpc/worker.h"

namespace stitch::detail {

// Inline: a barrier must pass even while every user-function thread is taken.
STITCH_INLINE(&fetch_posted);

std::string gathering_of(const std::type_info& given) {
  return given == typeid(Presence) ? "a barrier"
                                   : "an all_gather of " + base::demangle(given.name());
}

void Posted::load(rpc::InArchive&) {
  throw Error(ErrorCode::internal, "what is in the exchange cannot be read without its type");
}

Future<Posted> fetch_posted(std::string key, std::string type) {
  // Ends the wait of a caller that has given up.
  struct StopWaiting {
    std::weak_ptr<rpc::Agent> agent;
    std::string key;
    WorkerInfo caller;
    void operator()() const {
      if (const auto alive = agent.lock()) alive->gather_exchange().stop_waiting(key, caller);
    }
  };
  Promise<Posted> promise;
  const auto agent = rpc::current_agent();
  const WorkerInfo& caller = rpc::IncomingCall::caller_here();
  auto posted = agent->gather_exchange().fetch(key, caller);
  std::shared_ptr<std::stop_callback<StopWaiting>> stop;
  if (!posted.ready()) {
    stop = std::make_shared<std::stop_callback<StopWaiting>>(
        current_stop_token(), StopWaiting{agent, std::move(key), caller});
  }
  posted.on_ready([promise, posted, type = std::move(type), stop = std::move(stop)] {
    promise.fulfil([&] {
      if (posted.has_error() && posted.error().code() == ErrorCode::cancelled)
        throw rpc::CallRefused(posted.error());  // the exchange's own word
      Posted found{posted.get()};
      if (type != found.value.type->name()) {
        throw rpc::CallRefused(Error(ErrorCode::invalid_argument,
                                     "that worker is in " + gathering_of(*found.value.type)));
      }
      return found;
    });
  });
  return promise.future();
}

FetchRequest begin_fetch(const std::string& key, const std::type_info& type) {
  const rpc::Function& function = kFunction<&fetch_posted>;
  FetchRequest request{function.name, rpc::begin_request(function.id)};
  encode_arguments<rpc::TraitsOf<&fetch_posted>>(request.message, key, std::string(type.name()));
  return request;
}

}  // namespace stitch::detail
