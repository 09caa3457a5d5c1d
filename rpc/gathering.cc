#include "stitch/rpc/gathering.h"

#include "stitch/base/demangle.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/gather_exchange.h"

namespace stitch::detail {

// Inline: a barrier must pass even while every user-function thread is taken.
STITCH_INLINE(&fetch_posted);

std::string gathering_of(const std::type_info& given) {
  return given == typeid(Presence) ? "a barrier"
                                   : "an all_gather of " + base::demangle(given.name());
}

void Posted::load(rpc::InArchive&) {
  throw Error(ErrorCode::internal, "what is on a board cannot be read without its type");
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

}  // namespace stitch::detail
