#pragma once

#include <memory>

namespace stitch::rpc {
class Agent;
}

namespace stitch::rref {

class RRefAgent;

// Makes every Agent constructed from now on take part in the lifetime protocol; returns the
// extension's index. Including this header is enough.
int register_rref_extension();
inline const int kRRefExtension = register_rref_extension();

[[nodiscard]] std::shared_ptr<RRefAgent> rrefs_of(rpc::Agent& agent);

}  // namespace stitch::rref
