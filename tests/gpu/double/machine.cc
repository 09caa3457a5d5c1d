#include "tests/gpu/double/machine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "tests/gpu/double/fake_cuda.h"
#include "tests/gpu/double/fake_nccl.h"

namespace stitch::transport::gpu::test {
namespace {

std::atomic<Machine*> current_machine{nullptr};
std::atomic<std::uint64_t> worlds{0};
constexpr std::size_t kHosts = 0;  // their timeline

// This thread's host in the world of that number.
struct ThreadHost {
  std::uint64_t world = 0;
  FakeHost* host = nullptr;
};
thread_local ThreadHost thread_host;

}  // namespace

Machine::Machine(FakeGpu::Options options)
    : options(options),
      memory([this](const std::string& text) { violation(text); }),
      random_(options.seed) {
  cuda = std::make_unique<FakeCuda>(*this);
  nccl = std::make_unique<FakeNccl>(*this);
  fill_tables(*this);
  Machine* none = nullptr;
  if (!current_machine.compare_exchange_strong(none, this)) {
    throw std::logic_error("there is one world of GPUs at a time");
  }
  worlds.fetch_add(1);
  thread_ = std::thread([this] { run_device(); });
}

Machine::~Machine() {
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    changed();
  }
  thread_.join();
  current_machine.store(nullptr);
  for (auto& [id, op] : unfinished) {  // chains of operations would be destroyed recursively
    op->after.clear();
    op->behind.clear();
    op->dependents.clear();
    if (op->nccl) std::exchange(op->nccl, nullptr)->op.reset();
  }
}

Machine& Machine::current() {
  Machine* const machine = current_machine.load();
  if (machine == nullptr) throw std::logic_error("the world of GPUs has ended");
  return *machine;
}

FakeHost& Machine::this_host() {
  if (thread_host.world == worlds.load() && thread_host.host != nullptr) return *thread_host.host;
  hosts_.emplace_back().name = "thread " + std::to_string(hosts_.size());
  thread_host = {worlds.load(), &hosts_.back()};
  return hosts_.back();
}

Caller Machine::enter(int process) {
  FakeHost& host = this_host();
  host_clock.advance({kHosts, ++actions_});
  return Caller{host, process, host.in.at(static_cast<std::size_t>(process))};
}

FakeMemory::Actor Machine::actor(const Caller& caller, std::string what) const {
  return {caller.process,
          -1,
          &host_clock,
          {kHosts, actions_},
          std::move(what) + " on host " + caller.host.name};
}

// --- events -------------------------------------------------------------------------------------

void Machine::schedule(Time delay, std::function<void()> action) {
  // Ties are broken by the seed.
  events_.emplace(std::pair{now_ + delay, (random_() << 20) | (++last_id & 0xfffff)},
                  std::move(action));
  changed();
}

bool Machine::step() {
  if (events_.empty()) return false;
  const auto next = events_.extract(events_.begin());
  now_ = std::max(now_, next.key().first);
  next.mapped()();
  changed();
  return true;
}

Time Machine::draw(std::size_t bytes) {
  // Between 1 us and 1 ms, each magnitude as likely.
  const double exponent = std::uniform_real_distribution<double>(0, 10)(random_);
  return Time(static_cast<Time::rep>(1000 * std::exp2(exponent))) + Time(bytes / 10);
}

void Machine::run_device() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (!step()) {
      changed_.wait(lock);
      continue;
    }
    lock.unlock();  // hosts get their turn
    std::this_thread::yield();
    lock.lock();
  }
}

// --- operations ---------------------------------------------------------------------------------

FakeStream& Machine::make_stream(int process, int device, bool blocking) {
  auto stream = std::make_unique<FakeStream>();
  stream->id = static_cast<int>(streams_.size());
  stream->process = process;
  stream->device = device;
  stream->blocking = blocking;
  const std::size_t used = queues_used_[{process, device}]++;
  stream->queue = options.hardware_queues == 0
                      ? used
                      : used % static_cast<std::size_t>(options.hardware_queues);
  streams_.push_back(std::move(stream));
  streams_.back()->timeline = kHosts + streams_.size();
  return *streams_.back();
}

OpPtr Machine::make_op(FakeStream& stream, std::string what) {
  auto op = std::make_shared<Op>();
  op->id = static_cast<int>(++last_id);
  op->process = stream.process;
  op->device = stream.device;
  op->stream = &stream;
  op->what = std::move(what) + " #" + std::to_string(op->id) + " (process " +
             std::to_string(stream.process) + ", device " + std::to_string(stream.device) +
             ", stream " + std::to_string(stream.id) + ")";
  return op;
}

void Machine::submit(const OpPtr& op, const VectorClock& clock) {
  FakeStream& stream = *op->stream;
  if (stream.tail) op->after.push_back(stream.tail);
  // The default stream waits for all blocking ones of its device, and they for it.
  if (stream.is_default || stream.blocking) {
    for (const auto& other : streams_) {
      if (other->process != stream.process || other->device != stream.device || !other->tail)
        continue;
      if ((stream.is_default && other->blocking) || (stream.blocking && other->is_default))
        op->after.push_back(other->tail);
    }
  }
  OpPtr& queue_tail = queue_tails_[{{stream.process, stream.device}, stream.queue}];
  if (queue_tail) op->behind.push_back(queue_tail);
  queue_tail = op;
  stream.tail = op;
  op->epoch = {stream.timeline, ++stream.submitted};
  op->clock = clock;
  unfinished[op->id] = op;
  if (broken.contains({op->process, op->device})) op->dropped = true;
  for (const auto* others : {&op->after, &op->behind}) {
    for (const OpPtr& other : *others) {
      if (other->state == Op::State::done) continue;
      other->dependents.push_back(op);
      ++op->unmet;
    }
  }
  if (op->unmet == 0) start(op);
}

void Machine::start(const OpPtr& op) {
  for (const OpPtr& other : op->after) op->clock.join(other->clock);
  op->clock.advance(op->epoch);
  op->after.clear();
  op->behind.clear();
  op->state = Op::State::running;
  if (op->dropped) {
    finish(op);
  } else if (op->nccl) {
    nccl->started(op->nccl);
  } else if (op->gate == 0 || gates[op->gate]) {
    schedule(op->duration, [this, op] { finish(op); });
  }
}

void Machine::finish(const OpPtr& op) {
  if (op->state == Op::State::done) return;
  op->state = Op::State::done;
  if (op->execute && !op->dropped) op->execute(*op);
  op->execute = nullptr;
  if (op->nccl) std::exchange(op->nccl, nullptr)->op.reset();
  unfinished.erase(op->id);
  const std::vector<OpPtr> dependents = std::exchange(op->dependents, {});
  for (const OpPtr& other : dependents) {
    if (--other->unmet == 0 && other->state == Op::State::queued) start(other);
  }
  changed();
}

void Machine::drop_work(int process, int device) {
  std::vector<OpPtr> dead;
  for (const auto& [id, op] : unfinished) {
    if (op->process == process && op->device == device) dead.push_back(op);
  }
  for (const OpPtr& op : dead) op->dropped = true;
  for (const OpPtr& op : dead) {
    if (op->state == Op::State::running) finish(op);
  }
}

// --- hosts that block ---------------------------------------------------------------------------

bool Machine::wait_for(const Caller& caller, const std::vector<OpPtr>& ops,
                       const std::string& what) {
  std::unique_lock<std::mutex> lock(mutex_, std::adopt_lock);
  const bool ended = changed_.wait_for(lock, options.block_limit, [&] {
    return std::all_of(ops.begin(), ops.end(),
                       [](const OpPtr& op) { return op->state == Op::State::done; });
  });
  lock.release();
  if (!ended) {
    violation("host " + caller.host.name + " blocks in " + what + " (process " +
              std::to_string(caller.process) + ") and cannot go on:\n" + describe_unfinished());
    return false;
  }
  for (const OpPtr& op : ops) host_clock.join(op->clock);
  return true;
}

bool Machine::wait_until_device_idle(const Caller& caller, int device, const std::string& what) {
  std::vector<OpPtr> tails;
  for (const auto& stream : streams_) {
    if (stream->process == caller.process && stream->device == device && stream->tail)
      tails.push_back(stream->tail);
  }
  return wait_for(caller, tails, what);
}

bool Machine::idle() const {
  return unfinished.empty() && events_.empty() &&
         std::all_of(nccl->comms.begin(), nccl->comms.end(),
                     [](const auto& at) { return at.second->group == nullptr; });
}

// --- reports ------------------------------------------------------------------------------------

void Machine::violation(const std::string& text) {
  constexpr std::size_t kLimit = 50;
  if (violations.size() < kLimit) violations.push_back(text);
  changed();
}

std::string Machine::describe_unfinished() const {
  std::string text;
  const auto named = [](const std::string& what) { return "  " + what + "\n"; };
  for (const auto& [id, op] : unfinished) {
    const bool waits = op->state == Op::State::running && op->gate != 0 && !gates.at(op->gate);
    text += named(op->what + (op->state == Op::State::queued ? ", not begun" : "") +
                  (waits ? ", waits for gate " + std::to_string(op->gate) : ""));
  }
  for (const auto& [handle, comm] : nccl->comms) {
    if (comm->group) text += named("the launch of " + comm->name());
  }
  return text.empty() ? text : text + "seed " + std::to_string(options.seed);
}

}  // namespace stitch::transport::gpu::test
