#pragma once

// The includes of tests of worlds: gtest, libtorch, the whole of stitch and the support for
// clusters. Precompiled for all test programs that use libtorch.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/stitch.h"
#include "stitch/transport/store/hash_store.h"
#include "tests/support/cluster.h"
#include "tests/support/contains.h"
#include "tests/support/error_of.h"
#include "tests/support/eventually.h"
#include "tests/support/gate.h"
#include "tests/support/loopback_faults.h"
#include "tests/support/on_each.h"
#include "tests/support/sanitizers.h"
#include "tests/support/temporary_folder.h"

namespace stitch::testing {

// What tests of worlds name, too.
using stitch::current_stop_token;
using stitch::current_worker;
using stitch::Future;
using stitch::make_failed;
using stitch::make_ready;
using stitch::make_rref;
using stitch::notify;
using stitch::Options;
using stitch::Promise;
using stitch::remote;
using stitch::rpc_async;
using stitch::rpc_sync;
using stitch::RRef;
using stitch::ShutdownOptions;
using stitch::Target;
using stitch::TargetOptions;
using stitch::when_all;
using stitch::when_any;
using stitch::Worker;
using stitch::WorkerId;
using stitch::WorkerInfo;
using stitch::WorkerScope;

}  // namespace stitch::testing
