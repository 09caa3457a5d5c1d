#include "tests/support/world_test.h"

// Mistakes of a program become errors that name the mistake.
namespace misuse_test {
namespace {

using namespace stitch::testing;

int one() { return 1; }

// --- exceptions of handlers

struct Textless : std::exception {
  [[nodiscard]] const char* what() const noexcept override { return nullptr; }
};
struct Foreign {};
enum class Thrown { textless, null_text, null_pointer, foreign, number, text };
int throws(Thrown what) {
  switch (what) {
    case Thrown::textless:
      throw Textless();
    case Thrown::null_text:
      throw static_cast<const char*>(nullptr);
    case Thrown::null_pointer:
      throw nullptr;
    case Thrown::foreign:
      throw Foreign();
    case Thrown::number:
      throw 42;
    case Thrown::text:
      throw "a text";
  }
  return 0;
}
Future<int> fails_with(Thrown what) {
  return make_ready(1).then([what](int) { return throws(what); });
}

TEST(Misuse, WhateverAHandlerThrowsArrivesAsAnError) {
  Cluster cluster(2);
  const auto expect = [](Thrown what, const std::string& text) {
    for (const auto& error : {error_of([&] { rpc_sync<throws>("worker1", what); }),
                              error_of([&] { rpc_sync<fails_with>("worker1", what); })}) {
      EXPECT_TRUE(has_text(error, ErrorCode::remote_exception, "failed: " + text));
      EXPECT_TRUE(std::string(error.what()).ends_with(text)) << error.what();
    }
  };
  expect(Thrown::textless, "misuse_test::(anonymous namespace)::Textless without a text");
  expect(Thrown::null_text, "a null const char*");
  expect(Thrown::null_pointer, "a null const char*");
  expect(Thrown::foreign,
         "misuse_test::(anonymous namespace)::Foreign, which is not derived from std::exception");
  expect(Thrown::number, "int, which is not derived from std::exception");
  expect(Thrown::text, "const char*: a text");
  EXPECT_EQ(rpc_sync<one>("worker1"), 1);
}

TEST(Misuse, ANullExceptionIsDescribed) {
  EXPECT_EQ(stitch::to_error(nullptr).code(), ErrorCode::internal);
  EXPECT_EQ(stitch::describe(nullptr), "an error without an exception");
}

// --- empty futures

Future<int> returns_empty() { return {}; }
Future<void> returns_empty_void() { return {}; }

TEST(Misuse, AHandlerThatReturnsAnEmptyFutureIsAnErrorOfItsCall) {
  Cluster cluster(2);
  for (const auto& error : {error_of([] { rpc_sync<returns_empty>("worker1"); }),
                            error_of([] { rpc_sync<returns_empty_void>("worker1"); })}) {
    EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "the function returned an empty"));
    EXPECT_TRUE(contains(error.what(), "returns_empty")) << error.what();
    EXPECT_EQ(error.worker(), "worker1");
  }
  EXPECT_EQ(rpc_sync<one>("worker1"), 1);
}

Future<int> awaits(Future<int> future) { co_return co_await future; }
Future<int> awaits_moved(Future<int> future) { co_return co_await std::move(future); }

TEST(Misuse, AnEmptyFutureSaysWhatWasAskedOfIt) {
  const Future<int> empty;
  const auto expect = [](const std::function<void()>& use, const std::string& text) {
    EXPECT_TRUE(has_text(error_of(use), ErrorCode::invalid_argument, text));
  };
  expect([&] { static_cast<void>(empty.get()); }, "get() of an empty future");
  expect([] { static_cast<void>(Future<int>().get()); }, "get() of an empty future");
  expect([] { Future<void>().get(); }, "get() of an empty future");
  expect([&] { static_cast<void>(empty.wait_for(1ms)); }, "wait_for() of an empty future");
  expect([&] { static_cast<void>(empty.ready()); }, "ready() of an empty future");
  expect([&] { static_cast<void>(empty.has_error()); }, "has_error() of an empty future");
  expect([&] { static_cast<void>(empty.error()); }, "error() of an empty future");
  expect([&] { empty.cancel(); }, "cancel() of an empty future");
  expect([&] { static_cast<void>(empty.then([](int x) { return x; })); },
         "then() of an empty future");
  expect([&] { empty.on_ready([] {}); }, "on_ready() of an empty future");
  expect([&] { static_cast<void>(awaits(empty).get()); }, "co_await of an empty future");
  expect([&] { static_cast<void>(awaits_moved(empty).get()); }, "co_await of an empty future");
  expect([&] { static_cast<void>(make_ready(1).then([](int) { return Future<int>(); }).get()); },
         "the function returned an empty future");
}

TEST(Misuse, AGroupSaysWhichFutureIsEmpty) {
  const auto good = make_ready(1);
  const auto expect = [](const std::function<void()>& use, const std::string& text) {
    EXPECT_TRUE(has_text(error_of(use), ErrorCode::invalid_argument, text));
  };
  using Futures = std::vector<Future<int>>;
  expect(
      [&] {
        static_cast<void>(when_all(Futures{good, {}}));
      },
      "when_all() was given an empty future, at index 1");
  expect([&] { static_cast<void>(when_all(good, Future<void>(), good)); },
         "when_all() was given an empty future, at index 1");
  expect(
      [&] {
        static_cast<void>(when_any(Futures{{}, good}));
      },
      "when_any() was given an empty future, at index 0");
  expect([&] { static_cast<void>(when_any(good, good, Future<int>())); },
         "when_any() was given an empty future, at index 2");
  expect([&] { static_cast<void>(when_any(good, Future<void>())); },
         "when_any() was given an empty future, at index 1");
}

TEST(Misuse, ANullExceptionIsNotAValue) {
  const Promise<int> promise;
  EXPECT_TRUE(promise.set_exception(nullptr));
  EXPECT_TRUE(promise.future().has_error());
  EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(promise.future().get()); }),
                       ErrorCode::invalid_argument, "promise was given a null exception"));
  const Promise<void> nothing;
  nothing.set_exception(nullptr);
  EXPECT_THROW(nothing.future().get(), Error);
}

TEST(Misuse, APromiseGivesItsFutureUnderTheNameOfTheStandardToo) {
  const Promise<int> promise;
  const auto future = promise.get_future();
  promise.set_value(3);
  EXPECT_EQ(future.get(), 3);
}

TEST(Misuse, APromiseThatWasMovedFromSaysSo) {
  Promise<int> promise;
  const Promise<int> kept = std::move(promise);
  // NOLINTNEXTLINE(bugprone-use-after-move): that is the subject
  EXPECT_TRUE(has_text(error_of([&] { promise.set_value(1); }), ErrorCode::invalid_argument,
                       "set_value() of a promise that was moved from"));
  EXPECT_EQ(error_of([&] { static_cast<void>(promise.future()); }).code(),
            ErrorCode::invalid_argument);
  EXPECT_TRUE(kept.set_value(2));
}

TEST(Misuse, AWorkerThatWasMovedFromSaysSo) {
  Cluster cluster(2);
  Worker kept = std::move(cluster[0]);
  Worker& gone = cluster[0];
  const std::vector<std::function<void()>> uses{
      [&] { static_cast<void>(gone.name()); },
      [&] { static_cast<void>(gone.world_size()); },
      [&] { static_cast<void>(gone.worker("worker1")); },
      [&] { static_cast<void>(gone.debug_info()); },
      [&] { gone.rpc_sync<one>("worker1"); },
      [&] { static_cast<void>(gone.rpc_async<one>("worker1")); },
      [&] { gone.notify<one>("worker1"); },
      [&] { gone.barrier(); },
      [&] { static_cast<void>(gone.all_gather(1)); },
      [&] { gone.shutdown(); },
      [&] { const WorkerScope in(gone); },
  };
  for (const auto& use : uses) {
    EXPECT_TRUE(has_text(error_of(use), ErrorCode::invalid_argument,
                         "this Worker was moved from: use the one that it was moved to"));
  }
  EXPECT_EQ(kept.rpc_sync<one>("worker1"), 1);
  gone = std::move(kept);
}

struct Unwritable {
  template <class Archive>
  void serialize(Archive&) {
    throw std::runtime_error("not today");
  }
};
void take(Unwritable) {}

TEST(Misuse, WhatTheSerializeFunctionOfAnArgumentThrowsIsTheProgramsMistake) {
  const Cluster cluster(2);
  const auto error = error_of([] { rpc_sync<take>("worker1", Unwritable{}); });
  EXPECT_TRUE(
      has_text(error, ErrorCode::invalid_argument, "was not made: std::runtime_error: not today"));
  EXPECT_EQ(error.worker(), "worker1");
}

// --- gatherings that do not match

// Runs one function on each worker concurrently; returns what each threw.
std::vector<Error> errors_of_all(Cluster& cluster,
                                 const std::vector<std::function<void(Worker&)>>& parts) {
  std::vector<Error> errors(parts.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      threads.emplace_back(
          [&, i] { errors[i] = error_of([&] { parts[i](cluster[static_cast<int>(i)]); }); });
    }
  }
  return errors;
}
template <class T>
std::function<void(Worker&)> gathers(T value) {
  return [value](Worker& worker) { static_cast<void>(worker.all_gather(value)); };
}
void joins_barrier(Worker& worker) { worker.barrier(); }
// They can be used together afterwards.
void expect_in_step(Cluster& cluster) {
  on_each(cluster.size(), [&](int rank) {
    cluster[rank].barrier();
    EXPECT_EQ(cluster[rank].all_gather(rank).size(), static_cast<std::size_t>(cluster.size()));
  });
}

TEST(Misuse, AGatheringOfOtherTypesFailsOnEveryWorkerNamingBoth) {
  Cluster cluster(2);
  const auto errors = errors_of_all(cluster, {gathers(7), gathers(7.5)});
  for (int rank = 0; rank < 2; ++rank) {
    const Error& error = errors[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                         rank == 0 ? "all_gather of int on worker \"worker0\" (id 0) failed: worker"
                                   : "all_gather of double on worker \"worker1\" (id 1) failed: "));
    EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                         "worker \"worker0\" (id 0) in an all_gather of int") ||
                has_text(error, ErrorCode::invalid_argument,
                         "worker \"worker0\" (id 0) is in an all_gather of int"));
    EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "in an all_gather of double"));
  }
  expect_in_step(cluster);
}

TEST(Misuse, ABarrierThatMeetsAGatheringFailsOnEveryWorker) {
  Cluster cluster(3);
  for (const auto& gathering : {gathers(true), gathers(std::string("text"))}) {
    const auto errors = errors_of_all(cluster, {joins_barrier, gathering, joins_barrier});
    EXPECT_TRUE(has_text(errors[0], ErrorCode::invalid_argument,
                         "barrier on worker \"worker0\" (id 0) failed: "));
    EXPECT_TRUE(has_text(errors[0], ErrorCode::invalid_argument, "in an all_gather of "));
    EXPECT_TRUE(has_text(errors[1], ErrorCode::invalid_argument, "in a barrier"));
    EXPECT_TRUE(has_text(errors[2], ErrorCode::invalid_argument, "in an all_gather of "));
    expect_in_step(cluster);
  }
}

}  // namespace
}  // namespace misuse_test
