#include "traffic.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "stitch/stitch.h"

namespace stitch_reliability {

namespace {

using namespace std::chrono_literals;
using stitch::Error;
using stitch::ErrorCode;
using stitch::Future;
using stitch::RRef;
using Nanoseconds = std::chrono::nanoseconds;
using Optimizer = stitch::optim::DistributedOptimizer<torch::optim::SGD>;

constexpr auto kLong = 5s;  // rpc_timeout of the workers: what has no limit of its own
constexpr int kSteps = 3;
const std::vector<std::string> kWork{"calls", "references", "gradients", "steps"};

stitch::TargetOptions to(int rank, Nanoseconds timeout) {
  return {.to = stitch::WorkerId(static_cast<std::uint32_t>(rank)), .timeout = timeout};
}

}  // namespace

// ---- links

void Links::failed(const Error& error) {
  const std::string_view text = error.what();
  if (error.remote() || error.code() != ErrorCode::disconnected) return;
  if (text.find("this worker (epoch") != std::string_view::npos) fenced_ = true;
  for (int rank = 0; rank < workers_; ++rank) {
    if (error.worker() != "worker" + std::to_string(rank)) continue;
    std::int64_t never = 0;
    failing_since_.at(static_cast<std::size_t>(rank)).compare_exchange_strong(never, now_ns());
  }
}

bool Links::lost(int rank, Nanoseconds time) const {
  const std::int64_t since = failing_since_.at(static_cast<std::size_t>(rank));
  const std::int64_t up = book().up.at(static_cast<std::size_t>(rank));
  return since != 0 && up != 0 && now_ns() - std::max(since, up) > time.count();
}

bool Links::useless() const {
  if (fenced_) return true;
  int lost_all = 0;
  for (int rank = 0; rank < workers_; ++rank) {
    if (rank < rank_ && lost(rank, 10s)) return true;
    lost_all += rank != rank_ && lost(rank, 4s) ? 1 : 0;
  }
  return workers_ > 2 && lost_all == workers_ - 1;
}

// ---- traffic

struct Traffic::Shared {
  int owner = 0;
  RRef<Parameter> object;
  RRef<at::Tensor> tensor;
};

void check_work(const std::vector<std::string>& work) {
  if (work.empty()) throw std::invalid_argument("--work is empty");
  for (const auto& name : work) {
    if (std::find(kWork.begin(), kWork.end(), name) == kWork.end()) {
      throw std::invalid_argument("work \"" + name +
                                  "\" is unknown; there are calls, references, gradients, steps");
    }
  }
}

Traffic::Traffic(stitch::Worker& self, const TrafficSettings& settings, int life, int thread,
                 Links& links)
    : self_(self),
      settings_(settings),
      life_(life),
      workers_(self.world_size()),
      waiting_(book()
                   .waiting.at(static_cast<std::size_t>(self.rank()))
                   .at(static_cast<std::size_t>(thread))),
      links_(links),
      random_(settings.seed ^ (static_cast<std::uint64_t>(life) << 20) ^
              (static_cast<std::uint64_t>(thread) << 52)) {}

void Traffic::run(const std::atomic<bool>& stop) {
  const stitch::WorkerScope scope(self_);
  while (!stop && !book().over) {
    const WaitScope round(waiting_, WaitScope::kRound, 2min);
    const std::string& work = settings_.work[below(settings_.work.size())];
    try {
      if (work == "references") {
        references();
      } else if (work == "gradients") {
        gradients();
      } else if (work == "steps") {
        steps();
      } else if (below(4) == 0) {
        tensors();
      } else {
        calls();
      }
    } catch (const Error& error) {
      links_.failed(error);  // of what is no operation of its own
    }
    std::this_thread::sleep_for(settings_.pause);
  }
}

int Traffic::other() {
  const int rank = static_cast<int>(below(static_cast<std::size_t>(workers_ - 1)));
  return rank < self_.rank() ? rank : rank + 1;
}

Nanoseconds Traffic::some_time() {
  static constexpr Nanoseconds kTimes[]{300ms, 1s, 3s};
  return kTimes[below(std::size(kTimes))];
}

void Traffic::expect(bool right, const char* what) {
  if (right) return;
  ++book().wrong;
  std::fprintf(stderr, "stitch-reliability: wrong result: %s\n", what);
}

bool Traffic::operate(Kind kind, int peer, Nanoseconds limit,
                      const std::function<void(std::uint64_t number)>& work) {
  const std::uint64_t number = book().begin(kind, life_);
  const WaitScope waits(waiting_, number, limit + settings_.slack);
  try {
    work(number);
    book().end(number, kOk);
    if (kind != Kind::one_way) links_.heard(peer);  // what has no answer proves nothing
    return true;
  } catch (const Error& error) {
    book().end(number, error);
    links_.failed(error);
    return false;
  }
}

void Traffic::calls() {
  const int peer = other();
  const Nanoseconds time = some_time();
  operate(Kind::call, peer, time, [&](std::uint64_t number) {
    expect(self_.rpc_sync<answer>(to(peer, time), number) == number + 1, "of answer()");
  });
  if (below(8) == 0) {
    operate(Kind::call, peer, time, [&](std::uint64_t number) {
      expect(self_.rpc_sync<answer_slowly>(to(peer, time), number) == number + 1, "of a slow call");
    });
  }
  operate(Kind::one_way, peer, time,
          [&](std::uint64_t number) { self_.notify<hear>(to(peer, time), number); });
  const int third = other();
  operate(Kind::nested, peer, time, [&](std::uint64_t number) {
    expect(self_.rpc_sync<ask>(to(peer, time), number, third) == number + 1, "of a nested call");
  });
}

// Several at a time, some of them cancelled. Their outcomes are noted by callbacks: one each.
void Traffic::tensors() {
  static constexpr std::int64_t kSizes[]{8, 4'096, 65'536};
  struct Call {
    Future<at::Tensor> result;
    at::Tensor sent;
    int peer;
  };
  const Nanoseconds time = some_time();
  std::vector<Call> made;
  for (int i = 0; i < 4; ++i) {
    const int peer = other();
    const std::uint64_t number = book().begin(Kind::tensors, life_);
    const auto x = at::full({kSizes[below(std::size(kSizes))]}, static_cast<double>(i));
    try {
      auto result = self_.rpc_async<scaled>(to(peer, time), number, x, 2.0);
      result.on_ready([number, result] {
        if (result.has_error()) {
          book().end(number, result.error());
        } else {
          book().end(number, kOk);
        }
      });
      if (below(10) == 0) result.cancel();
      made.push_back({std::move(result), x, peer});
    } catch (const Error& error) {
      book().end(number, error);
      links_.failed(error);
    }
  }
  const WaitScope waits(waiting_, WaitScope::kRound, time + settings_.slack);
  for (const Call& call : made) {
    try {
      expect(call.result.get().equal(call.sent * 2), "of tensors");
      links_.heard(call.peer);
    } catch (const Error& error) {
      links_.failed(error);
    }
  }
}

void Traffic::references() {
  const int owner = other();
  const Nanoseconds time = some_time();
  RRef<Tally> tally;
  const bool made = operate(Kind::create, owner, kLong, [&](std::uint64_t number) {
    tally = self_.remote<Tally>(to(owner, time), number);
    tally.when_created().get();
  });
  if (!made) return;
  const RRef<Tally> timed = tally.with_timeout(time);
  std::uint64_t before = 0;
  for (int i = 0; i < 3; ++i) {
    operate(Kind::method, owner, time, [&](std::uint64_t number) {
      const std::uint64_t now = timed.rpc_sync<&Tally::add>(number);
      expect(now > before, "of a method");
      before = now;
    });
  }
  const int user = other();
  operate(Kind::nested, user, time, [&](std::uint64_t number) {
    expect(self_.rpc_sync<use>(to(user, time), number, tally) > before, "of a method elsewhere");
  });
  const int keeper = other();
  operate(Kind::call, keeper, time,
          [&](std::uint64_t number) { self_.rpc_sync<keep>(to(keeper, time), number, tally); });
}

void Traffic::gradients() {
  const int first = other();
  const int second = other();
  const stitch::dist_autograd::Context context;
  const auto x = at::ones({8}).set_requires_grad(true);
  at::Tensor y, z;
  const bool forward = operate(Kind::tensors, first, kLong,
                               [&](std::uint64_t number) {
                                 y = self_.rpc_sync<scaled>(to(first, kLong), number, x, 2.0);
                               }) &&
                       operate(Kind::tensors, second, kLong, [&](std::uint64_t number) {
                         z = self_.rpc_sync<scaled>(to(second, kLong), number, y, 3.0);
                       });
  if (!forward) return;
  const bool passed = operate(Kind::backward, first, kLong, [&](std::uint64_t) {
    context.backward({z.sum()}, {.timeout = kLong});
  });
  if (!passed) return;
  expect(context.gradient(x).equal(at::full({8}, 6.0)), "of a backward pass");
  ++book().passes;
}

bool Traffic::make_parameter(Shared& shared) {
  shared.owner = other();
  return operate(Kind::create, shared.owner, kLong,
                 [&](std::uint64_t number) {
                   shared.object = self_.remote<Parameter>(to(shared.owner, kLong), number);
                   shared.object.when_created().get();
                 }) &&
         operate(Kind::method, shared.owner, kLong, [&](std::uint64_t number) {
           shared.tensor = shared.object.rpc_sync<&Parameter::value>(number);
         });
}

// Two parameters, perhaps on two owners. Each step that succeeds takes 1 from each of their
// numbers, one that fails 1 or nothing.
void Traffic::steps() {
  std::array<Shared, 2> shared;
  for (Shared& each : shared) {
    if (!make_parameter(each)) return;
  }
  std::optional<Optimizer> optimizer;
  if (!operate(Kind::step, shared[0].owner, 2 * kLong, [&](std::uint64_t) {
        optimizer.emplace(std::vector<RRef<at::Tensor>>{shared[0].tensor, shared[1].tensor},
                          torch::optim::SGDOptions(1.0));
      })) {
    return;
  }
  int done = 0;
  int tried = 0;
  for (bool going = true; going && tried < kSteps;) {
    const stitch::dist_autograd::Context context;
    at::Tensor loss = at::zeros({});
    for (const Shared& each : shared) {
      going = going && operate(Kind::tensors, each.owner, kLong, [&](std::uint64_t number) {
                loss = loss + each.object.rpc_sync<&Parameter::times>(number, at::ones({4})).sum();
              });
    }
    going = going && operate(Kind::backward, shared[0].owner, kLong,
                             [&](std::uint64_t) { context.backward({loss}, {.timeout = kLong}); });
    if (!going) break;
    ++tried;
    going = operate(Kind::step, shared[0].owner, kLong,
                    [&](std::uint64_t) { optimizer->step(context); });
    done += going ? 1 : 0;
  }
  for (const Shared& each : shared) {
    operate(Kind::method, each.owner, kLong, [&](std::uint64_t number) {
      const auto now = each.object.rpc_sync<&Parameter::now>(number);
      const double steps = -now[0].item<double>();
      expect(steps >= done && steps <= tried && now.equal(at::full({4}, -steps)),
             "of optimizer steps");
    });
  }
  ++book().steps;
}

}  // namespace stitch_reliability
