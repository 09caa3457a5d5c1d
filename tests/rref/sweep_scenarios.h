#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/rref/lifetime/lifetime.h"

namespace stitch::rref::test {

// Four workers and one object of the first, for scenarios that random walks seldom meet. Messages
// arrive when said so; ledgers when exchange() is called. failure() is the first violation.
class Quartet {
 public:
  // `last`: the life of the last worker. `created_by`: the worker that creates the object, not the
  // owner; its request arrives when creation_arrives() says so.
  explicit Quartet(WorkerLife last = {3, 1}, std::size_t created_by = 0);
  ~Quartet();
  Quartet(const Quartet&) = delete;
  Quartet& operator=(const Quartet&) = delete;

  void creation_arrives();
  void answer_creation(std::size_t creator);
  // `from` sends the reference; it arrives and stays in use there.
  void lend(std::size_t from, std::size_t to) { arrive(send(from, to), from, to); }
  [[nodiscard]] CarriedRef send(std::size_t from, std::size_t to);
  void arrive(const CarriedRef& carried, std::size_t from, std::size_t to);
  // The message that brought the reference to `worker` is done with; nothing else uses it there.
  void drop(std::size_t worker, std::size_t lender);
  // The reference at `worker`, brought by `lender`, is registered.
  void keep(std::size_t worker, std::size_t lender);
  void die(std::size_t worker);
  void hears_of_the_death(std::size_t worker, std::size_t dead);
  void lose_each_other(std::size_t a, std::size_t b);
  void exchange(std::size_t a, std::size_t b);
  // The owner has not heard that this worker is a member, until joins_at_owner().
  void hide_from_owner(std::size_t worker) { hidden_ = worker; }
  void joins_at_owner(std::size_t worker);
  // A life of that worker after the one that plays here.
  void next_life_joins_at_owner(std::size_t worker);
  // `liar`, which sends the owner nothing else, asks it to sweep `about`.
  void claims_the_end(std::size_t liar, std::size_t about);
  // Whether the owner has said CLEAN to that since this was asked last.
  [[nodiscard]] bool is_answered(std::size_t liar, std::size_t about);
  [[nodiscard]] bool over_at_owner(std::size_t worker) const {
    return lives_[0]->over(life(worker));
  }
  // The owner, or a worker that keeps a reference, drops it.
  void release(std::size_t worker);
  // 1 holds the object; the owner's own reference is gone.
  void move_to_1();
  // 1 holds the object and lends it to 2, which lends it to 3; the owner's own reference is gone.
  void lend_down_a_chain();
  // 3 had it: once the owner has heard from there, there is no object.
  void after_the_last_reference();
  [[nodiscard]] bool destroyed() const { return object_.expired(); }
  [[nodiscard]] bool lost_at(std::size_t worker) const { return lives_[worker]->lost(id_); }
  void expect(bool fulfilled, const std::string& what) {
    if (!fulfilled && failure_.empty()) failure_ = what;
  }
  [[nodiscard]] const std::string& failure() const { return failure_; }

 private:
  [[nodiscard]] std::vector<WorkerLife> known(bool to_owner) const;
  void perform(Effects effects);
  void flush(std::size_t from, std::size_t to);
  [[nodiscard]] const WorkerLife& life(std::size_t worker) const { return names_[worker]; }

  std::vector<WorkerLife> names_;
  std::vector<std::unique_ptr<Lifetime>> lives_;
  std::optional<std::size_t> hidden_;
  Ledger liars_ledger_;
  std::weak_ptr<void> object_;
  RRefId id_;
  std::string failure_;
};

// Each returns its failure; empty if there is none.
[[nodiscard]] std::string two_workers_of_a_chain_die();
[[nodiscard]] std::string a_lender_loses_the_owner();
[[nodiscard]] std::string a_borrower_dies_before_the_creation();
[[nodiscard]] std::string a_message_of_the_dead_arrives_late();
[[nodiscard]] std::string an_earlier_life_is_swept();
[[nodiscard]] std::string a_borrower_is_unknown_to_the_owner();
[[nodiscard]] std::string a_borrower_of_one_unknown_to_the_owner();
[[nodiscard]] std::string a_creator_is_unknown_to_the_owner();
[[nodiscard]] std::string a_life_is_said_to_be_over_before_it_joins();
[[nodiscard]] std::string a_life_that_never_joins_is_asked_about();
using Scenario = std::string (*)();
[[nodiscard]] const std::vector<Scenario>& sweep_scenarios();

}  // namespace stitch::rref::test
