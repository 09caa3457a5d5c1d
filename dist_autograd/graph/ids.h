#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "stitch/rpc/message/worker_info.h"

namespace stitch::dist_autograd {

// Globally unique id of a context, never reused: the worker that made it, which life of that
// worker, and a counter. Wider than 64 bits, so that neither a restart nor a long run repeats an
// id.
struct ContextId {
  WorkerId home;              // the worker that made it
  std::uint64_t epoch = 0;    // which life of that worker
  std::uint64_t counter = 0;  // of the contexts that it made
  friend auto operator<=>(const ContextId&, const ContextId&) = default;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(home, epoch, counter);
  }
};

// Id of a backward pass within a context: the worker that called backward(), which life of it,
// and a counter of that worker's passes over this context.
struct PassId {
  WorkerId root;
  std::uint64_t epoch = 0;
  std::uint64_t counter = 0;
  friend auto operator<=>(const PassId&, const PassId&) = default;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(root, epoch, counter);
  }
};

// Id of one message that carried tensors requiring grad, within a context: the worker that sent it
// and a counter of that worker. The same id names the SendNode there and the RecvNode at the
// receiver.
struct LinkId {
  WorkerId sender;
  std::uint64_t counter = 0;
  friend auto operator<=>(const LinkId&, const LinkId&) = default;
};

// `12@0.1735`: counter, home worker, epoch.
[[nodiscard]] std::string to_string(const ContextId& id);
// `0/17`: sender, counter.
[[nodiscard]] std::string to_string(const LinkId& id);

}  // namespace stitch::dist_autograd

template <>
struct std::hash<stitch::dist_autograd::ContextId> {
  std::size_t operator()(const stitch::dist_autograd::ContextId& id) const noexcept;
};
template <>
struct std::hash<stitch::dist_autograd::PassId> {
  std::size_t operator()(const stitch::dist_autograd::PassId& id) const noexcept;
};
template <>
struct std::hash<stitch::dist_autograd::LinkId> {
  std::size_t operator()(const stitch::dist_autograd::LinkId& id) const noexcept;
};
