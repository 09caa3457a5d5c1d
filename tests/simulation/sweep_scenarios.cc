#include "tests/simulation/sweep_scenarios.h"

#include <memory>
#include <optional>
#include <utility>

#include "stitch/rref/lifetime/lifetime.h"

namespace stitch::rref::sweep_scenarios {
namespace {

// Four workers and one object of the first, for scenarios that random walks seldom meet. Messages
// arrive when said so; ledgers when exchange() is called. failure() is the first violation.
class Quartet {
 public:
  // `last`: the life of the last worker. `created_by`: the worker that creates the object, not the
  // owner; its request arrives when creation_arrives() says so.
  explicit Quartet(WorkerLife last = {3, 1}, std::size_t created_by = 0)
      : names_{{0, 1}, {1, 1}, {2, 1}, last} {
    for (const WorkerLife& name : names_) {
      const bool owner = lives_.empty();
      lives_.push_back(std::make_unique<Lifetime>(name));
      Lifetime::World world;
      world.live = [this, owner] { return known(owner); };
      if (owner) {
        world.contains = [this](const WorkerLife& asked) {
          return !hidden_ || asked != life(*hidden_);
        };
      }
      lives_.back()->set_world(std::move(world));
    }
    if (created_by != 0) {
      id_ = lives_[created_by]->begin_create(life(0));
      return;
    }
    auto object = std::make_shared<int>(1);
    object_ = object;
    id_ = lives_[0]->add_object(std::move(object));
  }
  ~Quartet() {
    for (auto& each : lives_) static_cast<void>(each->close());
  }
  Quartet(const Quartet&) = delete;
  Quartet& operator=(const Quartet&) = delete;

  void creation_arrives() {
    expect(lives_[0]->create(id_, id_.creator), "it was created before");
    auto object = std::make_shared<int>(1);
    object_ = object;
    carry_out(lives_[0]->resolve(id_, std::move(object), std::nullopt));
  }
  void answer_creation(std::size_t creator) {
    carry_out(lives_[creator]->answered(id_, std::nullopt));
  }
  // `from` sends the reference; it arrives and stays in use there.
  void lend(std::size_t from, std::size_t to) { arrive(send(from, to), from, to); }
  [[nodiscard]] CarriedRef send(std::size_t from, std::size_t to) {
    return lives_[from]->pin(id_, life(to));
  }
  void arrive(const CarriedRef& carried, std::size_t from, std::size_t to) {
    carry_out(lives_[to]->receive(carried, life(from)));
  }
  // The message that brought the reference to `worker` is done with; nothing else uses it there.
  void drop(std::size_t worker, std::size_t lender) {
    carry_out(lives_[worker]->message_done(id_, life(lender)));
  }
  // The reference at `worker`, brought by `lender`, is registered.
  void keep(std::size_t worker, std::size_t lender) {
    lives_[worker]->add_local(id_);
    carry_out(lives_[worker]->message_done(id_, life(lender)));
    carry_out(lives_[worker]->register_kept());
    carry_out(lives_[worker]->register_kept());
  }
  void die(std::size_t worker) { carry_out(lives_[worker]->close()); }
  void hears_of_the_death(std::size_t worker, std::size_t dead) {
    const Error why(ErrorCode::disconnected, "worker died");
    carry_out(lives_[worker]->peer_lost(life(dead), why));
    carry_out(lives_[worker]->member_over(life(dead), why));
  }
  void lose_each_other(std::size_t a, std::size_t b) {
    const Error why(ErrorCode::disconnected, "the link is lost");
    carry_out(lives_[a]->peer_lost(life(b), why));
    carry_out(lives_[b]->peer_lost(life(a), why));
  }
  void exchange(std::size_t a, std::size_t b) {
    for (int i = 0; i < 4; ++i) {
      flush(a, b);
      flush(b, a);
    }
  }
  // The owner has not heard that this worker is a member, until joins_at_owner().
  void hide_from_owner(std::size_t worker) { hidden_ = worker; }
  void joins_at_owner(std::size_t worker) {
    hidden_.reset();
    carry_out(lives_[0]->member_joined(life(worker)));
  }
  // A life of that worker after the one that plays here.
  void next_life_joins_at_owner(std::size_t worker) {
    carry_out(lives_[0]->member_joined({life(worker).id, life(worker).epoch + 1}));
  }
  // `liar`, which sends the owner nothing else, asks it to sweep `about`.
  void claims_the_end(std::size_t liar, std::size_t about) {
    liars_ledger_.push(LedgerOp::make_sweep(life(about)));
    base::Bytes frame;
    expect(liars_ledger_.encode(frame), "nothing was claimed");
    carry_out(lives_[0]->accept_ledger(life(liar), frame.span()));
  }
  // Whether the owner has said CLEAN to that since this was asked last.
  [[nodiscard]] bool is_answered(std::size_t liar, std::size_t about) {
    base::Bytes frame;
    if (!lives_[0]->encode_ledger(life(liar), frame)) return false;
    for (const LedgerOp& op : Ledger::decode(frame.span())) {
      if (op.kind == LedgerOp::Kind::clean && op.life == life(about)) return true;
    }
    return false;
  }
  [[nodiscard]] bool over_at_owner(std::size_t worker) const {
    return lives_[0]->over(life(worker));
  }
  // The owner, or a worker that keeps a reference, drops it.
  void release(std::size_t worker) { carry_out(lives_[worker]->drop_local(id_)); }
  // 1 holds the object; the owner's own reference is gone.
  void move_to_1() {
    lend(0, 1);
    keep(1, 0);
    exchange(0, 1);
    release(0);
  }
  // 1 holds the object and lends it to 2, which lends it to 3; the owner's own reference is gone.
  void lend_down_a_chain() {
    move_to_1();
    lend(1, 2);
    lend(2, 3);
  }
  // 3 had it: once the owner has heard from there, there is no object.
  void after_the_last_reference() {
    exchange(0, 3);
    expect(destroyed(), "not destroyed after the last reference is gone");
  }
  [[nodiscard]] bool destroyed() const { return object_.expired(); }
  [[nodiscard]] bool lost_at(std::size_t worker) const { return lives_[worker]->lost(id_); }
  void expect(bool fulfilled, const std::string& what) {
    if (!fulfilled && failure_.empty()) failure_ = what;
  }
  [[nodiscard]] const std::string& failure() const { return failure_; }

 private:
  [[nodiscard]] std::vector<WorkerLife> known(bool to_owner) const {
    std::vector<WorkerLife> known = names_;
    if (to_owner && hidden_) std::erase(known, life(*hidden_));
    return known;
  }
  void carry_out(Effects effects) {
    if (effects.broken) expect(false, effects.broken->what());
  }
  void flush(std::size_t from, std::size_t to) {
    base::Bytes frame;
    if (lives_[from]->encode_ledger(life(to), frame))
      carry_out(lives_[to]->accept_ledger(life(from), frame.span()));
  }
  [[nodiscard]] const WorkerLife& life(std::size_t worker) const { return names_[worker]; }

  std::vector<WorkerLife> names_;
  std::vector<std::unique_ptr<Lifetime>> lives_;
  std::optional<std::size_t> hidden_;
  Ledger liars_ledger_;
  std::weak_ptr<void> object_;
  RRefId id_;
  std::string failure_;
};

// The owner's object is held by 1, which lent it to 2, which lent it to 3. 1 and 2 die; 3 has
// answered for 1 before any other hears of the death of 2.
std::string two_workers_of_a_chain_die() {
  Quartet world;
  world.lend_down_a_chain();
  world.die(1);
  world.die(2);
  world.hears_of_the_death(0, 1);
  world.exchange(0, 3);
  world.expect(!world.destroyed(), "destroyed before 2 has answered");
  world.hears_of_the_death(0, 2);
  world.expect(!world.destroyed(), "destroyed though 3 borrows from 2");
  world.exchange(0, 3);
  world.expect(!world.destroyed(), "destroyed though 3 has registered");
  world.drop(3, 2);
  world.after_the_last_reference();
  return world.failure();
}

// 1 holds the owner's object and lent it to 2, which lent it to 3 and drops its own reference. Then
// 2 and the owner lose each other, and 1 drops its reference: 3 lives on the loan of 2.
std::string a_lender_loses_the_owner() {
  Quartet world;
  world.lend_down_a_chain();
  world.lose_each_other(0, 2);
  world.drop(2, 1);
  world.exchange(1, 2);
  world.release(1);
  world.exchange(0, 1);
  world.expect(!world.destroyed(), "destroyed though 3 borrows from 2");
  world.keep(3, 2);
  world.exchange(0, 3);
  world.exchange(3, 2);
  world.exchange(2, 1);
  world.exchange(1, 0);
  world.expect(!world.destroyed(), "destroyed though 3 has registered");
  world.release(3);
  world.after_the_last_reference();
  return world.failure();
}

// 1 creates an object and lends it to 2, which lends it to 3 and dies while the request to create
// it is on its way: nothing is lent then, as far as the owner knows. When 1 dies, too, 3 lives on
// the loans of both.
std::string a_borrower_dies_before_the_creation() {
  Quartet world({3, 1}, 1);
  world.lend(1, 2);
  world.lend(2, 3);
  world.die(2);
  world.hears_of_the_death(0, 2);
  world.creation_arrives();
  world.die(1);
  world.hears_of_the_death(0, 1);
  world.exchange(0, 3);
  world.expect(!world.destroyed(), "destroyed though 3 borrows from 2");
  world.drop(3, 2);
  world.after_the_last_reference();
  return world.failure();
}

// A message of 1 is read by 2 before the death of 1 is declared, and handled after it is swept.
std::string a_message_of_the_dead_arrives_late() {
  Quartet world;
  world.lend(0, 1);
  const CarriedRef late = world.send(1, 2);
  world.release(0);
  world.die(1);
  world.hears_of_the_death(0, 1);
  world.exchange(0, 3);
  world.expect(!world.destroyed(), "destroyed before 2 has answered");
  world.exchange(0, 2);
  world.expect(world.destroyed(), "not destroyed after the only holder is dead");
  world.arrive(late, 1, 2);
  world.expect(world.lost_at(2), "a reference of the dead can be used");
  world.keep(2, 1);
  world.exchange(0, 2);
  return world.failure();
}

// 1 dies and comes back: what its new life holds stays when the old one is swept.
std::string an_earlier_life_is_swept() {
  Quartet world({1, 11});
  world.lend(0, 3);
  world.keep(3, 0);
  world.exchange(0, 3);
  world.lend(0, 1);
  world.release(0);
  world.die(1);
  world.hears_of_the_death(0, 1);
  world.exchange(0, 2);
  world.exchange(0, 3);
  world.expect(!world.destroyed(), "destroyed though a later life holds it");
  world.release(3);
  world.after_the_last_reference();
  return world.failure();
}

// 2 has taken in 3 and could not tell the owner, which it has lost. 1 lends to 3, then 1 and 2 die:
// the sweep ends without 3, which registers when the owner has heard of it.
std::string a_borrower_is_unknown_to_the_owner() {
  Quartet world;
  world.hide_from_owner(3);
  world.move_to_1();
  world.lose_each_other(0, 2);
  world.lend(1, 3);
  world.die(1);
  world.die(2);
  world.hears_of_the_death(0, 1);
  world.expect(!world.destroyed(), "destroyed before the end of 2");
  world.hears_of_the_death(0, 2);
  world.expect(world.destroyed(), "not destroyed after all known holders are dead");
  world.joins_at_owner(3);
  world.keep(3, 1);
  world.exchange(0, 3);
  world.expect(world.lost_at(3), "a reference to a destroyed object can be used");
  world.release(3);
  world.exchange(0, 3);
  return world.failure();
}

// The same, and 3 lends on to 2, which the owner knows and has asked.
std::string a_borrower_of_one_unknown_to_the_owner() {
  Quartet world;
  world.hide_from_owner(3);
  world.move_to_1();
  world.lend(1, 3);
  world.lend(3, 2);
  world.die(1);
  world.hears_of_the_death(0, 1);
  world.exchange(0, 2);
  world.expect(world.destroyed(), "not destroyed after all known holders are dead");
  world.keep(2, 3);
  world.exchange(0, 2);
  world.expect(world.lost_at(2), "a reference to a destroyed object can be used");
  return world.failure();
}

// 3 has joined through one that has lost the owner. It creates an object there, lends it to 2 and
// drops its own reference; 2 registers before the owner has heard of 3.
std::string a_creator_is_unknown_to_the_owner() {
  Quartet world({3, 1}, 3);
  world.hide_from_owner(3);
  world.lend(3, 2);
  world.keep(2, 3);
  world.exchange(0, 2);
  world.exchange(2, 3);
  world.expect(!world.lost_at(2), "a reference is lost that is only early");
  world.joins_at_owner(3);
  world.creation_arrives();
  world.expect(!world.destroyed(), "destroyed though 2 holds it");
  world.answer_creation(3);
  world.release(3);
  world.exchange(0, 3);
  world.expect(!world.destroyed(), "destroyed though 2 holds it");
  world.release(2);
  world.exchange(0, 2);
  world.expect(world.destroyed(), "not destroyed after the last reference is gone");
  return world.failure();
}

// 1 lies about the next life of 2, which joins then. The answer waits for its end.
std::string a_life_is_said_to_be_over_before_it_joins() {
  Quartet world({2, 2});
  world.hide_from_owner(3);
  world.claims_the_end(1, 3);
  world.joins_at_owner(3);
  world.expect(!world.over_at_owner(3), "a life is over at the word of a peer");
  if (!world.failure().empty()) return world.failure();
  world.expect(!world.is_answered(1, 3), "answered before the end");
  world.lend(0, 3);
  world.keep(3, 0);
  world.exchange(0, 3);
  world.release(0);
  world.expect(!world.destroyed(), "destroyed though a life that was lied about holds it");
  world.die(3);
  world.hears_of_the_death(0, 3);
  world.expect(world.is_answered(1, 3), "not answered after the end");
  return world.failure();
}

// 1 asks about a life of 2 that ends before the owner has heard of it.
std::string a_life_that_never_joins_is_asked_about() {
  Quartet world({2, 2});
  world.hide_from_owner(3);
  world.claims_the_end(1, 3);
  world.expect(!world.is_answered(1, 3), "answered before there is news");
  world.next_life_joins_at_owner(3);
  world.expect(world.is_answered(1, 3), "not answered though a later life is known");
  world.expect(!world.over_at_owner(3), "a life that was never known here is remembered");
  return world.failure();
}

}  // namespace

const std::vector<Scenario>& all() {
  static const std::vector<Scenario> all = {two_workers_of_a_chain_die,
                                            a_lender_loses_the_owner,
                                            a_borrower_dies_before_the_creation,
                                            a_message_of_the_dead_arrives_late,
                                            an_earlier_life_is_swept,
                                            a_borrower_is_unknown_to_the_owner,
                                            a_borrower_of_one_unknown_to_the_owner,
                                            a_creator_is_unknown_to_the_owner,
                                            a_life_is_said_to_be_over_before_it_joins,
                                            a_life_that_never_joins_is_asked_about};
  return all;
}

}  // namespace stitch::rref::sweep_scenarios
