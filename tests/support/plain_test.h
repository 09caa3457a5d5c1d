#pragma once

// The includes of tests without libtorch, precompiled for their programs: gtest, the standard
// library, and the support that needs neither workers nor processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "tests/support/contains.h"
#include "tests/support/error_of.h"
#include "tests/support/eventually.h"
#include "tests/support/gate.h"
#include "tests/support/on_each.h"
#include "tests/support/sanitizers.h"
#include "tests/support/temporary_folder.h"
