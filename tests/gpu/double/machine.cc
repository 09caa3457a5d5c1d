#include "tests/gpu/double/machine.h"

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

// This thread's host in the world of that number.
struct ThreadHost {
  std::uint64_t world = 0;
  FakeHost* host = nullptr;
};
thread_local ThreadHost thread_host;

}  // namespace

Machine::Machine(FakeGpu::Options options)
    : options(std::move(options)),
      memory([this](std::string text) { violation(text); }),
      random_(this->options.seed) {
  cuda = std::make_unique<FakeCuda>(*this);
  nccl = std::make_unique<FakeNccl>(*this);
  fill_tables(*this);
  Machine* none = nullptr;
  if (!current_machine.compare_exchange_strong(none, this)) {
    throw std::logic_error("there is one world of GPUs at a time");
  }
  worlds.fetch_add(1);
  if (this->options.driving == FakeGpu::Driving::thread)
    thread_ = std::thread([this] { run_device(); });
}

Machine::~Machine() {
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    changed();
  }
  if (thread_.joinable()) thread_.join();
  current_machine.store(nullptr);
  for (auto& [id, op] : unfinished) {  // chains of operations would be destroyed recursively
    op->after.clear();
    op->behind.clear();
    op->dependents.clear();
    op->nccl.reset();
  }
  for (auto& [handle, comm] : nccl->comms) {
    if (comm->running) comm->running->op.reset();
  }
}

Machine& Machine::current() {
  Machine* const machine = current_machine.load();
  if (machine == nullptr) throw std::logic_error("the world of GPUs has ended");
  return *machine;
}

FakeHost& Machine::this_host() {
  if (thread_host.world == worlds.load() && thread_host.host != nullptr) return *thread_host.host;
  auto host = std::make_unique<FakeHost>();
  host->name = "thread " + std::to_string(hosts.size());
  host->timeline = timelines++;
  thread_host = {worlds.load(), host.get()};
  return *(hosts[host->name] = std::move(host));
}

void* Machine::act_as(const std::string& name) {
  const std::unique_lock<std::mutex> lock(mutex_);
  FakeHost& before = this_host();
  std::unique_ptr<FakeHost>& host = hosts[name];
  if (!host) {
    host = std::make_unique<FakeHost>();
    host->name = name;
    host->timeline = timelines++;
  }
  thread_host = {worlds.load(), host.get()};
  return &before;
}

void Machine::act_as_before(void* host) {
  thread_host = {worlds.load(), static_cast<FakeHost*>(host)};
}

Caller Machine::enter(int process) {
  if (process < 0 || process >= FakeGpu::kMaxProcesses) {
    throw std::out_of_range("no process " + std::to_string(process));
  }
  FakeHost& host = this_host();
  host.clock.advance({host.timeline, ++host.actions});
  if (options.host_order == FakeGpu::HostOrder::as_called) {
    host_clock.join(host.clock);
    host.clock = host_clock;
  }
  return Caller{host, process, host.in[static_cast<std::size_t>(process)]};
}

void Machine::learn(Caller& caller, const VectorClock& clock) {
  caller.host.clock.join(clock);
  host_clock.join(clock);
}

FakeMemory::Actor Machine::actor(Caller& caller, std::string what) {
  return {caller.process,
          -1,
          &caller.host.clock,
          {caller.host.timeline, caller.host.actions},
          std::move(what) + " on host " + caller.host.name};
}

// --- events -------------------------------------------------------------------------------------

void Machine::schedule(Time delay, std::function<void()> action) {
  // Ties are broken by the seed.
  events.emplace(std::pair{now + delay, (random_() << 20) | (++last_id & 0xfffff)},
                 std::move(action));
  changed();
}

bool Machine::step() {
  if (events.empty()) return false;
  const auto next = events.extract(events.begin());
  now = std::max(now, next.key().first);
  next.mapped()();
  changed();
  return true;
}

Time Machine::draw() {
  // Between 1 us and 1 ms, each magnitude as likely.
  const double exponent = std::uniform_real_distribution<double>(0, 10)(random_);
  return Time(static_cast<Time::rep>(1000 * std::exp2(exponent)));
}

Time Machine::draw(std::size_t bytes) { return draw() + Time(bytes / 10); }

bool Machine::chance(double probability) {
  return std::bernoulli_distribution(probability)(random_);
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
  stream->id = static_cast<int>(streams.size());
  stream->process = process;
  stream->device = device;
  stream->blocking = blocking;
  stream->timeline = timelines++;
  const std::size_t used = queues_used_[{process, device}]++;
  stream->queue = options.hardware_queues == 0
                      ? used
                      : used % static_cast<std::size_t>(options.hardware_queues);
  streams.push_back(std::move(stream));
  return *streams.back();
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
  for (const auto& other : streams) {
    if (other->process != stream.process || other->device != stream.device || !other->tail)
      continue;
    if ((stream.is_default && other->blocking) || (stream.blocking && other->is_default)) {
      op->after.push_back(other->tail);
    }
  }
  OpPtr& queue_tail = queue_tails_[{{stream.process, stream.device}, stream.queue}];
  if (queue_tail) op->behind.push_back(queue_tail);
  queue_tail = op;
  stream.tail = op;
  ++stream.unfinished;
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
    nccl->kernel_started(op);
  } else if (op->gate == 0 || gates[op->gate]) {
    schedule(op->duration.value_or(Time(0)), [this, op] { finish(op); });
  }
}

void Machine::finish(const OpPtr& op) {
  if (op->state == Op::State::done) return;
  op->state = Op::State::done;
  if (op->execute && !op->dropped) op->execute(*op);
  op->execute = nullptr;
  if (op->nccl) std::exchange(op->nccl, nullptr)->op.reset();
  --op->stream->unfinished;
  unfinished.erase(op->id);
  const std::vector<OpPtr> dependents = std::exchange(op->dependents, {});
  for (const OpPtr& other : dependents) {
    if (--other->unmet == 0 && other->state == Op::State::queued) start(other);
  }
  changed();
}

std::vector<OpPtr> Machine::unfinished_of(int process, int device) const {
  std::vector<OpPtr> found;
  for (const auto& [id, op] : unfinished) {
    if (op->process == process && (device < 0 || op->device == device)) found.push_back(op);
  }
  return found;
}

std::vector<OpPtr> Machine::tails_of(int process, int device) const {
  std::vector<OpPtr> tails;
  for (const auto& stream : streams) {
    if (stream->process == process && stream->device == device && stream->tail) {
      tails.push_back(stream->tail);
    }
  }
  return tails;
}

void Machine::drop_work(int process, int device) {
  const std::vector<OpPtr> dead = unfinished_of(process, device);
  for (const OpPtr& op : dead) op->dropped = true;
  for (const OpPtr& op : dead) {
    if (op->state == Op::State::running) finish(op);
  }
}

// --- hosts that block ---------------------------------------------------------------------------

bool Machine::block_until(Caller& caller, const std::string& what,
                          const std::function<bool()>& ready,
                          const std::function<std::vector<OpPtr>()>& waits_for,
                          const NcclGroup* group) {
  if (ready()) return true;
  BlockedHost entry{&caller.host, caller.process, what, waits_for, group};
  blocked.push_back(&entry);
  std::unique_lock<std::mutex> lock(mutex_, std::adopt_lock);
  const auto run_others = [&] {
    if (!options.while_blocked) return false;
    lock.unlock();
    const bool ran = options.while_blocked();
    lock.lock();
    return ran;
  };
  const auto deadline = std::chrono::steady_clock::now() + options.block_limit;
  int without_event = 0;
  bool possible = true;
  while (possible && !ready()) {
    if (options.driving == FakeGpu::Driving::thread) {
      possible = changed_.wait_until(lock, deadline) == std::cv_status::no_timeout || ready();
      continue;
    }
    const bool others_first = without_event < 100'000 && chance(0.5);
    if (others_first && run_others()) {
      ++without_event;
    } else if (step()) {
      without_event = 0;
    } else {
      possible = !others_first && without_event++ < 100'000 && run_others();
      if (others_first && without_event++ < 100'000) possible = true;  // may just have got work
    }
  }
  if (!possible) {
    violation("host " + caller.host.name + " blocks in " + what + " and cannot go on:\n" +
              describe_unfinished());
  }
  blocked.remove(&entry);
  lock.release();
  return possible;
}

bool Machine::wait_until_device_idle(Caller& caller, int device, const std::string& what) {
  const int process = caller.process;
  const std::vector<OpPtr> tails = tails_of(process, device);
  const auto left = [tails] {
    std::vector<OpPtr> ops;
    for (const OpPtr& op : tails) {
      if (op->state != Op::State::done) ops.push_back(op);
    }
    return ops;
  };
  if (!block_until(
          caller, what, [&] { return left().empty(); }, left))
    return false;
  for (const OpPtr& op : tails) learn(caller, op->clock);
  return true;
}

bool Machine::idle() const {
  if (!unfinished.empty() || !blocked.empty()) return false;
  for (const auto& [handle, comm] : nccl->comms) {
    if (comm->group) return false;
  }
  return events.empty();
}

void Machine::violation(const std::string& text) {
  constexpr std::size_t kLimit = 50;
  if (violations.size() < kLimit) violations.push_back(text);
  changed();
}

}  // namespace stitch::transport::gpu::test
