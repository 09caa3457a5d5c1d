#include "stitch/rpc/world/world_keeper.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <system_error>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/rpc/membership/notice.h"

namespace stitch::rpc {

using std::chrono::steady_clock;

namespace {
constexpr std::chrono::milliseconds kLookInterval{200};
// From the begin of one look for a store that is away to that of the next: doubled up to this. Who
// starts as its host waits for a keeper (RunningWorld::kReturnTime).
constexpr std::chrono::milliseconds kLongestLookInterval{800};
// Beyond what one request to the store may take.
constexpr std::chrono::milliseconds kEndTimeout = OpenStore::kStoreTimeout * 3 / 2;

bool is_away(const Error& error) {
  return error.code() == ErrorCode::disconnected || error.code() == ErrorCode::timeout;
}
}  // namespace

WorldKeeper::WorldKeeper(OpenStore opened, WorldRecord record)
    : opened_(std::move(opened)), record_(std::move(record)) {}

WorldKeeper::~WorldKeeper() {
  stop();
  std::thread thread;
  {
    const base::MutexLock lock(mutex_);
    thread.swap(thread_);
  }
  if (thread.joinable()) thread.join();
}

void WorldKeeper::start(const std::shared_ptr<Agent>& agent) {
  {
    const base::MutexLock lock(mutex_);
    agent_ = agent;
  }
  on_change();
}

void WorldKeeper::on_change() {
  std::shared_ptr<Agent> agent;
  {
    const base::MutexLock lock(mutex_);
    ++changes_;
    changed_.notify_all();
    agent = agent_.lock();
    if (!agent || opened_.alone || stopped_ || thread_.joinable()) return;
  }
  try {
    // The agent has locks of its own. Who finds it responsible at the same time starts one thread.
    if (keeps(*agent)) start_thread();
  } catch (const std::system_error& error) {
    // Without threads for the moment. The world needs a keeper, so it is tried again.
    if (!without_thread_reported_.exchange(true)) {
      std::fprintf(stderr, "stitch: %s cannot keep the record of its world yet: %s\n",
                   agent->self().name.c_str(), error.what());
    }
    agent->loop().call_at(Clock::now() + kLookInterval, [this, weak = std::weak_ptr(agent)] {
      if (const auto alive = weak.lock()) on_change();
    });
  }
}

bool WorldKeeper::keeps(const Agent& agent) const {
  // Declared dead: what it knows of the world is of that time, and another keeps the record now.
  if (agent.fenced()) return false;
  const auto live = agent.live_members();
  return std::all_of(live.begin(), live.end(),
                     [&](const WorkerInfo& info) { return info.id >= agent.self().id; });
}

void WorldKeeper::start_thread() {
  const base::MutexLock lock(mutex_);
  if (stopped_ || thread_.joinable()) return;
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "stitch-keeper");
}

void WorldKeeper::end_world(steady_clock::time_point deadline) {
  const auto give_up = std::min(deadline, steady_clock::now() + kEndTimeout);
  base::MutexLock lock(mutex_);
  ending_ = true;
  ++changes_;
  changed_.notify_all();
  const auto agent = agent_.lock();
  if (!agent || !thread_.joinable()) return;
  lock.unlock();
  const bool responsible = keeps(*agent);
  lock.lock();
  while (responsible && !ended_ && !stopped_ && steady_clock::now() < give_up)
    changed_.wait_until(mutex_, give_up);
}

void WorldKeeper::stop() {
  const base::MutexLock lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

void WorldKeeper::run() {
  auto interval = kLookInterval;
  for (;;) {
    std::uint64_t seen = 0;
    bool ending = false;
    std::shared_ptr<Agent> agent;
    {
      const base::MutexLock lock(mutex_);
      if (stopped_) return;
      seen = changes_;
      ending = ending_;
      agent = agent_.lock();
    }
    if (!agent) return;
    const bool responsible = keeps(*agent);
    const auto began = steady_clock::now();
    const bool there = !responsible || look_after_store(*agent, ending);
    interval = there ? kLookInterval : std::min(2 * interval, kLongestLookInterval);
    agent.reset();  // its end waits for this thread
    base::MutexLock lock(mutex_);
    if (responsible && ending) {
      ended_ = true;
      changed_.notify_all();
    }
    const auto until = std::max(began + interval, steady_clock::now() + kLookInterval);
    while (!stopped_ && changes_ == seen && (!responsible || steady_clock::now() < until)) {
      if (responsible) {
        changed_.wait_until(mutex_, until);
      } else {
        changed_.wait(mutex_);
      }
    }
  }
}

bool WorldKeeper::look_after_store(Agent& agent, bool ending) noexcept {
  auto failure = try_store(agent, ending);
  // A file that is gone is another one at the second try. A world that ends makes none.
  const bool gone = failure && failure->code() == ErrorCode::disconnected;
  if (gone && opened_.reopen && !opened_.served && !ending) failure = try_store(agent, ending);
  // Workers that start look for the host of a served store, too.
  const bool away = failure && opened_.served && is_away(*failure);
  if (failure && !away && !ending) report(agent, *failure);
  return !away;
}

// Why the store has not the record of this world; nothing if it has, and is as it should be.
std::optional<Error> WorldKeeper::try_store(Agent& agent, bool ending) {
  std::optional<Error> failure;
  try {
    // A file that is gone is not made again by a world that ends.
    const bool reopens = opened_.reopen && (opened_.served || !ending);
    if (!store_) store_ = reopens ? opened_.reopen() : opened_.store;
    update_entries(agent);
    bool ours = true;
    try {
      ours = write_record(*store_, ending);
    } catch (const Error& error) {
      if (is_away(error)) throw;
      failure = error;
    }
    // Also where the record cannot be written: who rings has found a former one, and joins by it.
    // Not for another world, which may be dead.
    if (ours && !ending) answer(*store_);
  } catch (...) {
    // Its host is gone, or does not answer: another may serve it soon. A store of the program's own
    // may throw anything.
    if (!failure) failure = to_error(std::current_exception());
    if (opened_.reopen) store_ = nullptr;
  }
  return failure;
}

void WorldKeeper::report(const Agent& agent, const Error& failure) {
  if (std::exchange(failure_reported_, true)) return;
  const std::string store = opened_.store->describe();
  std::string why = failure.what();
  if (why.find(store) == std::string::npos) why += " in " + store;
  std::fprintf(stderr, "stitch: worker \"%s\" (id %u) cannot keep the record of its world: %s\n",
               agent.self().name.c_str(), agent.self().id.value(), why.c_str());
}

// Each worker's last life. One that is over keeps its place: its name keeps its id, and the next
// life gets a higher epoch, also if that life has come and gone while another worker kept the
// record, in a store that is lost. More than name, id and epoch is not kept of it: there are many.
void WorldKeeper::update_entries(const Agent& agent) {
  for (auto& entry : record_.entries) entry.live = false;
  for (auto& life : agent.known_lives()) {
    const WorkerInfo& info = life.card.info;
    const bool live = life.state == LifeState::alive;
    const auto same = [&](const auto& entry) { return entry.card.info.id == info.id; };
    const auto found = std::find_if(record_.entries.begin(), record_.entries.end(), same);
    if (found == record_.entries.end()) {
      record_.entries.push_back({std::move(life.card), live});
    } else if (found->card.info.epoch <= info.epoch) {  // else this worker has not heard of it yet
      *found = {std::move(life.card), live};
    }
  }
  for (auto& entry : record_.entries) {
    if (!entry.live) entry.card = MemberCard{std::move(entry.card.info), {}, {}};
  }
  std::sort(record_.entries.begin(), record_.entries.end(),
            [](const auto& a, const auto& b) { return a.card.info.id < b.card.info.id; });
}

bool WorldKeeper::write_record(transport::Store& store, bool ending) {
  const std::string wanted = ending ? "" : record_.encode();
  const auto there = store.try_get(world_key::kWorld);
  if (there.value_or("") == wanted) return true;
  if (there && !there->empty() && WorldRecord::decode(*there).number != record_.number) {
    if (!std::exchange(another_world_reported_, true) && !ending) {
      std::fprintf(stderr,
                   "stitch: another world runs at %s: workers that start find that one, not this\n",
                   store.describe().c_str());
    }
    return false;
  }
  if (!there || there->empty()) store.add(world_key::kGeneration, 1);
  store.compare_and_set(world_key::kWorld, there, wanted);
  return true;
}

void WorldKeeper::answer(transport::Store& store) {
  const auto ring = store.try_get(world_key::kRing);
  if (ring && store.try_get(world_key::kRung) != ring) store.set(world_key::kRung, *ring);
}

}  // namespace stitch::rpc
