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
#include "stitch/rpc/world/admission.h"
#include "stitch/rpc/world/reach.h"

namespace stitch::rpc {

using std::chrono::steady_clock;

namespace {
constexpr std::chrono::milliseconds kLookInterval{100};
// From the begin of one look for a store that is away to that of the next: doubled up to this. Who
// starts as its host waits for a keeper (Founding::kReturnTime).
constexpr std::chrono::milliseconds kLongestLookInterval{800};
// Beyond what one request to the store may take.
constexpr std::chrono::milliseconds kEndTimeout = OpenStore::kStoreTimeout * 3 / 2;

bool is_away(const Error& error) {
  return error.code() == ErrorCode::disconnected || error.code() == ErrorCode::timeout;
}
}  // namespace

WorldKeeper::WorldKeeper(OpenStore opened, std::uint64_t world,
                         std::unique_ptr<transport::Store::Claim> keeper)
    : opened_(std::move(opened)),
      where_(opened_.store->describe()),
      world_(world),
      store_(keeper != nullptr || !opened_.reopen ? opened_.store : nullptr),
      keeper_(std::move(keeper)),
      begins_(keeper_ != nullptr) {
  // The other workers need no connection to it.
  opened_.store = nullptr;
}

WorldKeeper::~WorldKeeper() { end(); }

void WorldKeeper::end() {
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
  bool begins = false;
  {
    const base::MutexLock lock(mutex_);
    ++changes_;
    changed_.notify_all();
    agent = agent_.lock();
    if (!agent || opened_.alone || stopped_ || thread_.joinable()) return;
    begins = begins_;
  }
  try {
    // The agent has locks of its own. Who finds it responsible at the same time starts one thread.
    if (begins || keeps(*agent)) start_thread();
  } catch (const std::system_error& error) {
    // Without threads for the moment. The world needs a keeper, so it is tried again.
    if (!without_thread_reported_.exchange(true)) {
      std::fprintf(stderr, "stitch: %s cannot keep its world yet: %s\n", agent->self().name.c_str(),
                   error.what());
    }
    agent->loop().call_at(Clock::now() + kLookInterval, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->on_change();
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
  bool first = false;  // of the live workers, as of the last change
  for (std::uint64_t looked = 0;;) {
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
    if (std::exchange(looked, seen) != seen) first = keeps(*agent);
    const bool responsible = first && !agent->fenced();
    // One that is followed by another answers those whom it has let in.
    const bool works = responsible || keeper_ != nullptr;
    const auto began = steady_clock::now();
    const bool there = !works || look_after_store(*agent, responsible, ending);
    interval = there ? kLookInterval : std::min(2 * interval, kLongestLookInterval);
    agent.reset();  // its end waits for this thread
    base::MutexLock lock(mutex_);
    if (responsible && ending && (over_ || !store_)) {
      ended_ = true;
      changed_.notify_all();
    }
    const auto until = std::max(began + interval, steady_clock::now() + kLookInterval);
    while (!stopped_ && changes_ == seen && (!works || steady_clock::now() < until)) {
      if (works) {
        changed_.wait_until(mutex_, until);
      } else {
        changed_.wait(mutex_);
      }
    }
  }
}

bool WorldKeeper::look_after_store(Agent& agent, bool keeps, bool ending) noexcept {
  const auto attempt = [&]() -> std::optional<Error> {
    try {
      try_store(agent, keeps, ending);
      return std::nullopt;
    } catch (...) {
      Error error = to_error(std::current_exception());
      // A process that is stopped holds the lock of a file for a while.
      if (error.code() == ErrorCode::timeout && !opened_.served) return std::nullopt;
      // Its host is gone, or does not answer: another may serve it soon. A store of the program's
      // own may throw anything.
      if (opened_.reopen) {
        store_ = nullptr;
        keeper_ = nullptr;
      }
      return error;
    }
  };
  auto failure = attempt();
  // A file that is gone is another one at the second try. A world that ends makes none.
  const bool gone = failure && failure->code() == ErrorCode::disconnected;
  if (gone && opened_.reopen && !opened_.served && !ending) failure = attempt();
  // Workers that start look for the host of a served store, too.
  const bool away = failure && opened_.served && is_away(*failure);
  if (failure && !away && !ending) report(agent, *failure);
  return !away;
}

void WorldKeeper::try_store(Agent& agent, bool keeps, bool ending) {
  // A file that is gone is not made again by a world that ends.
  if (over_ || (!store_ && ending && was_open_ && !opened_.served)) return;
  if (!store_) store_ = opened_.reopen();
  was_open_ = true;
  if (!keeper_ && !claim_world(agent)) return;
  if (ending) {
    for (const auto& token : answered_) store_->erase(world_key::kAnswer + token);
    store_->erase(world_key::kWorld);
    keeper_ = nullptr;
    over_ = true;
    return;
  }
  answer_decided();
  const auto claims = store_->claims(world_key::kMember, 1, transport::Store::Timeout(0));
  const std::size_t prefix = std::string(world_key::kMember).size();
  if (!founders_) read_founders();
  bool founders_read = true;
  std::optional<std::vector<KnownLife>> lives;  // known when a claim has come
  for (const auto& [key, value] : claims) {
    const std::string token = key.substr(prefix);
    if (answered_.contains(token) || admitting_.contains(token)) continue;
    if (!lives) lives = agent.known_lives();
    const auto life = std::ranges::find_if(*lives, [&](const auto& each) {
      return MemberRecord::token_of(each.card.record) == token;
    });
    if (life == lives->end()) {
      if (keeps) take_in(agent, token, value);
    } else if (!marked_ && founders_->contains(token)) {
      founders_read = false;  // it is about to read the record
    } else if (life->state == LifeState::alive) {
      answer(token, {world_, *lives});
    } else {
      refuse(token, Error(ErrorCode::invalid_argument,
                          to_string(life->card.info) + " cannot join: " + life->verdict));
    }
  }
  // What was there for a founding is not needed any more: those that join read less.
  if (!marked_ && founders_read) {
    store_->set(world_key::kWorld, WorldRecord{world_}.encode());
    marked_ = true;
  }
  for (auto each = answered_.begin(); each != answered_.end();) {
    if (claims.contains(world_key::kMember + *each)) {
      ++each;
      continue;
    }
    store_->erase(world_key::kAnswer + *each);
    each = answered_.erase(each);
  }
  if (!keeps && admitting_.empty()) {  // the next keeper knows what this one does
    keeper_ = nullptr;
    answered_.clear();
  }
}

// Whether this worker holds the world's claim.
bool WorldKeeper::claim_world(const Agent& agent) {
  auto [claim, holder] = store_->claim(world_key::kKeeper, keeper_value(world_, agent.self().name));
  if (claim != nullptr) {
    keeper_ = std::move(claim);
    founders_.reset();
    marked_ = false;
    return true;
  }
  // Another worker of this world gives it up in a moment.
  if (!holder.starts_with(std::to_string(world_) + ' ') &&
      !std::exchange(another_world_reported_, true)) {
    std::fprintf(stderr,
                 "stitch: another world runs at %s: workers that start find that one, not this\n",
                 where_.c_str());
  }
  return false;
}

// Those that read the record of the founding, where that is still there.
void WorldKeeper::read_founders() {
  founders_.emplace();
  const auto text = store_->try_get(world_key::kWorld);
  if (!text) return;
  static_cast<void>(base::failure_of([&] {
    const auto record = WorldRecord::decode(*text);
    if (record.number != world_) return;
    for (const auto& life : record.lives)
      founders_->insert(MemberRecord::token_of(life.card.record));
  }));
}

// A worker that is no member claims a place.
void WorldKeeper::take_in(Agent& agent, const std::string& token, const std::string& value) {
  MemberClaim claim;
  MemberCard card;
  auto why = base::failure_of([&] {
    claim = MemberClaim::decode(value);
    if (claim.record.token != token)
      throw Error(ErrorCode::protocol, "a claim in the store is not under its token");
    std::vector<KnownLife> lives = agent.known_lives();
    std::vector<MemberRecord> members{claim.record};
    for (const auto& life : lives) {
      static_cast<void>(
          base::failure_of([&] { members.push_back(MemberRecord::decode(life.card.record)); }));
    }
    for (const auto& coming : admitting_) {
      const WorkerId id = coming.second.info.id;
      std::erase_if(lives, [&](const auto& life) { return life.card.info.id == id; });
      lives.push_back({coming.second});
    }
    const WorldSize& size = agent.options().world_size;
    card.info = place_for(claim.record, lives, size, where_);
    card.addresses = needed_addresses(claim.addresses, members, size);
    claim.record.name = card.info.name;
    claim.record.rank = card.info.id.value();
    card.record = claim.record.encode();
    // As those that hear of it will.
    WorldRecord read;
    read.lives.push_back({card});
    static_cast<void>(read.encode());
  });
  if (why) return refuse(token, *why);
  // Its name may be on the way in already: one after the other.
  for (const auto& [other, coming] : admitting_) {
    if (coming.info.name == card.info.name) return;
  }
  admitting_.emplace(token, card);
  agent.admit(card, [weak = weak_from_this(), token](const auto& refusal, bool here) {
    if (const auto self = weak.lock()) self->decide({token, refusal, here});
  });
}

void WorldKeeper::decide(Decided decided) {
  const base::MutexLock lock(mutex_);
  decided_.push_back(std::move(decided));
  if (!decided_.back().here) return;  // tried again at the next look
  ++changes_;
  changed_.notify_all();
}

void WorldKeeper::answer_decided() {
  std::vector<Decided> decided;
  {
    const base::MutexLock lock(mutex_);
    decided.swap(decided_);
  }
  // Also where the store fails: those that are members are answered at each look, the others
  // decided about again.
  for (const Decided& each : decided) admitting_.erase(each.token);
  for (const Decided& each : decided) {
    if (each.refusal) refuse(each.token, *each.refusal);
  }
}

void WorldKeeper::answer(const std::string& token, const WorldRecord& record) {
  store_->set(world_key::kAnswer + token, record.encode());
  answered_.insert(token);
}

void WorldKeeper::refuse(const std::string& token, const Error& why) {
  answer(token, {world_, {}, to_refusal_text(why), {token}});
}

void WorldKeeper::report(const Agent& agent, const Error& failure) {
  if (std::exchange(failure_reported_, true)) return;
  std::string why = failure.what();
  if (why.find(where_) == std::string::npos) why += " in " + where_;
  std::fprintf(stderr, "stitch: worker \"%s\" (id %u) cannot keep the record of its world: %s\n",
               agent.self().name.c_str(), agent.self().id.value(), why.c_str());
}

}  // namespace stitch::rpc
