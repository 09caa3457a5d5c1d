// The dumps that stitch-run --diagnose reads, and what it says of them.
#include <string>

#include "diagnose.h"
#include "diagnose_dump.h"
#include "diagnose_waits.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::dump_files {

constexpr char kBetweenDumps = '\0';
constexpr std::size_t kMaxDumps = 8;

static stitch_run::Dump read(const std::string& text) {
  const base::Descriptor file = memory_file(std::as_bytes(std::span(text)));
  return stitch_run::read_dump(path_of(file));
}

// The input: dumps, with a zero between them.
static bool run(Bytes input) {
  const std::string text = text_of(input);
  stitch_run::Dumps dumps;
  std::size_t read_well = 0;
  std::size_t all = 0;
  for (std::size_t at = 0; at <= text.size() && all < kMaxDumps; ++all) {
    const auto end = std::min(text.find(kBetweenDumps, at), text.size());
    try {
      stitch_run::Dump dump = read(text.substr(at, end - at));
      for (const char each : dump.name + dump.host + dump.reason)
        require(static_cast<unsigned char>(each) >= 0x20 && each != 0x7f,
                "a text of a dump has control characters");
      dumps.by_worker.insert_or_assign(dump.name, std::move(dump));
      ++read_well;
    } catch (const std::runtime_error&) {
      // It says what is wrong with the file.
    }
    at = end + 1;
  }
  if (dumps.by_worker.empty()) return false;
  for (const auto& chain : stitch_run::find_waits(dumps))
    require(!chain.text.empty(), "a chain of waits says nothing");
  require(!stitch_run::diagnosis_text(dumps).empty(), "a diagnosis says nothing");
  require(!stitch_run::diagnosis_dot(dumps).empty(), "a picture is empty");
  return read_well == all;
}

static std::string dump_of(const std::string& name, const std::string& tables) {
  return R"({"stitch_dump": 1, "name": ")" + name +
         R"(", "id": 0, "epoch": 1, "pid": 1, "host": "h", "reason": "timeout", "time": 100, )"
         R"("tables": [)" +
         tables + "]}";
}

static Seeds seeds() {
  const std::string members =
      R"({"name": "members", "columns": ["name", "id", "epoch", "life", "state"], )"
      R"("rows": [["a", 0, 1, "alive", "connected"], ["b", 1, 1, "alive", "connected"], )"
      R"(["c", 2, 1, "dead", "lost"]]})";
  const std::string made =
      R"({"name": "calls made", "columns": ["call", "function", "to", "age", "state"], )"
      R"("rows": [[7, "f", "b", 12.5, "waits for an answer"], [8, "g", "c", 1, "sent"]]})";
  const std::string waiting =
      R"({"name": "threads that wait", "columns": ["thread", "call", "depth", "function"], )"
      R"("rows": [[1, 7, 1, "f"]]})";
  const std::string served =
      R"({"name": "calls served", "columns": ["caller", "call", "function", "stage", )"
      R"("running for", "thread", "age", "thread state"], )"
      R"("rows": [["a", 7, "f", "running", 12, 5, 12.5, "sleeps"], )"
      R"(["a", 9, "h", "queued", 0, 0, 2, ""]]})";
  const std::string back =
      R"({"name": "calls made", "columns": ["call", "function", "to", "age", "state", )"
      R"("under caller", "under call"], "rows": [[3, "g", "a", 12, "sent", "a", 7]]})";
  const std::string pool = R"({"name": "pool", "columns": ["limit", "queued"], "rows": [[1, 1]]})";
  const std::string passes =
      R"({"name": "backward passes", "columns": ["context", "age", "thread", "waits for", )"
      R"("root here"], "rows": [["0.1/5", 3, 0, "b", 1]]})";
  const std::string shutdown = R"({"name": "shutdown", "columns": ["worker", "waits for", "age"], )"
                               R"("rows": [["b", "its leave", 2]]})";
  const std::string zero(1, kBetweenDumps);
  Seeds list;
  list.push_back({"one", bytes_of(dump_of("a", members + ", " + made + ", " + waiting))});
  list.push_back({"two", bytes_of(dump_of("a", members + ", " + made + ", " + waiting) + zero +
                                  dump_of("b", served + ", " + pool))});
  list.push_back({"circle", bytes_of(dump_of("a", made + ", " + served) + zero +
                                     dump_of("b", served + ", " + back))});
  list.push_back({"passes", bytes_of(dump_of("a", passes) + zero + dump_of("b", passes))});
  list.push_back({"shutdown", bytes_of(dump_of("a", shutdown))});
  return list;
}

}  // namespace stitch::fuzz::dump_files

namespace stitch::fuzz {
// A value of one byte takes about 50, twice: as it was read, and in its table.
const Target dumps{"dumps", dump_files::run, dump_files::seeds, 512, std::size_t{2} << 20};
}  // namespace stitch::fuzz
