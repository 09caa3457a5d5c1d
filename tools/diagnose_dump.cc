#include "diagnose_dump.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace stitch_run {
namespace {

constexpr std::uintmax_t kMaxFileBytes = std::uintmax_t{64} << 20;
constexpr std::size_t kMaxText = 300;
constexpr std::size_t kMaxFiles = 20'000;

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error(why); }

std::string required_text(const Json& dump, std::string_view name) {
  const Json* const value = dump.member(name);
  if (value == nullptr || value->text() == nullptr)
    refuse("\"" + std::string(name) + "\" is missing or is no text");
  return readable(*value->text());
}

double required_number(const Json& dump, std::string_view name) {
  const Json* const value = dump.member(name);
  if (value == nullptr || value->number() == nullptr)
    refuse("\"" + std::string(name) + "\" is missing or is no number");
  return *value->number();
}

}  // namespace

std::string readable(std::string_view text) {
  std::string result(text.substr(0, kMaxText));
  for (char& c : result) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  if (text.size() > kMaxText) result += "...";
  return result;
}

const Json* DumpRow::find(std::string_view column) const {
  const auto found = std::find(columns_->begin(), columns_->end(), column);
  const auto index = static_cast<std::size_t>(found - columns_->begin());
  return index < cells_->size() && found != columns_->end() ? &(*cells_)[index] : nullptr;
}

std::string DumpRow::text(std::string_view column) const {
  const Json* const cell = find(column);
  return cell == nullptr || cell->text() == nullptr ? "" : readable(*cell->text());
}

double DumpRow::number(std::string_view column) const {
  const Json* const cell = find(column);
  return cell == nullptr || cell->number() == nullptr ? 0 : *cell->number();
}

bool DumpRow::has(std::string_view column) const {
  const Json* const cell = find(column);
  return cell != nullptr && !std::holds_alternative<std::monostate>(cell->value);
}

std::vector<DumpRow> Dump::rows(std::string_view table) const {
  std::vector<DumpRow> rows;
  const auto found = tables_.find(table);
  if (found == tables_.end()) return rows;
  for (const Json::Array& cells : found->second.rows)
    rows.emplace_back(found->second.columns, cells);
  return rows;
}

Dump read_dump(const std::filesystem::path& file) {
  if (!std::filesystem::is_regular_file(file)) refuse("it is no file");
  if (std::filesystem::file_size(file) > kMaxFileBytes)
    refuse("it has more than " + std::to_string(kMaxFileBytes) + " bytes");
  std::ifstream in(file, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  if (!in) refuse("it cannot be read");
  const Json json = parse_json(text);
  const Json* const version = json.member("stitch_dump");
  if (version == nullptr || version->number() == nullptr) refuse("it is no dump of stitch");
  if (*version->number() != 1) {
    refuse("it is of version " +
           std::to_string(static_cast<long>(std::clamp(*version->number(), 0.0, 1e9))) +
           " of dumps, and this program reads version 1");
  }
  Dump dump;
  dump.file = readable(file.filename().string());
  dump.name = required_text(json, "name");
  dump.id = required_number(json, "id");
  dump.epoch = required_number(json, "epoch");
  if (const Json* const world = json.member("world"); world != nullptr && world->text() != nullptr)
    dump.world = readable(*world->text());
  const double pid = required_number(json, "pid");
  dump.pid = pid >= 0 && pid < 1e9 ? static_cast<long>(pid) : 0;
  dump.host = required_text(json, "host");
  dump.reason = required_text(json, "reason");
  dump.time = required_number(json, "time");
  const Json* const tables = json.member("tables");
  if (tables == nullptr || tables->array() == nullptr)
    refuse("\"tables\" is missing or is no list");
  for (const Json& each : *tables->array()) {
    const Json* const columns = each.member("columns");
    const Json* const rows = each.member("rows");
    if (columns == nullptr || columns->array() == nullptr || rows == nullptr ||
        rows->array() == nullptr)
      refuse("a table has no columns or no rows");
    Dump::Table table;
    for (const Json& column : *columns->array()) {
      if (column.text() == nullptr) refuse("the name of a column is no text");
      table.columns.push_back(*column.text());
    }
    for (const Json& row : *rows->array()) {
      if (row.array() == nullptr || row.array()->size() != table.columns.size())
        refuse("a row of table \"" + required_text(each, "name") + "\" does not fit its columns");
      table.rows.push_back(*row.array());
    }
    dump.tables_.insert_or_assign(required_text(each, "name"), std::move(table));
  }
  return dump;
}

const Dump* Dumps::find(std::string_view worker) const {
  const auto found = by_worker.find(worker);
  return found == by_worker.end() ? nullptr : &found->second;
}

namespace {

// What a folder has of one world.
struct Run {
  std::map<std::string, Dump, std::less<>> by_worker;
  std::map<std::string, Dump, std::less<>> running;
  std::vector<std::string> former_lives;
  double newest = 0;  // dump of it
};

// What a former life of a worker has written says nothing about the one that runs.
void leave_out_former_lives(Run& run) {
  for (auto each = run.by_worker.begin(); each != run.by_worker.end();) {
    const Dump& dump = each->second;
    const auto sign = run.running.find(each->first);
    if (sign == run.running.end() || sign->second.epoch <= dump.epoch) {
      ++each;
      continue;
    }
    char epochs[80];
    std::snprintf(epochs, sizeof(epochs), " is of epoch %.0f, and epoch %.0f runs", dump.epoch,
                  sign->second.epoch);
    run.former_lives.push_back("\"" + dump.file + "\": worker \"" + dump.name + "\"" + epochs);
    each = run.by_worker.erase(each);
  }
}

// The newest files of a folder, of those that are read.
class NewestFiles {
 public:
  void add(const std::filesystem::directory_entry& entry) {
    std::error_code error;
    const auto time = entry.last_write_time(error);
    files_.emplace_back(error ? std::filesystem::file_time_type::min() : time, entry.path());
    if (files_.size() == 2 * kMaxFiles) cut();
  }
  // By name.
  [[nodiscard]] std::vector<std::filesystem::path> take() {
    cut();
    std::vector<std::filesystem::path> paths;
    for (auto& file : files_) paths.push_back(std::move(file.second));
    std::sort(paths.begin(), paths.end());
    return paths;
  }

 private:
  void cut() {
    if (files_.size() <= kMaxFiles) return;
    const auto end = files_.begin() + static_cast<std::ptrdiff_t>(kMaxFiles);
    std::nth_element(files_.begin(), end, files_.end(), std::greater<>());
    files_.erase(end, files_.end());
  }
  std::vector<std::pair<std::filesystem::file_time_type, std::filesystem::path>> files_;
};

std::string other_run_text(const std::string& world, const Run& run, double newest) {
  std::string text = world.empty() ? "files without the number of a world" : "world " + world;
  if (run.by_worker.empty()) {
    return text + ": no dump, but " + std::to_string(run.running.size()) +
           " workers run that write them there: send them SIGUSR1";
  }
  return text + ": dumps of " + std::to_string(run.by_worker.size()) + " workers, " +
         std::to_string(static_cast<long long>(std::clamp(newest - run.newest, 0.0, 1e12))) +
         " s older";
}

// The run of the newest dump; the others are named. Empty if none has a dump. Takes it out of
// `runs`.
Dumps newest_run(std::map<std::string, Run>& runs) {
  Dumps dumps;
  auto newest = runs.end();
  for (auto each = runs.begin(); each != runs.end(); ++each) {
    if (each->second.by_worker.empty()) continue;
    if (newest == runs.end() || each->second.newest > newest->second.newest) newest = each;
  }
  if (newest == runs.end()) return dumps;
  for (const auto& [world, run] : runs) {
    if (&run != &newest->second)
      dumps.other_runs.push_back(other_run_text(world, run, newest->second.newest));
  }
  dumps.by_worker = std::move(newest->second.by_worker);
  dumps.running = std::move(newest->second.running);
  dumps.former_lives = std::move(newest->second.former_lives);
  return dumps;
}

}  // namespace

Dumps read_dumps(const std::filesystem::path& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    refuse("\"" + folder.string() +
           "\" is not a folder; dumps are in the one that Options::dump_dir or STITCH_DUMP_DIR "
           "named");
  }
  NewestFiles newest;
  NewestFiles newest_signs;  // of workers that run for long: they are old
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".json") continue;
    const bool sign = entry.path().stem().extension() == ".running";
    (sign ? newest_signs : newest).add(entry);
  }
  std::vector<std::filesystem::path> files = newest.take();
  for (auto& sign : newest_signs.take()) files.push_back(std::move(sign));
  std::map<std::string, Run> runs;  // by world
  std::vector<std::string> left_out;
  for (const auto& file : files) {
    try {
      Dump dump = read_dump(file);
      Run& run = runs[dump.world];
      auto& all = dump.only_running() ? run.running : run.by_worker;
      const auto found = all.find(dump.name);
      const bool newer = found == all.end() || dump.epoch > found->second.epoch ||
                         (dump.epoch == found->second.epoch && dump.time >= found->second.time);
      if (newer) all.insert_or_assign(dump.name, std::move(dump));
    } catch (const std::exception& why) {
      left_out.push_back("\"" + readable(file.filename().string()) + "\": " + readable(why.what()));
    }
  }
  for (auto& [world, run] : runs) {
    leave_out_former_lives(run);
    for (const auto& [name, dump] : run.by_worker) run.newest = std::max(run.newest, dump.time);
  }
  Dumps dumps = newest_run(runs);
  dumps.left_out = std::move(left_out);
  if (dumps.by_worker.empty()) {
    std::string text = "there is no dump in \"" + folder.string() + "\"";
    std::size_t running = 0;
    for (const auto& [world, run] : runs) running += run.running.size();
    if (running > 0) {
      text += ", but " + std::to_string(running) +
              " workers run that write them there: send them SIGUSR1";
    }
    for (const std::string& each : dumps.left_out) text += "\n  left out: " + each;
    for (const auto& [world, run] : runs) {
      for (const std::string& each : run.former_lives) text += "\n  left out: " + each;
    }
    refuse(text);
  }
  return dumps;
}

}  // namespace stitch_run
