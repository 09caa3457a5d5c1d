#pragma once

#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>

#include "stitch/rpc/calls.h"

// How the workers in a barrier or an all_gather get each other's values.
namespace stitch::detail {

// What a worker gives to a barrier: that it is there.
struct Presence {
  template <class Archive>
  void serialize(Archive&) {}
};

// What a worker takes part in that gives values of this type: "a barrier", "an all_gather of int".
[[nodiscard]] std::string gathering_of(const std::type_info& given);

// A value from the board on its way out: written as its type is.
struct Posted {
  rpc::OwnedObject value;
  void save(rpc::OutArchive& archive) const { value.encode(archive, value.object.get()); }
  void load(rpc::InArchive& archive);  // throws: the caller reads the value
};

// What others call: the value on this worker's board, as soon as it is there. Refused with
// `invalid_argument` when it is of another type than `type`, by its mangled name: its bytes would
// make sense as something else, and a barrier has none.
[[nodiscard]] Future<Posted> fetch_posted(std::string key, std::string type);

template <class T>
Future<T> fetch_gathered(const std::shared_ptr<rpc::Agent>& agent, const WorkerInfo& to,
                         const std::string& key) {
  try {
    const rpc::Function& function = kFunction<&fetch_posted>;
    rpc::OutMessage message = rpc::Agent::begin_request(function.id);
    encode_arguments<rpc::TraitsOf<&fetch_posted>>(message, key, std::string(typeid(T).name()));
    return start_call<T>(agent, to, function.name, std::nullopt, std::move(message));
  } catch (...) {
    return make_failed<T>(to_error(std::current_exception()));
  }
}

}  // namespace stitch::detail
