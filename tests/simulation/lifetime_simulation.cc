// One file, though long: the workers of a walk, what happens to them and what must hold.
#include "tests/simulation/lifetime_simulation.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "stitch/rref/lifetime/lifetime.h"

namespace stitch::rref::lifetime_simulation {
namespace {

class World final : public simulation::History {
 public:
  World(std::uint64_t number, const Options& options) : History(number), options_(options) {
    for (std::size_t w = 0; w < options.workers; ++w)
      add_life({static_cast<std::uint32_t>(w), 1 + w});
  }
  ~World() override {
    unchecked_ = true;
    for (auto& worker : lives_) {
      if (worker != nullptr) (void)worker->close();
    }
  }

 private:
  struct Object {
    RRefId id;
    std::size_t owner = 0;
    bool made = false;  // there was an object to destroy
    int destroyed = 0;
  };

  // The object in the tables: reports its destruction to the simulation.
  struct Probe {
    World* simulation;
    Object* object;
    Probe(World* s, Object* o) : simulation(s), object(o) {}
    Probe(const Probe&) = delete;
    Probe& operator=(const Probe&) = delete;
    ~Probe() { simulation->on_destroyed(*object); }
  };

  enum class Kind { call, reply, create, created };
  struct Message {
    Kind kind = Kind::call;
    std::size_t from = 0, to = 0;
    std::vector<CarriedRef> carried;
    RRefId creation;
    bool failed = false;
  };
  struct Task {  // a message being processed at message.to
    Message message;
    std::vector<RRefId> handles;
  };
  struct Frame {
    std::size_t from = 0, to = 0;
    base::Bytes bytes;
  };

  void add_life(const WorkerLife& life) {
    const std::size_t number = lives_.size();
    names_.push_back(life);
    handles_.emplace_back();
    waiting_.push_back(0);
    lives_.push_back(std::make_unique<Lifetime>(life));
    lives_.back()->set_world(
        {.contains =
             [this, number](const WorkerLife& asked) {
               const std::size_t w = number_of(asked);
               return w < names_.size() && knows(number, w) && !passed_.contains({number, w});
             },
         .live =
             [this, number] {
               std::vector<WorkerLife> live;
               for (std::size_t w = 0; w < names_.size(); ++w) {
                 if (!heard_.contains({number, w}) && knows(number, w)) live.push_back(names_[w]);
               }
               return live;
             },
         .gone = {}});
  }
  std::size_t number_of(const WorkerLife& life) const {
    return static_cast<std::size_t>(std::find(names_.begin(), names_.end(), life) - names_.begin());
  }
  void play() override {
    for (std::size_t i = 0; i < options_.objects; ++i) {
      if (chance(0.5)) {
        make_object();
      } else {
        start_creation();
      }
    }
    std::multimap<int, int> events;  // by step
    const auto any_step = [&] {
      return options_.steps / 8 + static_cast<int>(pick(static_cast<std::size_t>(options_.steps)));
    };
    for (std::size_t i = 0; i < options_.deaths; ++i) events.emplace(any_step(), 0);
    for (std::size_t i = 0; i < options_.restarts; ++i) events.emplace(any_step(), 1);
    for (std::size_t i = 0; i < options_.cuts; ++i) events.emplace(any_step(), 2);
    for (std::size_t i = 0; i < options_.chains; ++i) events.emplace(any_step(), 3);
    for (int i = 0; i < options_.steps && !failed(); ++i) {
      for (auto [at, last] = events.equal_range(i); at != last; ++at) {
        const std::size_t w = pick(lives());
        if (at->second == 0 && alive(w)) kill(w);
        if (at->second == 1 && !alive(w)) restart(w);
        if (at->second == 2) lose_link(w, pick(lives()));
        if (at->second == 3) lend_and_die();
      }
      act(i > options_.steps * 3 / 4);
    }
    if (!failed()) come_to_rest();
    if (!failed()) check_rest();
  }

  void act(bool winding_down) {
    const std::size_t w = pick(lives());
    const std::size_t other = pick(lives());
    const bool has_one = alive(w) && !handles_[w].empty();
    const int what = pick(winding_down ? 8 : 11);
    if (what <= 1 && !frames_.empty()) deliver_any_frame();
    if (what == 2 && alive(w) && alive(other)) flush(w, other);
    if (what == 3 && !messages_.empty()) deliver(pick(messages_.size()));
    if (what == 4 && !tasks_.empty()) finish(pick(tasks_.size()));
    if (what == 5 && has_one) drop_handle(w, pick(handles_[w].size()));
    if (what == 6 && !tasks_.empty()) work_on(pick(tasks_.size()));
    if (what == 7) {
      tell_of_death();
      tell_of_a_new_life();
      if (alive(w) && chance(0.5)) carry_out(w, lives_[w]->register_kept());
    }
    if ((what == 8 || what == 9) && has_one) send(w, handles_[w], Kind::call, other);
    if (what < 10) return;
    if (chance(0.05)) {
      make_object();
    } else if (chance(0.05)) {
      start_creation();
    } else if (has_one) {
      keep_copy(w, RRefId(handles_[w][pick(handles_[w].size())]));
    }
  }
  void make_object() {
    const std::size_t w = pick(lives());
    if (!alive(w)) return;
    Object& object = *objects_.emplace_back(std::make_unique<Object>());
    object.owner = w;
    object.made = true;
    object.id = lives_[w]->add_object(std::make_shared<Probe>(this, &object));
    object_of_[object.id] = &object;
    handles_[w].push_back(object.id);
  }
  void start_creation() {
    const std::size_t w = pick(lives());
    const std::size_t owner = pick(lives());
    if (w == owner || !alive(w) || !alive(owner) || cut(owner, w) || !knows(w, owner) ||
        lives_[w]->over(life(owner)))
      return;
    Object& object = *objects_.emplace_back(std::make_unique<Object>());
    object.owner = owner;
    object.id = lives_[w]->begin_create(life(owner));
    object_of_[object.id] = &object;
    handles_[w].push_back(object.id);
    Message message{Kind::create, w, owner, {}, object.id, false};
    const RRefId also = handles_[w][pick(handles_[w].size())];
    if (chance(0.3) && also != object.id)
      message.carried.push_back(lives_[w]->pin(also, life(owner)));
    ++waiting_[w];
    carry_out(
        w, lives_[w]->when_created(
               object.id, [this, w](const auto&, const std::optional<Error>&) { --waiting_[w]; }));
    if (chance(0.1)) {  // the request cannot be sent, but others may hear of the object
      if (chance(0.5)) send(w, {object.id}, Kind::call, pick(lives()));
      for (const CarriedRef& carried : message.carried)
        carry_out(w, lives_[w]->unpin(carried, life(owner)));
      carry_out(w, lives_[w]->create_not_sent(object.id, Error(ErrorCode::overloaded, "no room")));
      return;
    }
    messages_.push_back(std::move(message));
  }
  void send(std::size_t from, const std::vector<RRefId>& from_handles, Kind kind, std::size_t to) {
    if (!alive(to) || cut(to, from) || !knows(from, to) || lives_[from]->over(life(to))) return;
    std::set<RRefId> ids;
    for (std::size_t i = 0; i < 1 + pick(std::size_t{2}); ++i)
      ids.insert(from_handles[pick(from_handles.size())]);
    Message message{kind, from, to, {}, {}, false};
    for (const RRefId& id : ids) message.carried.push_back(lives_[from]->pin(id, life(to)));
    if (chance(0.05)) {  // it is certainly not sent
      for (const CarriedRef& carried : message.carried)
        carry_out(from, lives_[from]->unpin(carried, life(to)));
      return;
    }
    messages_.push_back(std::move(message));
  }
  void deliver(std::size_t index) {
    // The connection of a worker that is not known yet waits.
    if (!knows(messages_[index].to, messages_[index].from)) return;
    Message message = messages_.take(index);
    const std::size_t at = message.to;
    if (!alive(at) || cut(message.from, at)) return;
    // It is being read while its sender is declared dead: what it carries is not accepted.
    if (lives_[at]->over(life(message.from))) message.kind = Kind::call;
    for (CarriedRef& carried : message.carried) {
      if (!knows(at, number_of(carried.id.owner))) carried.lost = true;
    }
    note("a message of worker ", message.from, " is read by ", at);
    tasks_.push_back({message, {}});  // from here on its objects are in use there
    for (const CarriedRef& carried : message.carried)
      carry_out(at, lives_[at]->receive(
                        carried, life(message.from),
                        carried.lost ? std::optional(Error(ErrorCode::disconnected, "not known"))
                                     : std::nullopt));
    if (message.kind == Kind::create && !lives_[at]->create(message.creation, life(message.from)))
      fail("a creation ran twice");
    if (message.kind == Kind::created) {
      carry_out(at, lives_[at]->answered(message.creation, no_luck(message.failed)));
    }
  }
  static std::optional<Error> no_luck(bool failed) {
    if (!failed) return std::nullopt;
    return Error(ErrorCode::remote_exception, "no luck");
  }
  void keep_copy(std::size_t worker, const RRefId& id) {
    lives_[worker]->add_local(id);
    handles_[worker].push_back(id);
  }
  [[nodiscard]] bool has(const std::vector<RRefId>& handles, const RRefId& id) const {
    return std::find(handles.begin(), handles.end(), id) != handles.end();
  }
  void work_on(std::size_t index) {
    Task& task = tasks_[index];
    const std::size_t at = task.message.to;
    if (task.message.carried.empty()) return;
    const RRefId id = task.message.carried[pick(task.message.carried.size())].id;
    switch (pick(4)) {
      case 0:  // the handler's own copy
        lives_[at]->add_local(id);
        task.handles.push_back(id);
        return;
      case 1:  // it stores one
        if (!task.handles.empty() && handles_[at].size() < 20) keep_copy(at, id);
        return;
      case 2:  // it uses the object at its owner, after the creation
        if (id.owner == life(at) && lives_[at]->owned(id)) {
          ++waiting_[at];
          lives_[at]->add_local(id);
          carry_out(at, lives_[at]->when_created(
                            id, [this, at, id](const auto&, const std::optional<Error>&) {
                              --waiting_[at];
                              carry_out(at, lives_[at]->drop_local(id));
                            }));
        }
        return;
      default:
        if (!task.handles.empty()) send(at, task.handles, Kind::call, pick(lives()));
    }
  }
  void finish(std::size_t index) {
    Task task = tasks_.take(index);
    const std::size_t at = task.message.to;
    if (!alive(at)) return;
    if (task.message.kind == Kind::call && !task.handles.empty() && chance(0.5))
      send(at, task.handles, Kind::reply, task.message.from);
    for (const RRefId& id : std::exchange(task.handles, {}))
      carry_out(at, lives_[at]->drop_local(id));
    if (task.message.kind == Kind::create) {
      const bool failed = chance(0.2);
      Object& object = *object_of_.at(task.message.creation);
      object.made = !failed;
      auto made = failed ? nullptr : std::make_shared<Probe>(this, &object);
      carry_out(at, lives_[at]->resolve(object.id, std::move(made), no_luck(failed)));
      messages_.push_back({Kind::created, at, task.message.from, {}, object.id, failed});
    }
    for (const CarriedRef& carried : task.message.carried)
      carry_out(at, lives_[at]->message_done(carried.id, life(task.message.from)));
  }
  void deliver_any_frame() {
    const Frame& any = frames_[pick(frames_.size())];
    static_cast<void>(deliver_frame(any.from, any.to));
  }
  // The next frame between these two; false if there is none. What the dead sent may be lost from
  // some frame on.
  bool deliver_frame(std::size_t from, std::size_t to) {
    const auto between = [&](const Frame& each) { return each.from == from && each.to == to; };
    const auto next = std::find_if(frames_.begin(), frames_.end(), between);
    if (next == frames_.end() || !knows(to, from)) return false;
    if (!alive(to) || (!alive(from) && chance(0.1))) {
      std::erase_if(frames_, between);
      return false;
    }
    const Frame frame = std::move(*next);
    frames_.erase(next);
    // Of one that is lost there: it may have been read before, and be handled now.
    if (!cut(from, to) || chance(0.3))
      carry_out(to, lives_[to]->accept_ledger(life(from), frame.bytes.span()));
    return true;
  }
  void flush(std::size_t from, std::size_t to) {
    if (!knows(from, to)) return;
    Frame frame{from, to, {}};
    if (!lives_[from]->encode_ledger(life(to), frame.bytes)) return;
    for (const LedgerOp& op : Ledger::decode(frame.bytes.span())) {
      // G3, but for workers that the owner did not know.
      if (op.kind == LedgerOp::Kind::gone && !unknown_ && object_of_.at(op.id)->destroyed > 0)
        fail("a registration of ", op.id, " has met a deleted object");
    }
    frames_.push_back(std::move(frame));
  }
  void drop_handle(std::size_t worker, std::size_t index) {
    const RRefId id = handles_[worker][index];
    note("worker ", worker, " drops ", id);
    handles_[worker].erase(handles_[worker].begin() + static_cast<std::ptrdiff_t>(index));
    carry_out(worker, lives_[worker]->drop_local(id));
  }
  void kill(std::size_t victim) {
    note("worker ", victim, " dies");
    dead_.push_back(victim);
    handles_[victim].clear();
    std::erase_if(tasks_, [&](const Task& task) { return task.message.to == victim; });
    // Its messages may still arrive at workers that do not know of its death.
    std::unique_ptr<Lifetime> life = std::move(lives_[victim]);
    for (auto& object : objects_) {
      if (object->owner == victim) object->destroyed = 1;  // nothing is guaranteed about these
    }
    unchecked_ = true;
    (void)life->close();
    life.reset();
    unchecked_ = false;
  }

  // A reference goes from worker to worker, each of which may drop it then, and workers on its way
  // die: what is left lives on a chain of loans of the dead. Random walks alone seldom meet this.
  void lend_and_die() {
    std::size_t at = pick(lives());
    if (!alive(at) || handles_[at].empty()) return;
    const RRefId id = handles_[at][pick(handles_[at].size())];
    std::vector<std::size_t> way = {at};
    for (std::size_t hops = 2 + pick(std::size_t{2}); hops > 0; --hops) {
      const std::size_t to = pick(lives());
      const std::size_t before = messages_.size();
      if (to == at || !usable(at, id)) return;
      send(at, {id}, Kind::call, to);
      if (messages_.size() == before || !knows(to, at)) return;
      deliver(messages_.size() - 1);
      keep_copy(to, id);
      if (chance(0.7)) {
        while (!tasks_.empty() && tasks_.back().message.to == to) finish(tasks_.size() - 1);
      }
      for (std::size_t i = handles_[at].size(); i-- > 0 && chance(0.8);) {
        if (handles_[at][i] == id) drop_handle(at, i);
      }
      if (!has(handles_[to], id)) return;
      way.push_back(at = to);
    }
    way.pop_back();  // the last one has it
    std::shuffle(way.begin(), way.end(), random_);
    std::vector<std::size_t> victims;
    for (const std::size_t w : way) {
      if (!alive(w) || chance(0.4)) continue;
      if (options_.cuts > 0 && chance(0.5)) {
        lose_link(w, number_of(id.owner));
        continue;
      }
      kill(w);
      victims.push_back(w);
      const std::size_t witness = chance(0.5) ? number_of(id.owner) : pick(lives());
      for (int news = 0; news < 2; ++news) {
        if (alive(witness) && chance(0.8)) tell(witness, w);
      }
    }
    std::shuffle(victims.begin(), victims.end(), random_);
    for (const std::size_t w : victims) {  // the owner acts, often before others have heard
      if (!alive(number_of(id.owner)) || chance(0.3)) continue;
      tell(number_of(id.owner), w);
      if (chance(0.5)) talk(number_of(id.owner));
    }
  }
  // All frames between this worker and others arrive, and what they are answered with.
  void talk(std::size_t worker) {
    for (std::size_t w = 0; w < lives(); ++w) {
      if (!alive(w) || w == worker) continue;
      flush(worker, w);
      while (deliver_frame(worker, w)) {
      }
      flush(w, worker);
      while (deliver_frame(w, worker)) {
      }
    }
  }
  // Its worker is alive again, under the same id. Others have heard of the death before.
  void restart(std::size_t dead) {
    const WorkerLife& last = *std::max_element(
        names_.begin(), names_.end(), [&](const WorkerLife& a, const WorkerLife& b) {
          return (a.id == life(dead).id ? a.epoch : 0) < (b.id == life(dead).id ? b.epoch : 0);
        });
    if (alive(number_of(last))) return;
    for (std::size_t w = 0; w < lives(); ++w) {
      if (!alive(w)) continue;
      tell(w, number_of(last));
      tell(w, number_of(last));
    }
    declared_.insert(number_of(last));
    const std::size_t number = lives();
    note("worker ", number, " is the next life of ", number_of(last));
    add_life({last.id, last.epoch + 10});
    for (const std::size_t over : declared_) {  // none of these is a member when it joins
      lost_.insert({number, over});
      heard_.insert({number, over});
      const bool followed = std::any_of(names_.begin(), names_.end(), [&](const WorkerLife& each) {
        return each.id == life(over).id && each.epoch > life(over).epoch;
      });
      if (followed) passed_.insert({number, over});
    }
    for (const std::size_t over : declared_) {  // its sponsor tells it of the last life of each
      if (!passed_.contains({number, over}))
        carry_out(number, lives_[number]->member_over(
                              life(over), Error(ErrorCode::disconnected, "worker died")));
    }
    for (std::size_t w = 0; w < number; ++w) {
      if (!alive(w)) continue;
      if (options_.late_news && chance(0.4)) {
        unheard_.insert({w, number});
        unknown_ = true;
      } else {
        carry_out(w, lives_[w]->member_joined(life(number)));
      }
    }
  }
  void lose_link(std::size_t a, std::size_t b) {
    if (a == b || !alive(a) || !alive(b)) return;
    losses_ = true;
    note("workers ", a, " and ", b, " lose each other");
    const Error why(ErrorCode::disconnected, "the link is lost");
    lost_.insert({a, b});
    lost_.insert({b, a});
    carry_out(a, lives_[a]->peer_lost(life(b), why));
    carry_out(b, lives_[b]->peer_lost(life(a), why));
  }
  void tell_of_death() {
    for (const std::size_t victim : dead_) {
      const std::size_t w = pick(lives());
      if (alive(w)) tell(w, victim);
    }
  }
  void tell_of_a_new_life() {
    if (unheard_.empty()) return;
    const auto news =
        std::next(unheard_.begin(), static_cast<std::ptrdiff_t>(pick(unheard_.size())));
    const auto [worker, life_number] = *news;
    unheard_.erase(news);
    if (alive(worker)) carry_out(worker, lives_[worker]->member_joined(life(life_number)));
  }
  // The next piece of news of a death: first the loss of the link, then the verdict.
  void tell(std::size_t worker, std::size_t victim) {
    if (unheard_.erase({worker, victim}))
      carry_out(worker, lives_[worker]->member_joined(life(victim)));
    const Error why(ErrorCode::disconnected, "worker died");
    if (lost_.insert({worker, victim}).second) {
      carry_out(worker, lives_[worker]->peer_lost(life(victim), why));
    } else if (heard_.insert({worker, victim}).second) {
      declared_.insert(victim);
      carry_out(worker, lives_[worker]->member_over(life(victim), why));
    }
  }
  void come_to_rest() {
    while (!unheard_.empty()) tell_of_a_new_life();
    for (int round = 0; round < 60; ++round) {
      for (std::size_t i = 0; i < lives(); ++i) tell_of_death();
      while (!messages_.empty()) deliver(messages_.size() - 1);
      while (!tasks_.empty()) finish(tasks_.size() - 1);
      for (std::size_t w = 0; w < lives(); ++w) {
        while (alive(w) && !handles_[w].empty()) drop_handle(w, 0);
        if (alive(w)) carry_out(w, lives_[w]->register_kept());
      }
      for (std::size_t a = 0; a < lives(); ++a) {
        for (std::size_t b = 0; b < lives(); ++b) {
          if (alive(a) && alive(b)) flush(a, b);
        }
      }
      while (!frames_.empty()) deliver_any_frame();
    }
  }
  void check_rest() {
    for (const auto& object : objects_) {
      const bool expected = object->made && !losses_;
      if (expected && object->destroyed != 1)
        fail(object->id, " was destroyed ", object->destroyed, " times");
      if (object->destroyed > 1) fail(object->id, " was destroyed twice");
    }
    for (std::size_t w = 0; w < lives(); ++w) {
      if (!alive(w)) continue;
      if (waiting_[w] != 0)
        fail("at rest, worker ", w, " has ", waiting_[w], " waiters not called");
      const Lifetime::Counts counts = lives_[w]->counts();
      const std::string who = "at rest, worker " + std::to_string(w) + " ";
      if (counts.ledger_unsent != 0) fail(who, "has ", counts.ledger_unsent, " unsent operations");
      if (losses_) {  // what a worker cannot be told stays; nothing waits for it
        if (counts.held.in(HolderTable::State::creating) +
                counts.held.in(HolderTable::State::registering) >
            0)
          fail(who, "still waits for an answer");
        continue;
      }
      if (counts.entries != 0) fail(who, "owns ", counts.entries, " entries");
      if (counts.holds != 0) fail(who, "has ", counts.holds, " holds");
      if (counts.tokens != 0) fail(who, "has ", counts.tokens, " tokens");
    }
  }
  void carry_out(std::size_t worker, Effects effects) {
    if (effects.broken) fail("worker ", worker, " says: ", effects.broken->what());
    for (Effects::Run& waiter : effects.run) waiter();
    effects.destroy.clear();
    if (!effects.flush || !alive(worker)) return;
    for (const WorkerLife& peer : lives_[worker]->due()) {
      if (chance(0.6)) flush(worker, number_of(peer));
    }
  }
  void on_destroyed(Object& object) {
    if (failed() || unchecked_) return;
    note(object.id, " is destroyed");
    if (++object.destroyed > 1) fail(object.id, " was destroyed twice");
    // What only a worker that the owner did not know depends on is given up.
    std::string where;
    if (!unknown_ && in_use(object.id, where))
      fail(object.id, " was destroyed while in use: ", where);
  }
  bool in_use(const RRefId& id, std::string& where) const {
    const auto carries = [&](const Message& message) {
      return std::any_of(message.carried.begin(), message.carried.end(),
                         [&](const CarriedRef& c) { return c.id == id && !c.lost; });
    };
    for (std::size_t w = 0; w < lives(); ++w) {
      if (alive(w) && usable(w, id) && has(handles_[w], id))
        where = "a handle at worker " + std::to_string(w);
    }
    for (const Task& task : tasks_) {
      if (usable(task.message.to, id) && (carries(task.message) || has(task.handles, id)))
        where = "a message being handled at worker " + std::to_string(task.message.to);
    }
    for (const Message& message : messages_) {
      if (carries(message) && alive(message.to) && !cut(message.from, message.to) &&
          !lives_[message.to]->over(life(message.from)) && usable(message.to, id)) {
        where = "a message on its way to worker " + std::to_string(message.to);
      }
    }
    return !where.empty();
  }
  // After a death or the loss of a link, a reference that is lost there keeps nothing alive. Before
  // that, none may be lost.
  bool usable(std::size_t worker, const RRefId& id) const {
    return (dead_.empty() && !losses_) || !lives_[worker]->lost(id);
  }
  [[nodiscard]] bool alive(std::size_t worker) const { return lives_[worker] != nullptr; }
  [[nodiscard]] const WorkerLife& life(std::size_t worker) const { return names_[worker]; }
  [[nodiscard]] std::size_t lives() const { return lives_.size(); }
  // Messages from a worker that this one has lost are not accepted.
  [[nodiscard]] bool cut(std::size_t from, std::size_t at) const {
    return lost_.contains({at, from});
  }
  [[nodiscard]] bool knows(std::size_t worker, std::size_t other) const {
    return !unheard_.contains({worker, other});
  }
  const Options options_;
  std::vector<WorkerLife> names_;
  std::vector<std::unique_ptr<Lifetime>> lives_;  // null: dead
  std::vector<std::vector<RRefId>> handles_;      // per worker
  simulation::Channel<Message> messages_;
  simulation::Channel<Task> tasks_;
  std::vector<Frame> frames_;  // in order between any two workers
  std::vector<std::unique_ptr<Object>> objects_;
  std::map<RRefId, Object*> object_of_;
  std::set<std::pair<std::size_t, std::size_t>> unheard_;  // (worker, new life it does not know)
  bool unknown_ = false;                                   // there have been such
  std::set<std::pair<std::size_t, std::size_t>> lost_;     // (worker, worker it has lost)
  std::set<std::pair<std::size_t, std::size_t>> heard_;    // (worker, dead worker it knows of)
  // (worker, life that was over and followed by another before it joined): it never hears of it.
  std::set<std::pair<std::size_t, std::size_t>> passed_;
  std::vector<std::size_t> dead_;
  std::set<std::size_t> declared_;  // the dead of whose death some worker has heard
  bool losses_ = false;             // living workers have lost each other
  bool unchecked_ = false;          // what is destroyed now
  std::vector<int> waiting_;        // per worker: waiters not yet called
};

}  // namespace

simulation::Outcome run(std::uint64_t number, const Options& options) {
  return World(number, options).run();
}

}  // namespace stitch::rref::lifetime_simulation
