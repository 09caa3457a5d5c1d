#pragma once

#include <string>
#include <typeinfo>

#include "stitch/rpc/future/future.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/owned_object.h"

// How the workers in a barrier or an all_gather get each other's values.
namespace stitch::detail {

// What a worker gives to a barrier: that it is there.
struct Presence {
  template <class Archive>
  void serialize(Archive&) {}
};

// What a worker takes part in that gives values of this type: "a barrier", "an all_gather of int".
[[nodiscard]] std::string gathering_of(const std::type_info& given);

// A value of the exchange on its way out: written as its type is.
struct Posted {
  rpc::OwnedObject value;
  void save(rpc::OutArchive& archive) const { value.encode(archive, value.object.get()); }
  void load(rpc::InArchive& archive);  // throws: the caller reads the value
};

// What others call: the value in this worker's exchange, as soon as it is there. Refused with
// `invalid_argument` when it is of another type than `type`, by its mangled name: its bytes would
// make sense as something else, and a barrier has none.
[[nodiscard]] Future<Posted> fetch_posted(std::string key, std::string type);

}  // namespace stitch::detail
