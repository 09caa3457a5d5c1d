#include "stitch/rpc/gathering.h"

#include <utility>

#include "stitch/base/demangle.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/gather_exchange.h"
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
  Promise<Posted> promise;
  auto posted = rpc::current_agent()->gather_exchange().fetch(key);
  posted.on_ready([promise, posted, type = std::move(type)] {
    promise.fulfil([&] {
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
