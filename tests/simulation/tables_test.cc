// The rules of the tables one by one; the simulation covers their combinations.

#include "stitch/rref/lifetime/holder_table.h"
#include "stitch/rref/lifetime/lifetime.h"
#include "stitch/rref/lifetime/owner_table.h"
#include "tests/support/plain_test.h"

namespace stitch::rref::tables_test {
namespace {

constexpr WorkerLife kOwner{0, 10}, kHere{1, 11}, kFriend{2, 12};
const RRefId kObject{kOwner, kFriend, 0};

std::size_t count(const TableEffects& effects, LedgerOp::Kind kind) {
  return static_cast<std::size_t>(
      std::count_if(effects.ops.begin(), effects.ops.end(),
                    [&](const TableEffects::Op& op) { return op.op.kind == kind; }));
}

TEST(HolderTable, WhatOutlivesItsMessageByAMomentIsNotRegistered) {
  HolderTable table;
  for (std::uint64_t token = 0; token < 5; ++token) {
    TableEffects effects;
    table.receive(kObject, {kFriend, token}, std::nullopt, effects);
    EXPECT_TRUE(table.pin(kObject)) << "the answer carries it back";
    table.message_done(kObject, effects);
    EXPECT_TRUE(effects.kept);
    table.register_kept(effects);
    table.unpin(kObject, effects);  // the answer is settled
    EXPECT_EQ(count(effects, LedgerOp::Kind::reg), 0u);
    EXPECT_EQ(count(effects, LedgerOp::Kind::settle), 1u);
    EXPECT_EQ(table.size(), 0u);
  }
  TableEffects effects;
  table.register_kept(effects);
  EXPECT_FALSE(effects.kept) << "nothing is kept any more";
}

TEST(HolderTable, AKeptBorrowThatArrivesAgainIsDecidedByItsLastMessage) {
  HolderTable table;
  TableEffects effects;
  table.receive(kObject, {kFriend, 4}, std::nullopt, effects);
  table.add_local(kObject);
  table.message_done(kObject, effects);
  table.receive(kObject, {kFriend, 5}, std::nullopt, effects);
  table.register_kept(effects);
  table.register_kept(effects);
  EXPECT_EQ(count(effects, LedgerOp::Kind::reg), 0u);
  table.message_done(kObject, effects);
  table.register_kept(effects);
  table.register_kept(effects);
  EXPECT_EQ(count(effects, LedgerOp::Kind::reg), 1u);
}

TEST(HolderTable, AReferenceThatCameBackKnowsNothingOfItsCreation) {
  HolderTable table;
  TableEffects effects;
  const RRefId mine{kOwner, kHere, 0};
  table.begin_create(mine);
  EXPECT_TRUE(table.tracks_creation(mine));
  table.answered(mine, Error(ErrorCode::remote_exception, "no luck"), effects);
  EXPECT_TRUE(table.tracks_creation(mine));
  table.drop_local(mine, effects);
  EXPECT_EQ(table.size(), 0u);
  table.receive(mine, {kFriend, 4, true, true}, std::nullopt, effects);
  EXPECT_FALSE(table.tracks_creation(mine)) << "only the owner knows how it ended";
}

TEST(HolderTable, OfARequestThatNeverLeftTheOwnerHearsWhereOthersKnowOfIt) {
  for (const bool told : {false, true}) {
    HolderTable table;
    TableEffects effects;
    const RRefId mine{kOwner, kHere, 0};
    table.begin_create(mine);
    EXPECT_EQ(told && table.pin(mine), told);
    table.create_not_sent(mine, Error(ErrorCode::overloaded, "no room"), effects);
    EXPECT_EQ(table.status(mine)->state, HolderTable::State::lost);
    EXPECT_EQ(count(effects, LedgerOp::Kind::unmade), told ? 1u : 0u);
    table.drop_local(mine, effects);
    EXPECT_EQ(count(effects, LedgerOp::Kind::drop), 0u) << "while another lives on its pin";
    if (told) table.unpin(mine, effects);
    EXPECT_EQ(count(effects, LedgerOp::Kind::drop), told ? 1u : 0u);
    EXPECT_EQ(table.size(), 0u);
  }
}

TEST(OwnerTable, WhatComesBeforeTheCreationQueuesBehindIt) {
  OwnerTable table(kOwner);
  TableEffects effects;
  int ran = 0;
  ASSERT_TRUE(table.add_holder(kObject, kHere));
  ASSERT_TRUE(table.receive(kObject, kHere));
  table.when_resolved(
      kObject, [&](const auto& object, const std::optional<Error>&) { ran += object != nullptr; },
      effects);
  EXPECT_TRUE(effects.run.empty());
  EXPECT_TRUE(table.create(kObject, kFriend));
  EXPECT_FALSE(table.create(kObject, kFriend)) << "a repeated request must not run again";
  EXPECT_TRUE(table.resolve(kObject, std::make_shared<int>(1), std::nullopt, effects));
  for (auto& run : effects.run) run();
  EXPECT_EQ(ran, 1);
  table.drop_local(kObject, effects);
  table.drop_holder(kObject, kHere, effects);
  EXPECT_TRUE(effects.destroy.empty());
  table.drop_holder(kObject, kFriend, effects);
  EXPECT_EQ(effects.destroy.size(), 1u);
  EXPECT_EQ(table.size(), 0u);
  EXPECT_FALSE(table.receive(kObject, kHere)) << "ids are never reused";
  EXPECT_FALSE(table.add_holder(kObject, kHere));
}

TEST(OwnerTable, TheFirstOutcomeOfACreationStands) {
  OwnerTable table(kOwner);
  TableEffects effects;
  ASSERT_TRUE(table.create(kObject, kFriend));
  EXPECT_TRUE(table.resolve(kObject, nullptr, Error(ErrorCode::timeout, "too late"), effects));
  EXPECT_FALSE(table.resolve(kObject, std::make_shared<int>(1), std::nullopt, effects));
  EXPECT_EQ(effects.destroy.size(), 1u) << "the late result";
  EXPECT_EQ(table.status(kObject)->failure->code(), ErrorCode::timeout);
}

const Error kNotSent(ErrorCode::cancelled, "it was not sent");

TEST(OwnerTable, WaitersOfAPlaceholderThatGoesEndWithoutTheLock) {
  OwnerTable table(kOwner);
  TableEffects effects;
  ASSERT_TRUE(table.receive(kObject, kHere));
  std::optional<Error> heard;
  table.when_resolved(
      kObject, [&](const auto&, const std::optional<Error>& failure) { heard = failure; }, effects);
  table.drop_local(kObject, effects);
  EXPECT_FALSE(table.contains(kObject));
  ASSERT_EQ(effects.run.size(), 1U);
  effects.run.front()();
  EXPECT_EQ(heard->code(), ErrorCode::cancelled);
}

TEST(OwnerTable, AnObjectThatWasNeverRequestedIsOneThatFailedAndThatItsCreatorHolds) {
  OwnerTable table(kOwner);
  TableEffects effects;
  ASSERT_TRUE(table.receive(kObject, kHere));
  std::optional<Error> heard;
  table.when_resolved(
      kObject, [&](const auto&, const std::optional<Error>& failure) { heard = failure; }, effects);
  table.not_requested(kObject, kNotSent, effects);
  for (auto& run : effects.run) run();
  ASSERT_TRUE(heard);
  EXPECT_EQ(heard->code(), ErrorCode::cancelled);
  table.drop_local(kObject, effects);
  ASSERT_TRUE(table.contains(kObject)) << "its creator holds it";
  EXPECT_TRUE(table.add_holder(kObject, kHere));
  EXPECT_EQ(table.status(kObject)->value, OwnerTable::Value::failed);
  table.drop_holder(kObject, kFriend, effects);
  table.drop_holder(kObject, kHere, effects);
  EXPECT_EQ(table.size(), 0u);
  EXPECT_TRUE(table.deleted(kObject));
}

TEST(OwnerTable, OfWhatWasNeverRequestedNothingIsKeptAfterItsLastReference) {
  OwnerTable table(kOwner);
  for (std::uint64_t k = 0; k < 1000; ++k) {
    const RRefId id{kOwner, kFriend, k};
    TableEffects effects;
    if (k % 2 == 0) {
      ASSERT_TRUE(table.create(id, kFriend));
      EXPECT_TRUE(table.resolve(id, std::make_shared<int>(1), std::nullopt, effects));
    } else {
      table.not_requested(id, kNotSent, effects);
    }
    table.drop_holder(id, kFriend, effects);
  }
  EXPECT_EQ(table.size(), 0u);
  EXPECT_EQ(table.counts().runs_remembered, 1u);
}

TEST(OwnerTable, WhatOneCreatorSaysItNeverRequestedIsBounded) {
  constexpr std::size_t kLimit = 100;
  OwnerTable table(kOwner, kLimit);
  TableEffects effects;
  const auto unmade = [&](const WorkerLife& creator, std::uint64_t k) {
    table.not_requested({kOwner, creator, k}, kNotSent, effects);
  };
  for (std::uint64_t k = 0; k < kLimit; ++k) unmade(kFriend, 2 * k);
  const Error error = stitch::testing::error_of([&] { unmade(kFriend, 1); });
  EXPECT_EQ(error.code(), ErrorCode::protocol);
  EXPECT_EQ(table.size(), kLimit);
  EXPECT_NO_THROW(unmade(kHere, 1)) << "another creator's";
  table.drop_holder({kOwner, kFriend, 0}, kFriend, effects);
  EXPECT_NO_THROW(unmade(kFriend, 1)) << "one of the others has ended";
}

TEST(OwnerTable, GapsBetweenTheRequestsOfACreatorEndWithItsSweep) {
  OwnerTable table(kOwner);
  TableEffects effects;
  const auto id = [](std::uint64_t k) { return RRefId{kOwner, kFriend, k}; };
  for (std::uint64_t k = 0; k < 1000; k += 2) {
    ASSERT_TRUE(table.create(id(k), kFriend));
    EXPECT_TRUE(table.resolve(id(k), std::make_shared<int>(1), std::nullopt, effects));
  }
  EXPECT_TRUE(table.add_holder(id(501), kHere));
  table.creator_lost(kFriend, Error(ErrorCode::disconnected, "it is lost"), effects);
  EXPECT_EQ(table.counts().runs_remembered, 500u);
  EXPECT_FALSE(table.deleted(id(1))) << "a worker that has not registered yet may have it";
  table.drop_life(kFriend, effects);
  EXPECT_EQ(table.counts().runs_remembered, 1u);
  EXPECT_TRUE(table.deleted(id(1)));
  EXPECT_TRUE(table.contains(id(501))) << "another worker holds it";
  table.drop_holder(id(501), kHere, effects);
  EXPECT_EQ(table.size(), 0u);
}

TEST(Lifetime, AnIdOfAnEarlierLifeIsLostNamingBothEpochs) {
  Lifetime owner({0, 2});
  (void)owner.receive({.id = {{0, 1}, kHere, 5}, .token = 3, .pinned = true}, kHere);
  const auto status = owner.status({{0, 1}, kHere, 5});
  ASSERT_TRUE(status.lost);
  EXPECT_EQ(status.lost->code(), ErrorCode::disconnected);
  EXPECT_STREQ(status.lost->what(), "worker 0 epoch 1 is gone; it is now epoch 2");
}

TEST(Lifetime, ABorrowerOfWhatWasNeverRequestedHearsOfItAfterItsCreatorHasDroppedIt) {
  Lifetime owner(kOwner), creator(kHere), borrower(kFriend);
  const auto exchange = [&] {
    Lifetime* const all[] = {&owner, &creator, &borrower};
    for (int i = 0; i < 4; ++i) {
      for (Lifetime* const from : all) {
        for (Lifetime* const to : all) {
          base::Bytes frame;
          if (from != to && from->encode_ledger(to->self(), frame)) {
            EXPECT_FALSE(to->accept_ledger(from->self(), frame.span()).broken);
          }
        }
      }
    }
  };
  const RRefId id = creator.begin_create(kOwner);
  (void)borrower.receive(creator.pin(id, kFriend), kHere);
  borrower.add_local(id);
  (void)creator.create_not_sent(id, Error(ErrorCode::overloaded, "no room"));
  (void)creator.drop_local(id);
  exchange();
  ASSERT_TRUE(owner.owned(id)) << "its creator holds it";
  EXPECT_EQ(owner.owned(id)->value, OwnerTable::Value::failed);
  (void)borrower.message_done(id, kHere);
  (void)borrower.register_kept();
  (void)borrower.register_kept();
  exchange();
  EXPECT_EQ(creator.counts().holds, 0u);
  EXPECT_EQ(owner.owned(id)->holders, std::vector<WorkerLife>{kFriend});
  EXPECT_EQ(owner.owned(id)->failure->code(), ErrorCode::cancelled);
  (void)borrower.drop_local(id);
  exchange();
  EXPECT_EQ(owner.counts().entries, 0u);
  EXPECT_EQ(owner.counts().owned.runs_remembered, 1u);
}

TEST(Lifetime, APeerThatSettlesWhatWasNotSentIsToldSo) {
  Lifetime here(kHere);
  Ledger rogue;
  rogue.push(LedgerOp::make_settle(0));
  base::Bytes frame;
  ASSERT_TRUE(rogue.encode(frame));
  const auto effects = here.accept_ledger(kFriend, frame.span());
  ASSERT_TRUE(effects.broken);
  EXPECT_EQ(effects.broken->code(), ErrorCode::protocol);
}

Lifetime::World of(std::set<WorkerLife> known) {
  return {.contains = [known](const WorkerLife& life) { return known.contains(life); },
          .live = [known] { return std::vector<WorkerLife>(known.begin(), known.end()); },
          .gone = {}};
}

// The REG of an object that arrives at its owner from kFriend.
Effects registration(Lifetime& owner, const RRefId& id) {
  Ledger ledger;
  ledger.push(LedgerOp::make_reg(id));
  base::Bytes frame;
  EXPECT_TRUE(ledger.encode(frame));
  return owner.accept_ledger(kFriend, frame.span());
}

// What kFriend is told about the REG of that object.
LedgerOp::Kind answer_to_registration(Lifetime& owner, const RRefId& id) {
  EXPECT_FALSE(registration(owner, id).broken);
  base::Bytes answer;
  EXPECT_TRUE(owner.encode_ledger(kFriend, answer));
  const auto ops = Ledger::decode(answer.span());
  EXPECT_EQ(ops.size(), 1U);
  EXPECT_EQ(ops.at(0).id, id);
  return ops.at(0).kind;
}

// An honest worker registers what another one has lent it: the owner must not give it up for that.
TEST(Lifetime, ARegistrationOfWhatIsNotThereIsAnsweredByGoneAndNotRefused) {
  Lifetime owner(kOwner);
  owner.set_world(of({kHere, kFriend}));
  const RRefId real = owner.add_object(std::make_shared<int>(1));
  EXPECT_EQ(answer_to_registration(owner, real), LedgerOp::Kind::registered);
  static_cast<void>(owner.drop_local(real));
  Ledger friends;
  friends.push(LedgerOp::make_drop(real));
  base::Bytes frame;
  ASSERT_TRUE(friends.encode(frame));
  EXPECT_FALSE(owner.accept_ledger(kFriend, frame.span()).broken);
  EXPECT_EQ(owner.counts().entries, 0U);
  EXPECT_EQ(answer_to_registration(owner, real), LedgerOp::Kind::gone) << "deleted";
  const RRefId never_made{kOwner, kOwner, real.k + 7};
  EXPECT_EQ(answer_to_registration(owner, never_made), LedgerOp::Kind::gone) << "made up";
  EXPECT_EQ(owner.counts().entries, 0U) << "no placeholder waits for it";
}

TEST(Lifetime, AHolderThatIsToldGoneHasLostItsReferenceAndNothingElse) {
  Lifetime here(kHere);
  static_cast<void>(here.receive({.id = kObject, .token = 0, .pinned = true}, kFriend));
  here.add_local(kObject);
  static_cast<void>(here.message_done(kObject, kFriend));
  static_cast<void>(here.register_kept());
  EXPECT_TRUE(here.register_kept().flush);
  Ledger owners;
  owners.push(LedgerOp::make_gone(kObject));
  base::Bytes frame;
  ASSERT_TRUE(owners.encode(frame));
  EXPECT_FALSE(here.accept_ledger(kOwner, frame.span()).broken);
  const auto status = here.status(kObject);
  ASSERT_TRUE(status.lost);
  EXPECT_EQ(status.lost->code(), ErrorCode::disconnected);
  EXPECT_FALSE(here.lost({kOwner, kFriend, 1}));
  static_cast<void>(here.drop_local(kObject));
  EXPECT_EQ(here.counts().holds, 0U);
}

// Its lender may be one to which it has lent it: neither may wait for the other.
TEST(HolderTable, WhatIsGoneIsSettledAtOnceAlthoughItHasBeenLentOn) {
  HolderTable table;
  TableEffects effects;
  table.receive(kObject, {kFriend, 5}, std::nullopt, effects);
  EXPECT_TRUE(table.pin(kObject));
  table.message_done(kObject, effects);
  table.register_kept(effects);
  table.register_kept(effects);
  ASSERT_EQ(count(effects, LedgerOp::Kind::reg), 1u);
  effects = {};
  table.gone(kObject, Error(ErrorCode::disconnected, "it is gone"), effects);
  EXPECT_EQ(count(effects, LedgerOp::Kind::settle), 1u);
}

TEST(Lifetime, AMadeUpNameIsLostWhereItArrivesAndStandsInForNoObject) {
  // Both name this worker as the creator of what it will make next.
  Lifetime here(kHere);
  for (const WorkerLife& owner : {kHere, kOwner}) {
    const RRefId made_up{owner, kHere, 0};
    static_cast<void>(here.receive({.id = made_up, .token = 0, .pinned = true}, kFriend));
    here.add_local(made_up);
    EXPECT_TRUE(here.status(made_up).lost);
    const RRefId real =
        owner == kHere ? here.add_object(std::make_shared<int>(1)) : here.begin_create(owner);
    EXPECT_NE(real, made_up);
    EXPECT_FALSE(here.status(real).lost);
    static_cast<void>(here.message_done(made_up, kFriend));
    static_cast<void>(here.drop_local(made_up));
    EXPECT_FALSE(here.status(real).lost);
  }
}

TEST(Lifetime, WhatOnePeerMakesAnOwnerRememberIsBoundedAndHarmsNoOther) {
  constexpr std::size_t kLimit = 100;
  Lifetime owner(kOwner, kLimit);
  owner.set_world(of({kHere, kFriend}));
  for (std::uint64_t k = 0; k < kLimit; ++k)
    EXPECT_EQ(answer_to_registration(owner, {kOwner, kHere, k}), LedgerOp::Kind::registered);
  EXPECT_EQ(answer_to_registration(owner, {kOwner, kHere, kLimit}), LedgerOp::Kind::gone);
  static_cast<void>(owner.receive({.id = {kOwner, kHere, kLimit}}, kFriend));
  EXPECT_TRUE(owner.status({kOwner, kHere, kLimit}).lost) << "in a message, too";
  EXPECT_EQ(owner.counts().entries, kLimit);
  static_cast<void>(owner.receive({.id = {kOwner, kFriend, 0}}, kHere));
  EXPECT_FALSE(owner.status({kOwner, kFriend, 0}).lost) << "another peer's";
  EXPECT_TRUE(owner.create({kOwner, kHere, 3}, kHere));
  EXPECT_EQ(answer_to_registration(owner, {kOwner, kHere, kLimit}), LedgerOp::Kind::registered)
      << "the request for one of the others has come";
}

TEST(Lifetime, ACreatorThatWasNeverHeardOfIsOverWhenALaterLifeOfItIsKnown) {
  const WorkerLife creator{7, 70}, later{7, 71};
  for (const bool known : {true, false}) {
    Lifetime owner(kOwner);
    owner.set_world(known ? of({kHere, kFriend, later}) : of({kHere, kFriend}));
    const RRefId id{kOwner, creator, 0};
    std::optional<Error> failure;
    static_cast<void>(owner.receive({.id = id}, kFriend));
    for (auto& run :
         owner.when_created(id, [&](const auto&, const auto& why) { failure = why; }).run)
      run();
    EXPECT_EQ(failure.has_value(), known);
    for (auto& run : owner.member_joined(later).run) run();
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->code(), ErrorCode::disconnected);
    static_cast<void>(owner.message_done(id, kFriend));
    EXPECT_EQ(owner.counts().entries, 0u);
  }
}

TEST(Lifetime, OfLivesThatOnlyAPeerHasNamedFewAreRemembered) {
  for (const auto op : {&LedgerOp::make_sweep, &LedgerOp::make_ask}) {
    Lifetime worker(kOwner);
    worker.set_world(of({kHere, kFriend}));
    for (std::uint64_t named = 0; named < 5000;) {
      Ledger ledger;
      for (std::size_t i = 0; i < Ledger::kMaxOps; ++i) ledger.push(op({7, ++named}));
      base::Bytes frame;
      ASSERT_TRUE(ledger.encode(frame));
      EXPECT_FALSE(worker.accept_ledger(kFriend, frame.span()).broken);
    }
    const WorkerLife later{7, 6000};
    worker.set_world(of({kHere, kFriend, later}));
    static_cast<void>(worker.member_joined(later));
    // The news of so many may be on its way.
    std::size_t clean = 0;
    for (base::Bytes answer; worker.encode_ledger(kFriend, answer); answer = {}) {
      for (const LedgerOp& each : Ledger::decode(answer.span()))
        clean += each.kind == LedgerOp::Kind::clean ? 1U : 0U;
    }
    EXPECT_EQ(clean + worker.counts().unswept, 4096U);
  }
}

TEST(Lifetime, OfLivesBeforeTheOneThatIsKnownNothingIsKept) {
  Lifetime worker(kOwner);
  worker.set_world(of({kHere, kFriend, {7, 1000}}));
  Ledger ledger;
  for (std::uint64_t epoch = 0; epoch < Ledger::kMaxOps; ++epoch)
    ledger.push(LedgerOp::make_sweep({7, epoch}));
  base::Bytes frame, answer;
  ASSERT_TRUE(ledger.encode(frame));
  EXPECT_FALSE(worker.accept_ledger(kFriend, frame.span()).broken);
  ASSERT_TRUE(worker.encode_ledger(kFriend, answer));
  EXPECT_EQ(Ledger::decode(answer.span()).size(), Ledger::kMaxOps)
      << "nothing was borrowed from these";
  EXPECT_EQ(worker.counts().unswept, 0U);
  EXPECT_FALSE(worker.over({7, 999}));
}

}  // namespace
}  // namespace stitch::rref::tables_test
