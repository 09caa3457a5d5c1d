// What a chaos run came to.
#include <algorithm>
#include <cstdio>

#include "chaos_run.h"

namespace stitch_reliability {

namespace {

using Count = unsigned long long;

struct Row {
  Count made = 0;
  std::array<Count, kOutcomes> by_outcome{};  // kNone: its caller died before it knew
  Count lost = 0;                             // no outcome, though its caller lives
  Count unserved = 0;                         // a result, though no callee has run it
  Count twice = 0;                            // run twice, or ended twice
};

// Operations that their callee notes as run.
bool is_run(Kind kind) {
  return kind != Kind::backward && kind != Kind::step && kind != Kind::one_way;
}

std::array<Row, kKinds> count(CallBook& book) {
  std::array<Row, kKinds> rows;
  for (std::uint64_t number = 1; number <= book.operations(); ++number) {
    const auto& operation = book.operation(number);
    const Kind kind = operation.kind;
    const Outcome outcome = operation.outcome;
    Row& row = rows.at(static_cast<std::size_t>(kind));
    ++row.made;
    ++row.by_outcome.at(outcome);
    const End end = book.lives.at(operation.life).end;
    row.lost += outcome == kNone && end != End::killed ? 1 : 0;
    row.unserved += outcome == kOk && is_run(kind) && operation.runs == 0 ? 1 : 0;
    row.twice += operation.runs > 1 || operation.ends > 1 ? 1 : 0;
  }
  return rows;
}

Count sum(const std::array<Row, kKinds>& rows, Count Row::*field) {
  Count all = 0;
  for (const Row& row : rows) all += row.*field;
  return all;
}

Count sum(const std::array<Row, kKinds>& rows, Outcome outcome) {
  Count all = 0;
  for (const Row& row : rows) all += row.by_outcome.at(outcome);
  return all;
}

void line(const char* what, Count number) { std::printf("  %-46s %12llu\n", what, number); }

void print_operations(const std::array<Row, kKinds>& rows) {
  std::printf("\n  %-18s %10s %10s", "operation", "made", "ok");
  for (Outcome outcome = kOk + 1; outcome < kOutcomes; ++outcome) {
    if (sum(rows, outcome) == 0) continue;
    const auto code = static_cast<stitch::ErrorCode>(outcome - 1);
    std::printf(" %16s", std::string(stitch::to_string(code)).c_str());
  }
  std::printf(" %12s\n", "caller died");
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    const Row& row = rows[kind];
    std::printf("  %-18s %10llu %10llu", to_string(static_cast<Kind>(kind)), row.made,
                row.by_outcome[kOk]);
    for (Outcome outcome = kOk + 1; outcome < kOutcomes; ++outcome) {
      if (sum(rows, outcome) != 0) std::printf(" %16llu", row.by_outcome.at(outcome));
    }
    std::printf(" %12llu\n", row.by_outcome[kNone] - row.lost);
  }
}

// One error of each reason, to be read.
void print_samples(const CallBook& book) {
  for (Outcome outcome = kOk + 1; outcome < kOutcomes; ++outcome) {
    const auto& sample = book.samples.at(outcome);
    if (!sample.taken) continue;
    const auto code = static_cast<stitch::ErrorCode>(outcome - 1);
    std::printf("  the first %s: %s\n", std::string(stitch::to_string(code)).c_str(),
                sample.text.data());
  }
}

void print_memory(const CallBook& book, int workers, int lives) {
  std::printf(
      "\n  memory of its own (RssAnon), MiB, of each worker's last life:\n  %-12s %10s %10s\n", "",
      "3 s in", "at the end");
  std::int64_t objects = 0;
  std::int64_t contexts = 0;
  int graceful = 0;
  for (int rank = 0; rank < workers; ++rank) {
    const Life* last = nullptr;
    int its_lives = 0;
    for (int life = 1; life <= lives; ++life) {
      const Life& each = book.lives.at(static_cast<std::size_t>(life));
      if (each.rank != rank) continue;
      last = &each;
      ++its_lives;
    }
    if (last == nullptr) continue;
    objects += last->objects_left;
    contexts += last->contexts_left;
    graceful += last->left_gracefully ? 1 : 0;
    std::printf("  worker%-6d %10.1f %10.1f   (life %d)\n", rank,
                static_cast<double>(last->kib_at_start) / 1024,
                static_cast<double>(last->kib_at_end) / 1024, its_lives);
  }
  std::printf("\n");
  line("objects left at the end", static_cast<Count>(objects));
  line("contexts left at the end", static_cast<Count>(contexts));
  line("workers that left gracefully at the end", static_cast<Count>(graceful));
}

}  // namespace

bool print_table(CallBook& book, const ChaosCounts& counts, int workers, int lives) {
  const auto rows = count(book);
  const Count lost = sum(rows, &Row::lost);
  const Count twice = sum(rows, &Row::twice);
  const Count unserved = sum(rows, &Row::unserved);
  std::printf("\n%d workers, %.1f s\n\n", workers, counts.seconds);
  for (std::size_t type = 0; type < counts.events.size(); ++type) {
    line((std::string("events: ") + to_string(static_cast<Event::Type>(type))).c_str(),
         static_cast<Count>(counts.events[type]));
  }
  line("restarts", static_cast<Count>(counts.restarts));
  line("  by themselves (declared dead, or links lost)",
       static_cast<Count>(counts.came_back_by_themselves));
  line("starts that failed", static_cast<Count>(counts.failed_starts));
  Count replaced = 0;
  for (int life = 1; life <= lives; ++life)
    replaced += static_cast<Count>(
        book.lives.at(static_cast<std::size_t>(life)).connections_replaced.load());
  line("connections replaced, as both ends count", replaced);
  print_operations(rows);
  std::printf("\n");
  print_samples(book);
  std::printf("\n");
  line("operations made", sum(rows, &Row::made));
  line("ok", sum(rows, kOk));
  line("lost (no outcome)", lost);
  line("executed twice", twice);
  line("hung (no outcome in time)", static_cast<Count>(counts.hung));
  line("answered, but not executed", unserved);
  line("wrong results", book.wrong);
  line("backward passes compared", book.passes);
  line("rounds of optimizer steps compared", book.steps);
  line("processes that crashed", static_cast<Count>(counts.crashes));
  line("lines on stderr", static_cast<Count>(counts.stderr_lines));
  print_memory(book, workers, lives);
  return lost == 0 && twice == 0 && unserved == 0 && counts.hung == 0 && counts.crashes == 0 &&
         book.wrong == 0;
}

}  // namespace stitch_reliability
