#include "stitch/rpc/gathering.h"

#include <cstdint>
#include <memory>
#include <stop_token>
#include <utility>

#include "stitch/base/demangle.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/gather_exchange.h"
#include "stitch/rpc/agent/incoming_call.h"
#include "stitch/rpc/worker.h"

namespace stitch::detail {

namespace {

// Inline: a barrier must pass even while every user-function thread is taken.
[[maybe_unused]] const bool fetch_is_inline =
    (rpc::FunctionRegistry::instance().mark_inline(kFunction<&fetch_posted>, true), true);

// Whether the exchange says that itself, this worker's leaving included. No function has thrown it.
bool is_own_word(const Error& error) {
  return error.code() == ErrorCode::cancelled || error.code() == ErrorCode::timeout ||
         error.code() == ErrorCode::invalid_argument || error.code() == ErrorCode::shutting_down;
}

bool is_barrier(const std::type_info& given) { return given == typeid(Presence); }

}  // namespace

std::string gathering_of(const std::type_info& given) {
  return is_barrier(given) ? "a barrier" : "an all_gather of " + base::demangle(given.name());
}

void Posted::load(rpc::InArchive&) {
  throw Error(ErrorCode::internal, "what is in the exchange cannot be read without its type");
}

Future<Posted> fetch_posted(std::string key, std::string type) {
  struct Wait {
    std::weak_ptr<rpc::Agent> agent;
    std::string key;
    std::uint64_t number = 0;
  };
  // Ends the wait of a caller that has given up, and with that itself.
  struct StopWaiting {
    std::shared_ptr<const Wait> wait;
    void operator()() const noexcept {
      const auto ended = wait;
      if (const auto alive = ended->agent.lock())
        alive->gather_exchange().stop_waiting(ended->key, ended->number);
    }
  };
  const Promise<Posted> promise;
  const auto agent = rpc::current_agent();
  const auto fetched = agent->gather_exchange().fetch(key, rpc::IncomingCall::caller_here());
  const auto& posted = fetched.value;
  const auto answer = [promise, posted, type = std::move(type)] {
    promise.fulfil([&] {
      if (posted.has_error() && is_own_word(posted.error())) throw rpc::CallRefused(posted.error());
      Posted found{posted.get()};
      if (type != found.value.type->name()) {
        throw rpc::CallRefused(Error(ErrorCode::invalid_argument,
                                     "that worker is in " + gathering_of(*found.value.type)));
      }
      return found;
    });
  };
  std::shared_ptr<std::stop_callback<StopWaiting>> stop;
  if (!posted.ready()) {
    auto wait = std::make_shared<const Wait>(Wait{agent, key, fetched.wait});
    stop = std::make_shared<std::stop_callback<StopWaiting>>(current_stop_token(),
                                                             StopWaiting{std::move(wait)});
  }
  posted.on_ready([answer, stop = std::move(stop)] { answer(); });
  return promise.future();
}

FetchRequest begin_fetch(const std::string& key, const std::type_info& type) {
  const rpc::Function& function = kFunction<&fetch_posted>;
  FetchRequest request{is_barrier(type) ? "stitch::Worker::barrier" : "stitch::Worker::all_gather",
                       rpc::begin_request(function.id)};
  encode_arguments<rpc::TraitsOf<&fetch_posted>>(request.message, key, std::string(type.name()));
  request.message.ahead = true;  // a barrier does not wait behind calls
  return request;
}

}  // namespace stitch::detail
