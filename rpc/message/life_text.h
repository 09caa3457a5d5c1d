#pragma once

#include <string>

#include "stitch/base/error.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

// How a text names a life of a worker: `worker "ps0" epoch 3` or `worker "ps0" (id 7) epoch 3`.
enum class LifeName { brief, with_id };
[[nodiscard]] std::string life_text(const WorkerInfo& life, LifeName name = LifeName::with_id);

// About a life that is over: Error(disconnected) "worker "ps0" epoch 3 is gone" and `why`, which
// begins with a colon or a semicolon unless it is empty. Names the worker.
[[nodiscard]] Error life_gone(const WorkerInfo& life, const std::string& why,
                              LifeName name = LifeName::brief);
// The exception that is being handled, of a message from that worker: "message from " the worker
// and its text.
[[nodiscard]] Error error_of_message(const WorkerInfo& from) noexcept;

}  // namespace stitch::rpc
